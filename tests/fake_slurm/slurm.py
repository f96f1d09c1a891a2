"""The fake Slurm as a test has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fake_slurm.programs import Cluster
from tests.sinks.driving import until
from tests.support.stack import ROOT

PROGRAMS = ("sbatch", "squeue", "sacct", "scancel")


class FakeSlurm:
    """`with FakeSlurm(folder) as slurm:`; its programs are in `slurm.bin`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cluster"
        self.folder.mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._cluster = Cluster(self.folder)
        for program in PROGRAMS:
            file = self.bin / program
            file.write_text(
                f"#!/bin/sh\nFAKE_SLURM={self.folder} PYTHONPATH={ROOT} exec {sys.executable} "
                f'-m tests.fake_slurm.programs {program} "$@"\n'
            )
            file.chmod(0o755)

    def environment(self, **more: object) -> dict[str, str]:
        """Variables of a train worker that has its jobs trained here, on the CPU; `more`: keys of the engine."""
        keys: dict[str, object] = {
            "kind": "slurm", "device": "cpu", "directory": str(ROOT), "python": [sys.executable], "look_every_s": 0.5,
            "environment": {"OMP_NUM_THREADS": "1"}, **more,
        }  # fmt: skip
        file = self.folder.parent / "engines.toml"
        lines = [f"{name} = {_toml(value)}" for name, value in keys.items()]
        file.write_text("\n".join(["[cluster]", *lines, ""]))
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LONGHAUL_ENGINES": str(file),
        }

    def tell(self, what: str, words: str = "") -> None:
        """`down`, `hang`, `refuse`, `hold`, `no-accounts`."""
        (self.folder / what).write_text(words)

    def untell(self, what: str) -> None:
        (self.folder / what).unlink()

    def end(self, number: str, how: str) -> None:
        """`preempt`, `timeout`, `oom`, `node_fail`."""
        (self.folder / f"{number}.do").write_text(how)

    def state(self, number: str, state: str) -> None:
        """Such as `SUSPENDED`."""
        job = self._cluster.job(number)
        assert job is not None
        self._cluster.save(job | {"state": state})

    def forget(self, number: str) -> None:
        """A job that has ended leaves the queue; the accounting keeps it."""
        (self.folder / "accounts").mkdir(exist_ok=True)
        (self.folder / f"{number}.json").rename(self.folder / "accounts" / f"{number}.json")

    def jobs(self) -> list[dict[str, Any]]:
        return self._cluster.jobs()

    def log(self) -> list[str]:
        """What was called, started and ended, in order."""
        file = self.folder / "log"
        return file.read_text().splitlines() if file.exists() else []

    def spans(self) -> list[str]:
        """Starts and ends of scripts in order, such as `start 1`."""
        return [" ".join(line.split()[:2]) for line in self.log() if line.startswith(("start ", "end "))]

    def __enter__(self) -> FakeSlurm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing of it outlives the test."""
        self.tell("over")
        until(lambda: all(job["state"] not in ("PENDING", "RUNNING") for job in self.jobs()))


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)
