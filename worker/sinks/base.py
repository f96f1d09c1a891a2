"""What a sink is: a listener to one job's events and metric rows (design §14).

Sinks never steer a run. They log and do not raise; what they could not do now they say as a typed outcome, and the feed
(`worker.feed`) keeps order, cursor and retries for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jobs.events import AttemptEnded, AttemptStarted, EvaluationFinished, Event, JobChecked, JobPrepared, JobSubmitted
from jobs.metrics import MetricRow

FAILED_ATTEMPT = frozenset({"crash", "silent", "host_out_of_memory", "out_of_memory", "oom_in_optimizer"})
"""Ends of an attempt that a person should hear of even when another attempt follows."""


@dataclass(frozen=True)
class Done:
    """Handed over: the cursor moves."""


@dataclass(frozen=True)
class Later:
    """Not now (rate limited, unreachable, coalescing): asked again after `seconds`. Nothing is lost."""

    seconds: float
    why: str


@dataclass(frozen=True)
class Disabled:
    """Never again in this process: the other side is gone for good. The cursor moves, there is nobody to tell."""

    why: str


Outcome = Done | Later | Disabled
DONE = Done()


@dataclass
class Job:
    """What a sink may know about the job besides the event or rows in hand. One per sink and job."""

    id: str
    folder: Path
    """The run directory."""
    submitted: JobSubmitted
    config: dict[str, Any]
    """spec.json as a dictionary."""
    state: dict[str, Any]
    """The sink's own notes, JSON-able: saved with the cursor, so they survive a restart of publish."""
    rows: Callable[[], list[MetricRow]]
    """Reads all metric rows, in order of step. Costs a file: for the end of a run."""
    write: Callable[[str, bytes], None]
    """Writes a file of this name into the run directory, atomically."""
    highest_step: int = -1
    """Highest step whose row this sink has taken; -1: none."""
    latest: MetricRow | None = None
    """Newest row read, taken or not."""
    steps: int | None = None
    """Steps of the whole run, once known."""
    time: str | None = None
    """What the run needs on its card, for people: as checked, then as prepared; None on a CPU."""
    attempt: int = 0
    ending: bool = False
    """The next event is the terminal one: nothing is worth holding back any more."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Validation loss by step."""
    last_evaluation: EvaluationFinished | None = None
    failed_attempt: AttemptEnded | None = None
    """How the last attempt ended, if it failed and no other has started since."""

    def see(self, event: Event) -> None:
        """Take in what an event says about the job (also those that the sink was given before a restart)."""
        self.attempt = max(self.attempt, event.attempt)
        match event.fact:
            case JobChecked(plan=plan) if isinstance(plan.get("steps"), int):
                self.steps = plan["steps"]
                self.time = (plan.get("time") or {}).get("text")
            case JobPrepared(steps=steps, time=time):
                self.steps = steps
                self.time = (time or {}).get("text")
            case EvaluationFinished() as evaluation:
                self.evaluations[evaluation.step] = evaluation.loss
                self.last_evaluation = evaluation
            case AttemptEnded(reason=reason) as ended:
                self.failed_attempt = ended if reason in FAILED_ATTEMPT else None
            case AttemptStarted():
                self.failed_attempt = None


class Sink(Protocol):
    """One listener. Called from one thread only; every call is bounded by the sink's own timeouts."""

    name: str
    """Names the cursor file `sinks/<name>.json`."""
    follows_metrics: bool
    """Whether rows of metrics are wanted at all."""

    def accepts(self, submitted: JobSubmitted) -> bool:
        """Whether this job is told at all."""

    def event(self, event: Event, job: Job) -> Outcome:
        """Take one event. After `Later` it comes again; after a crash the last one may."""

    def metrics(self, rows: Sequence[MetricRow], job: Job) -> Outcome:
        """Take rows, oldest first. After `Later` the same rows come again, with newer ones behind them."""

    def close(self, job: Job) -> None:
        """The job has ended, or publish stops: let go of what is held for it."""
