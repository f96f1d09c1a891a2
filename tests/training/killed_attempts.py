"""A program for test_due.py: kills an attempt before and after it notes each evaluation and checkpoint from step 4 on.

`python -m tests.training.killed_attempts RUN…`: of each run in turn the first attempt, in a forked child that is killed
at another of these points, and then the second, to its end. Prints a line a run: how both ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from jobs.disk.rundir import RunDir
from jobs.events import AnyFact, CheckpointSaved, EvaluationFinished
from tests.training.attempts import attempt
from worker.training.journal import Journal

FIRST = 4
"""Step of the first checkpoint."""


def killed(run: RunDir, target: int) -> None:
    """The first attempt, ended by SIGKILL at that point."""
    point, real = 0, Journal.note

    def here() -> None:
        nonlocal point
        if point == target:
            os.kill(os.getpid(), signal.SIGKILL)
        point += 1

    def note(journal: Journal, fact: AnyFact) -> None:
        counted = isinstance(fact, EvaluationFinished | CheckpointSaved) and fact.step >= FIRST
        if counted:
            here()
        real(journal, fact)
        if counted:
            here()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "note", note)
        attempt(run, 1)


def main(runs: list[RunDir]) -> None:
    """One point a run."""
    torch.set_num_threads(1)
    for target, run in enumerate(runs):
        child = os.fork()
        if child == 0:
            killed(run, target)
            os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(ended, attempt(run, 2))


if __name__ == "__main__":
    main([RunDir(Path(given)) for given in sys.argv[1:]])
