"""The fake cloud as a test has it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fake_cloud.machine import Cloud
from tests.support.stack import ROOT


class FakeCloud:
    """`with FakeCloud(folder) as cloud:`; its programs are in `cloud.bin`. A task has an empty disk at each start."""

    def __init__(self, folder: Path, variables: Mapping[str, str] = {}) -> None:
        self.folder = folder / "cloud"
        self.folder.mkdir(parents=True)
        self.disk = folder / "disk"
        self.bucket = f"file://{folder / 'bucket'}"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._cloud = Cloud(self.folder)
        words = {
            "FAKE_CLOUD": str(self.folder),
            "FAKE_CLOUD_DISK": str(self.disk),
            "PYTHONPATH": str(ROOT),
            **variables,
        }
        given = " ".join(f"{name}='{value}'" for name, value in words.items())
        file = self.bin / "sky"
        file.write_text(f'#!/bin/sh\n{given} exec {sys.executable} -m tests.fake_cloud.sky "$@"\n')
        file.chmod(0o755)

    def environment(self, kind: str, **more: object) -> dict[str, str]:
        """Variables of a train worker that has its jobs trained here, on the CPU; `more`: keys of the engine."""
        return self.environment_of(cloud={"kind": kind, **more})

    def environment_of(self, **engines: dict[str, object]) -> dict[str, str]:
        """The same for several, by name."""
        common: dict[str, object] = {
            "device": "cpu", "directory": str(ROOT), "python": [sys.executable], "look_every_s": 0.5,
            "environment": {"OMP_NUM_THREADS": "1"}, "bucket": self.bucket, "node_folder": str(self.disk),
        }  # fmt: skip
        lines = []
        for name, more in engines.items():
            lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in (common | more).items()), ""]
        file = self.folder.parent / "engines.toml"
        file.write_text("\n".join(lines))
        return {"PATH": f"{self.bin}:{os.environ['PATH']}", "LONGHAUL_ENGINES": str(file)}

    def tell(self, what: str, words: str = "") -> None:
        """`down`, `refuse`, `hold`, `again`."""
        (self.folder / what).write_text(words)

    def untell(self, what: str) -> None:
        (self.folder / what).unlink()

    def end(self, name: str, how: str) -> None:
        """`preempt` or `lose`."""
        (self.folder / f"{name}.do").write_text(how)

    def tasks(self) -> list[dict[str, Any]]:
        return self._cloud.tasks()

    def spans(self) -> list[str]:
        """Starts and ends of programs, in order; none before the first."""
        file = self.folder / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split()[0] for line in lines if line.startswith(("start ", "end "))]

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing of it outlives the test."""
        for task in self.tasks():
            if task["state"] in ("pending", "running", "lost"):
                for pid in task["pids"]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)
