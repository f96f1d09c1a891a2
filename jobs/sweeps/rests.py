"""Why an open trial rests, and what to do: for the turn, which starts no other meanwhile, and for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jobs.events import Fault
from jobs.record import JobRecord
from jobs.state import Status
from jobs.sweeps.record import TrialRecord

OUTSIDE = frozenset({"no_room", "disk_full", "hub_unreachable"})
"""Causes of failure that say nothing of the settings: the next trial would fail of them, too."""
RETRY_DELAYS_S = (60.0, 600.0, *[3600.0] * 10)
"""Before the first, second … retry of a trial; after the last it has failed."""


class Rest(NamedTuple):
    """Of a trial that does not proceed."""

    why: str
    """With what to do; lower case, no full stop."""
    holds: bool
    """Whether no other trial starts meanwhile: what paused one by itself, such as a full disk, would pause the next."""


class Retry(NamedTuple):
    """Of a trial that failed for a cause outside of its settings."""

    at: float
    """Unix time, seconds."""
    error: Fault


def retry(trial: TrialRecord, jobs: Sequence[JobRecord]) -> Retry | None:
    """Of an open trial with these jobs; None: they have not all ended, or it ends with them."""
    error = next((job.error for job in jobs if job.status is Status.FAILED), None)
    if error is None or error.code not in OUTSIDE or not all(job.status.terminal for job in jobs):
        return None
    if trial.pruned is not None or trial.retries >= len(RETRY_DELAYS_S):
        return None
    return Retry(max(job.finished_at or 0.0 for job in jobs) + RETRY_DELAYS_S[trial.retries], error)


def rest(trial: TrialRecord, jobs: Sequence[JobRecord]) -> Rest | None:
    """Of an open trial with these jobs; None: it proceeds."""
    if (again := retry(trial, jobs)) is not None:
        told = (again.error.message, again.error.hint, "it is tried again by itself")
        return Rest("; ".join(filter(None, told)), holds=True)
    paused = sorted((job for job in jobs if job.status is Status.PAUSED), key=lambda job: job.error is None)
    if not paused:
        return None
    job = paused[0]  # one that paused itself before one that a user paused
    command = f"`longhaul resume {job.id}`"
    if job.error is None:
        return Rest(f"job {job.id} is paused: {command} continues it", holds=False)
    parts = [job.error.message, job.error.hint or f"then {command}"]
    return Rest("; ".join(parts if command in parts[-1] else [*parts, f"then {command}"]), holds=True)
