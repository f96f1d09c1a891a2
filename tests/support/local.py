"""A running `longhaul local`, as a person starts it: for tests of it and of what people do with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from jobs.process.lifeline import tied_to_parent
from longhaul import Longhaul
from tests.support.processes import children
from tests.support.redis_server import free_port
from tests.support.stack import NEVER_IDLE

ROOT = Path(__file__).resolve().parents[2]
STRANGER = ("PATH", "HOME", "LANG", "TMPDIR")
"""All that a stranger's environment has."""


class Local:
    """`with Local(folder) as local:` starts it in that folder and waits until it is up; at the end it is stopped."""

    def __init__(self, folder: Path, command: Sequence[str] = (), *, environment: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {name: os.environ[name] for name in STRANGER if name in os.environ} | {
            "PYTHONPATH": f"{ROOT}:{NEVER_IDLE}",
            "LONGHAUL_DEVICE": "cpu",
            "LONGHAUL_PORT": str(self.port),
            "LONGHAUL_URL": self.url,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "LONGHAUL_TRACES": os.environ["LONGHAUL_TRACES"],
            **environment,
        }
        with open(folder / "local.out", "wb") as out:
            self.process = subprocess.Popen(
                tied_to_parent(*(command or (sys.executable, "-m", "longhaul.main", "local"))),
                cwd=folder,
                env=self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.api = Longhaul(self.url)

    def __enter__(self) -> Local:
        try:
            until(lambda: "Longhaul is up" in self.output() or self.process.poll() is not None, self.output)
            assert self.process.poll() is None, self.output()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.api.__exit__(kind, error, trace)
        self._end()

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def output(self) -> str:
        """What it printed."""
        return (self.folder / "local.out").read_text()

    def logs(self) -> str:
        """The same, as a stack calls it."""
        return self.output()

    def children(self) -> list[int]:
        """Pids of Redis, service and workers."""
        return children(self.process.pid)

    def workers(self, stage: str) -> set[int]:
        """Pids heard of in the last minute."""
        return {worker["pid"] or 0 for worker in self.api.workers()["data"] if worker["stage"] == stage}


def until(condition: Callable[[], object], say: Callable[[], str], within_s: float = 600) -> None:
    """Look until it is so; AssertionError with what `say` returns when it does not come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.05)
