"""Sweeps and their trials."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from jobs.events import Fault
from jobs.sweeps.events import Ending
from jobs.sweeps.record import SweepStatus
from jobs.sweeps.space import Settings
from service.answers.parts import Answer, Page

TrialStatus = Literal["running", "paused", "succeeded", "failed", "pruned", "cancelled"]


class Trial(Answer):
    """One of the trials of a sweep."""

    object: Literal["sweep.trial"]
    """Always `sweep.trial`."""
    number: int
    """0, 1, 2 …"""
    status: TrialStatus
    """`running` until all its jobs have ended; `paused`: one of them rests; `pruned`: stopped early, for others were
    better."""
    settings: Settings
    """By the dotted key of the job."""
    jobs: list[str]
    """A job for each seed; none where the settings make no valid job."""
    gone: list[str]
    """Those of its jobs that trained a model which is no longer there: the sweep keeps that of the best trial alone
    (`keep_models`), or the job was deleted."""
    value: float | None
    """Of the sweep's metric, the mean over the jobs; of a pruned trial that of the evaluation by which it was stopped;
    null without one."""
    values: list[float]
    """Of each job that succeeded, where all did."""
    started_at: int
    """When its settings were chosen."""
    finished_at: int | None
    """When the last of its jobs had ended."""
    seconds: float
    """Time in attempts, all jobs together, once it has ended."""
    message: str | None
    """Why it was pruned; or why it is paused, and what to do."""
    error: Fault | None
    """Why it failed."""


class TrialList(Page):
    """All trials, by number."""

    data: list[Trial]


class Sweep(Answer):
    """Many trials of one job, and which of them is the best."""

    id: str
    """`sweep-…`; ids sort by time."""
    object: Literal["sweep"]
    """Always `sweep`."""
    name: str
    """As in the specification."""
    status: SweepStatus
    """`running` until no trial is open and none follows; `failed`: too many trials in a row failed with one cause, or
    none has succeeded."""
    reason: Ending | None
    """Why it ended: `done`, `max_hours`, `failures` or `cancelled`."""
    cancel_requested: bool
    """Whether it was cancelled, and its trials may still be stopping."""
    created_at: int
    """When it was submitted."""
    finished_at: int | None
    """When it ended."""
    metric: str
    """By what trials are compared."""
    direction: Literal["minimize", "maximize"]
    """Whether less or more of it is better."""
    sampler: str
    """As in the specification."""
    pruning: str
    """As in the specification."""
    max_trials: int
    """Trials at most."""
    parameters: list[str]
    """The keys of `space`, in order."""
    trials: dict[str, int]
    """How many, by status."""
    best: Trial | None
    """The best that has succeeded so far."""
    importances: dict[str, float]
    """How much of the differences between trials each parameter explains, together 1; provisional until it has ended,
    from ten trials on; empty where too few succeeded."""
    waiting: str | None
    """Why no other trial starts now, and what to do; null where one may, and once all were made."""
    error: Fault | None
    """Why it failed; while it runs, nothing."""
    warnings: list[str]
    """What is worth knowing about the specification."""
    specification: dict[str, Any]
    """The specification, with every default."""


class SweepList(Page):
    """Newest first."""

    cursor: ClassVar[str | None] = "id"
    data: list[Sweep]
    first_id: str | None
    """Id of the first one; null if there is none."""
    last_id: str | None
    """Id of the last one, for `after` of the next page."""


class DeletedSweep(Answer):
    """It is gone, with the jobs of its trials."""

    id: str
    """Which."""
    object: Literal["sweep"]
    """Always `sweep`."""
    deleted: Literal[True]
    """Always true."""
