"""What a sink is: a listener to one job's events and metric rows (architecture.md: Sinks).

Sinks never steer a run. They log and do not raise; they return what they could not do now as a typed outcome, and the
feed (`worker.feed`) keeps order, cursor and retries for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from pydantic import JsonValue

from jobs.errors import Damaged
from jobs.events import AttemptEnded, AttemptStarted, Event, JobChecked, JobPrepared, JobResumed, JobSubmitted
from jobs.metrics import MetricRow
from jobs.plan import Plan
from jobs.reasons import Reason
from jobs.spec import JobSpec
from jobs.sweeps.record import SweepRecord
from jobs.sweeps.spec import SweepSpec
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, ModelLoaded, StepsCorrected

WANDB_URL = "wandb/url.txt"
"""In the run directory: where the job's run is in W&B, once it was online."""
_URL = re.compile(r"https?://[^\s()<>\[\]]{1,512}")


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
    """Never again in this process: the receiver is gone for good. The cursor moves all the same."""

    why: str


Outcome = Done | Later | Disabled
DONE = Done()


@dataclass
class SinkJob:
    """What a sink may know about the job besides the event or rows in hand. One per sink and job."""

    id: str
    folder: Path
    """The run directory."""
    submitted: JobSubmitted
    spec: JobSpec
    state: dict[str, JsonValue]
    """The sink's own notes, JSON-able: saved with the cursor, so they survive a restart of publish."""
    rows: Callable[[], list[MetricRow]]
    """Reads all metric rows, in order of step. Costs a file: for the end of a run."""
    size_of_rows: Callable[[], int]
    """Bytes that `rows` would read."""
    plan: Callable[[], Plan]
    """Reads plan.json. Raises Damaged, and NotFound while there is none."""
    write: Callable[[str, bytes], None]
    """Writes a file of this name into the run directory, atomically."""
    highest_step: int = -1
    """Highest step whose row this sink has taken; -1: none."""
    latest: MetricRow | None = None
    """Newest row read, taken or not."""
    steps: int | None = None
    """Steps of the whole run, once known."""
    time: str | None = None
    """What the run needs on its GPU, for people: as checked, then as prepared; None on a CPU."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint; None: there is none."""
    attempt: int = 0
    ending: bool = False
    """The next event is the terminal one: nothing is held back any more."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Validation loss by step."""
    last_evaluation: EvaluationFinished | None = None
    ended: AttemptEnded | None = None
    """How the last attempt ended, if no other has started since."""
    from_scratch: bool = False
    """The next attempt begins at step 0: what was evaluated so far will count no more."""

    @property
    def failed_attempt(self) -> AttemptEnded | None:
        """How the last attempt ended, if it failed and no other has started since."""
        return self.ended if self.ended is not None and self.ended.reason.severity == "error" else None

    def wandb_url(self) -> str | None:
        """Where people see the job's run in W&B; None: nowhere yet."""
        try:
            url = (self.folder / WANDB_URL).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return url if _URL.fullmatch(url) else None

    def update(self, event: Event) -> None:
        """Update from an event (also from those that the sink got before a restart)."""
        self.attempt = max(self.attempt, event.attempt)
        match event.fact:
            case JobChecked(plan=plan):
                self.steps = plan.steps
                self.time = plan.time.text if plan.time else None
            case JobPrepared(steps=steps, time=time, adopted=adopted):
                self.steps = steps
                if adopted is not None:
                    self.checkpoint_step = adopted.step
                self.time = time.text if time else None
            case StepsCorrected(steps=steps):
                self.steps = steps
            case CheckpointSaved(step=step) | ModelLoaded(resumed_step=int(step)):
                self.checkpoint_step = step
            case EvaluationFinished() as evaluation:
                self.evaluations[evaluation.step] = evaluation.loss
                self.last_evaluation = evaluation
            case AttemptEnded() as ended:
                self.ended = ended
                if ended.reason is Reason.EARLY_STOPPED:
                    self.steps = ended.step
            case AttemptStarted():
                self.ended = None
                if self.from_scratch:
                    self.checkpoint_step = None
                    self.evaluations.clear()
                    self.last_evaluation = None
                    self.from_scratch = False
            case JobResumed(from_scratch=from_scratch):
                self.from_scratch = from_scratch


@dataclass(frozen=True)
class SinkSettings:
    """What a sink is made from."""

    runs: Path
    """The runs directory."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Those of its row in `jobs/integrations.py` that are set, and those of other sinks."""
    public_url: str | None = None
    """Where people reach the service."""


class Sink(Protocol):
    """One listener. Called from one thread only; every call is bounded by the sink's own timeouts."""

    name: str
    """Names the cursor file `sinks/<name>.json`. Where a job has a key `integrations.<name>`, it may switch the sink
    off, which then hears nothing of it."""
    follows_metrics: bool
    """Whether rows of metrics are wanted at all."""

    def accepts(self, submitted: JobSubmitted) -> bool:
        """Whether the sink reports a job that wants it. Trials (`submitted.sweep`) and dry runs are jobs, too."""

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """Take one event. After `Later` it comes again; after a crash the last one may."""

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """Take rows, oldest first. After `Later` the same rows come again, with newer ones behind them."""

    def close(self, job: SinkJob) -> None:
        """The job has ended, or publish stops: release what is held for it."""


@runtime_checkable
class ReportsDamage(Protocol):
    """A sink that also reports, once, that the run directory of a job can no longer be read."""

    def damaged(self, job: str, submitted: JobSubmitted | None, error: Damaged) -> Outcome:
        """Take it, also for a job of which not even the first event is left (`submitted` is None). Whether the job
        wants it is the sink's to see: its specification may be what is damaged."""


@dataclass
class SinkSweep:
    """How a sweep stands, for a sink."""

    spec: SweepSpec
    record: SweepRecord
    state: dict[str, JsonValue]
    """The sink's own notes, as those of a job."""


@runtime_checkable
class ReportsSweeps(Protocol):
    """A sink that also reports sweeps, each as a whole."""

    name: str
    """As the sink's."""

    def accepts_sweep(self, spec: SweepSpec) -> bool:
        """Whether the sink reports a sweep that wants it."""

    def sweep(self, sweep: SinkSweep) -> Outcome:
        """Take how it stands now, which is more than last time. After `Later` it comes again; after a crash it may."""
