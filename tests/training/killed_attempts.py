"""Kills an attempt before and after it notes each evaluation and checkpoint from some step on; `within`: also where an
evaluation begins, and in its middle, before it generates.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from jobs.attempt import Phase
from jobs.disk.rundir import RunDir
from jobs.events import AnyFact
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished
from tests.training.attempts import attempt
from tests.training.forked import fork
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


def killed_attempts(runs: list[RunDir], *, first: int = 4, within: bool = False) -> None:
    """Of each run in turn the first attempt, killed at another point, and then the second, to its end."""
    for target, run in enumerate(runs):
        code, _, said = fork(partial(killed, run, target, first, within=within)).wait()
        assert code == -signal.SIGKILL, said
        assert attempt(run, 2) == 0
