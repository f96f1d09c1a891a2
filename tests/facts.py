"""The facts of a run, by their type."""

from __future__ import annotations

from typing import TypeVar

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, Fact
from jobs.reasons import Reason

FactType = TypeVar("FactType", bound=Fact)


def facts_of(run: RunDir, kind: type[FactType]) -> list[FactType]:
    """Those of one type, in order."""
    return [event.fact for event in run.events() if isinstance(event.fact, kind)]


def reasons(run: RunDir) -> list[Reason]:
    """Why each attempt ended."""
    return [end.reason for end in facts_of(run, AttemptEnded)]
