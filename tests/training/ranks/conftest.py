"""What tests of attempts on several ranks share: processes that find the code, and what is done to other ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.disk.rundir import RunDir
from tests.training.attempts import logged
from worker.training.journal import Journal, StopSignal
from worker.training.settings import TrainerSettings
from worker.training.train import train


@pytest.fixture(autouse=True)
def _processes_begin_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def followers() -> list[int]:
    """Pids of the other ranks that this process has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"follow" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def signal_followers(signum: signal.Signals) -> list[int]:
    """Send it to the other ranks. Returns their pids."""
    found = followers()
    for pid in found:
        os.kill(pid, signum)
    return found


class After(StopSignal):
    """Once so many steps are logged, rank 0 does something when it looks whether it is to stop; it is at `stop`."""

    def __init__(self, run: RunDir, steps: int, act: Callable[[], object], *, stop: int | None = None) -> None:
        super().__init__()
        self._run, self._steps, self._act, self._stop = run, steps, act, stop
        self.done = False

    def asked(self) -> bool:
        """See `StopSignal`."""
        steps = len(logged(self._run))
        if not self.done and steps >= self._steps:
            self.done = True
            self._act()
        return self._stop is not None and steps >= self._stop


def attempt_with(run: RunDir, number: int, stop: StopSignal) -> int:
    """As `attempt`, with this in place of SIGTERM."""
    settings = TrainerSettings(data=Path(), prepared=Path(), models=Path(), device="cpu", offline=True)
    return train(run, settings, Journal(run.attempt_file(number)), stop, number)
