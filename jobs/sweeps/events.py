"""Events of a sweep: numbered facts, frozen types with past-tense names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jobs.frozen import Frozen
from jobs.sweeps.space import Settings
from jobs.trainer_facts import Fault

Outcome = Literal["succeeded", "failed", "pruned", "cancelled"]
"""How a trial ended."""
Ending = Literal["done", "max_hours", "failures", "cancelled"]
"""Why a sweep ended: all trials have been made, its hours are over, too many failed alike, or a user wanted it."""


class SweepSubmitted(Frozen):
    """Number 1 of every sweep."""

    type: Literal["sweep.submitted"] = "sweep.submitted"
    name: str
    """As in the sweep."""
    spec_sha256: str
    """Of the specification with every default."""
    version: str
    """Of the Longhaul that made it."""
    idempotency_key: str | None = None
    """Of the request; null without one."""
    body_sha256: str | None = None
    """Of the request's body: the same key with another body is refused."""


class TrialStarted(Frozen):
    """The settings of a trial are chosen, and the ids of its jobs. The jobs are made after this is on disk."""

    type: Literal["trial.started"] = "trial.started"
    trial: int
    """0, 1, 2 …"""
    settings: Settings
    """By the dotted key of the job."""
    jobs: list[str]
    """A job for each seed."""


class TrialPruned(Frozen):
    """A trial is stopped early: by this evaluation others were better. Its jobs are cancelled."""

    type: Literal["trial.pruned"] = "trial.pruned"
    trial: int
    """Which."""
    step: int
    """The evaluation's."""
    value: float
    """Of the metric."""
    message: str
    """What it was compared with."""


class TrialRetried(Frozen):
    """A job of the trial failed for a cause outside of its settings: those that did not succeed are made anew."""

    type: Literal["trial.retried"] = "trial.retried"
    trial: int
    """Which."""
    jobs: list[str]
    """A job for each seed, from now on. Made after this is on disk."""
    error: Fault
    """Why the job before failed."""


class TrialEnded(Frozen):
    """All jobs of a trial have ended."""

    type: Literal["trial.ended"] = "trial.ended"
    trial: int
    """Which."""
    outcome: Outcome
    """How."""
    value: float | None = None
    """Of the metric: the mean over its jobs; null where not all of them succeeded."""
    values: list[float] = Field([])
    """Of each job."""
    seconds: float = 0.0
    """Time in attempts, all jobs together."""
    error: Fault | None = None
    """Why it failed."""


class ImportancesEstimated(Frozen):
    """How much of the differences between the trials so far each parameter explains."""

    type: Literal["importances.estimated"] = "importances.estimated"
    trials: int
    """So many had succeeded."""
    importances: dict[str, float]
    """By parameter, together 1 (PED-ANOVA); empty where nobody can tell."""


class SweepCancelRequested(Frozen):
    """A user wants no more trials; those that are open are cancelled."""

    type: Literal["sweep.cancel_requested"] = "sweep.cancel_requested"


class SweepEnded(Frozen):
    """No trial is open, and none follows."""

    type: Literal["sweep.ended"] = "sweep.ended"
    reason: Ending
    """Why."""
    best: int | None = None
    """The best trial; null: none succeeded."""
    importances: dict[str, float] = Field({})
    """How much of the differences between trials each parameter explains, together 1 (PED-ANOVA); empty where too few
    trials succeeded."""
    error: Fault | None = None
    """With `failures`: the cause."""


SweepFact = Annotated[
    SweepSubmitted
    | TrialStarted
    | TrialPruned
    | TrialRetried
    | TrialEnded
    | ImportancesEstimated
    | SweepCancelRequested
    | SweepEnded,
    Field(discriminator="type"),
]


class SweepEvent(Frozen):
    """One line of a sweep's events.jsonl: a fact with its number and time."""

    number: Annotated[int, Field(ge=1)]
    """1, 2, 3 … without gap."""
    sweep: str
    """Id of the sweep."""
    at: float
    """Unix time, seconds."""
    fact: SweepFact
