"""A program that kills an attempt before and after it notes each evaluation and checkpoint from some step on.

`python -m tests.training.killed_attempts [--first STEP] [--within] RUN…`: of each run in turn the first attempt, in a
forked child that is killed at another of these points, and then the second, to its end. Prints a line a run: how both
ended. `--within`: also where an evaluation begins, and in its middle, before it generates.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest
import torch

from jobs.attempt import Phase
from jobs.disk.rundir import RunDir
from jobs.events import AnyFact, CheckpointSaved, EvaluationFinished
from tests.training.attempts import attempt
from worker.training.journal import Journal


def killed(run: RunDir, target: int, first: int, *, within: bool) -> None:
    """The first attempt, ended by SIGKILL at that point."""
    point, real, real_phase = 0, Journal.note, Journal.phase

    def here() -> None:
        nonlocal point
        if point == target:
            os.kill(os.getpid(), signal.SIGKILL)
        point += 1

    def note(journal: Journal, fact: AnyFact) -> None:
        counted = isinstance(fact, EvaluationFinished | CheckpointSaved) and fact.step >= first
        if counted:
            here()
        real(journal, fact)
        if counted:
            here()

    def announced(journal: Journal, phase: Phase, *, step: int | None = None) -> None:
        real_phase(journal, phase, step=step)
        if within and phase in ("evaluate", "generate"):
            here()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "note", note)
        patch.setattr(Journal, "phase", announced)
        attempt(run, 1)


def main() -> None:
    """One point a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=4)
    parser.add_argument("--within", action="store_true")
    parser.add_argument("runs", nargs="+", type=lambda given: RunDir(Path(given)))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for target, run in enumerate(given.runs):
        child = os.fork()
        if child == 0:
            killed(run, target, given.first, within=given.within)
            os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(ended, attempt(run, 2))


if __name__ == "__main__":
    main()
