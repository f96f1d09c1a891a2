"""Why an open trial rests, and what to do: for the turn, which starts no other meanwhile, and for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jobs.record import JobRecord
from jobs.state import Status


class Rest(NamedTuple):
    """Of a trial that does not proceed."""

    why: str
    """With what to do; lower case, no full stop."""
    holds: bool
    """Whether no other trial starts meanwhile: what paused one by itself, such as a full disk, would pause the next."""


def rest(jobs: Sequence[JobRecord]) -> Rest | None:
    """Of an open trial with these jobs; None: it proceeds."""
    paused = sorted((job for job in jobs if job.status is Status.PAUSED), key=lambda job: job.error is None)
    if not paused:
        return None
    job = paused[0]  # one that paused itself before one that a user paused
    again = f"`longhaul resume {job.id}`"
    if job.error is None:
        return Rest(f"job {job.id} is paused: {again} continues it", holds=False)
    parts = [job.error.message, job.error.hint or f"then {again}"]
    return Rest("; ".join(parts if again in parts[-1] else [*parts, f"then {again}"]), holds=True)
