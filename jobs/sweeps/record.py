"""SweepRecord: what a sweep's events add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jobs.errors import Damaged
from jobs.record import JobRecord
from jobs.state import Status
from jobs.sweeps.events import (
    ImportancesEstimated,
    Outcome,
    SweepCancelRequested,
    SweepEnded,
    SweepEvent,
    SweepSubmitted,
    TrialEnded,
    TrialPruned,
    TrialRetried,
    TrialStarted,
)
from jobs.sweeps.space import Settings
from jobs.trainer_facts import Fault

SweepStatus = Literal["running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True)
class TrialRecord:
    """Times are Unix seconds."""

    number: int
    settings: Settings
    jobs: tuple[str, ...]
    started_at: float
    outcome: Outcome | None = None
    """None: it is open."""
    value: float | None = None
    values: tuple[float, ...] = ()
    pruned: TrialPruned | None = None
    ended_at: float | None = None
    seconds: float = 0.0
    """In attempts, all jobs together."""
    replaced: tuple[str, ...] = ()
    """Jobs that failed for a cause outside of the settings, and those with other seeds that ended with them."""
    retries: int = 0
    """Times that jobs were replaced."""
    error: Fault | None = None


@dataclass
class SweepRecord:
    """The sum of a sweep's events. Times are Unix seconds."""

    id: str
    number: int = 0
    """Of the last event."""
    at: float = 0.0
    """The same."""
    name: str = ""
    spec_sha256: str = ""
    submitted_at: float = 0.0
    ended_at: float | None = None
    cancel_requested: bool = False
    ended: SweepEnded | None = None
    importances: dict[str, float] = field(default_factory=dict)
    """As last estimated; once it has ended, of all its trials."""
    estimated: int = 0
    """Trials that had succeeded at the last estimate."""
    trials: list[TrialRecord] = field(default_factory=list)
    """By their numbers."""
    finished: list[int] = field(default_factory=list)
    """Numbers of the trials that have ended, in the order in which they did."""

    def apply(self, event: SweepEvent) -> None:
        """One more event. Raises Damaged for one that may not follow."""
        if event.number != self.number + 1 or (self.ended is not None):
            raise Damaged(f"sweep {self.id}: event {event.number} follows event {self.number}")
        match fact := event.fact:
            case SweepSubmitted():
                self.name, self.spec_sha256, self.submitted_at = fact.name, fact.spec_sha256, event.at
            case TrialStarted():
                if fact.trial != len(self.trials):
                    raise Damaged(f"sweep {self.id}: trial {fact.trial} follows trial {len(self.trials) - 1}")
                self.trials.append(TrialRecord(fact.trial, fact.settings, tuple(fact.jobs), event.at))
            case TrialPruned():
                self.trials[fact.trial] = replace(self._open(fact.trial), pruned=fact)
            case TrialRetried():
                trial = self._open(fact.trial)
                replaced = (*trial.replaced, *(job for job in trial.jobs if job not in fact.jobs))
                self.trials[fact.trial] = replace(
                    trial, jobs=tuple(fact.jobs), replaced=replaced, retries=trial.retries + 1
                )
            case TrialEnded():
                self.trials[fact.trial] = replace(
                    self._open(fact.trial), outcome=fact.outcome, value=fact.value, values=tuple(fact.values),
                    ended_at=event.at, seconds=fact.seconds, error=fact.error,
                )  # fmt: skip
                self.finished.append(fact.trial)
            case ImportancesEstimated():
                self.importances, self.estimated = fact.importances, fact.trials
            case SweepCancelRequested():
                self.cancel_requested = True
            case SweepEnded():
                self.ended, self.ended_at, self.importances = fact, event.at, fact.importances
        self.number, self.at = event.number, event.at

    def _open(self, number: int) -> TrialRecord:
        if number >= len(self.trials) or self.trials[number].outcome is not None:
            raise Damaged(f"sweep {self.id}: there is no open trial {number}")
        return self.trials[number]

    @property
    def status(self) -> SweepStatus:
        """Where it stands."""
        if self.ended is None:
            return "running"
        if self.ended.reason == "cancelled":
            return "cancelled"
        return "failed" if self.ended.reason == "failures" or "succeeded" not in self.counts else "succeeded"

    @property
    def open(self) -> list[TrialRecord]:
        """Trials that have not ended."""
        return [trial for trial in self.trials if trial.outcome is None]

    @property
    def counts(self) -> dict[str, int]:
        """Trials by outcome; `running`: those that are open."""
        return dict(Counter(trial.outcome or "running" for trial in self.trials))

    def best(
        self, *, higher_is_better: bool, among: Callable[[TrialRecord], bool] = lambda trial: True
    ) -> TrialRecord | None:
        """Of the trials that succeeded and are `among`; of equals the earliest."""
        found = [trial for trial in self.trials if trial.outcome == "succeeded" and trial.value is not None]
        sign = -1.0 if higher_is_better else 1.0
        found.sort(key=lambda trial: (sign * (trial.value or 0.0), trial.number))
        return next(filter(among, found), None)

    def failures(self, most: int) -> Fault | None:
        """The cause with which so many trials failed one after another; None: never so many."""
        count, cause = 0, None
        for number in self.finished:
            trial = self.trials[number]
            if trial.outcome in ("pruned", "cancelled"):
                continue
            same = cause is not None and trial.error is not None and trial.error.code == cause.code
            count, cause = count + 1 if same else 1, trial.error
            if cause is not None and count >= most:
                return cause
        return None


def fold(sweep: str, events: Iterable[SweepEvent]) -> SweepRecord:
    """The record that these events, in order, add up to."""
    record = SweepRecord(sweep)
    for event in events:
        record.apply(event)
    return record


# -- rests -------------------------------------------------------------------------------------------------------------
# Why an open trial rests, and what to do: for the turn, which starts no other meanwhile, and for people.

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
