"""The states of a job and the one table of legal moves (run-directory.md: States)."""

from __future__ import annotations

from enum import StrEnum

from jobs.errors import InvalidTransition


class Status(StrEnum):
    """Where a job stands."""

    VALIDATING = "validating"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    VALIDATED = "validated"

    @property
    def terminal(self) -> bool:
        """Terminal states never change; a retry is a new job."""
        return not TRANSITIONS[self]


DAMAGED = "damaged"
"""Shown in place of a state where the run directory cannot be read. No state: nothing moves from or to it."""


CANCEL_FIRST = "cancel it first, and delete it when it has ended"
"""Why what has not ended is not deleted."""


def is_open(shown: str) -> bool:
    """Whether a job that is shown so may still do something by itself, or when it is asked to."""
    return shown != DAMAGED and not Status(shown).terminal


class Stage(StrEnum):
    """The three stages of a job; each has its own order and its own RQ queue."""

    CHECK = "check"
    PREPARE = "prepare"
    TRAIN = "train"


class Requested(StrEnum):
    """What a user wants of a running job. Not a state: it takes effect when the attempt ends."""

    NONE = "none"
    PAUSE = "pause"
    CANCEL = "cancel"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.QUEUED, Status.VALIDATED, Status.PAUSED, Status.FAILED, Status.CANCELLED}),
    Status.QUEUED: frozenset({Status.RUNNING, Status.PAUSED, Status.FAILED, Status.CANCELLED}),
    Status.RUNNING: frozenset(
        {Status.SUCCEEDED, Status.VALIDATING, Status.QUEUED, Status.PAUSED, Status.FAILED, Status.CANCELLED}
    ),
    Status.PAUSED: frozenset({Status.QUEUED, Status.FAILED, Status.CANCELLED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.VALIDATED: frozenset(),
}


def transition(source: Status, target: Status) -> Status:
    """The target, if the table has the move; otherwise InvalidTransition naming both."""
    if target not in TRANSITIONS[source]:
        raise InvalidTransition(source, target)
    return target
