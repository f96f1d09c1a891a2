"""The lines of an attempt file: how a trainer process speaks to its supervisor (architecture.md: Trainer)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from jobs.dataset_report import PreparedSummary
from jobs.evaluation_metrics import chosen_figure
from jobs.events import Adopted, AnyFact
from jobs.frozen import Empty, Frozen
from jobs.memory_plan import MemorySummary
from jobs.plan import CheckSummary, StepLimit, TimeSummary
from jobs.reasons import Reason
from jobs.state import Stage
from jobs.text.units import format_duration, format_share
from jobs.trainer_facts import Fault
from jobs.verdict import ConfidenceInterval, Verdict

log = logging.getLogger("longhaul.rundir")

Phase = Literal["check", "prepare", "load", "compile", "step", "evaluate", "generate", "save", "wait"]


class Heartbeat(Frozen):
    """The trainer is alive and has made progress."""

    kind: Literal["heartbeat"] = "heartbeat"
    at: float
    phase: Phase
    step: int = 0
    progress: float | None = None
    """0 to 1 within the phase, where known."""
    interval_s: float | None = None
    """Median time between heartbeats of this phase, where known; silence is judged by it."""


PHASE_WORDS: Mapping[Phase, str] = {
    "check": "checking", "prepare": "preparing the data", "load": "loading the model", "compile": "compiling",
    "step": "training", "evaluate": "evaluating", "generate": "writing texts", "save": "saving",
    "wait": "waiting for the GPU",
}  # fmt: skip
"""What a process of the job does in it, for people."""


class Activity(Frozen):
    """What the process of a job does now, by its newest heartbeat."""

    stage: Stage
    attempt: int | None
    """Of *train*."""
    phase: Phase
    since: float
    """When the phase began, Unix seconds."""
    fraction: float | None = None
    """How far it is, 0 to 1; None: not known."""

    @classmethod
    def of(cls, beat: Heartbeat, since: float, stage: Stage, attempt: int | None) -> Activity:
        """As this heartbeat says."""
        fraction = None if beat.progress is None else round(min(1.0, max(0.0, beat.progress)), 2)
        return cls(stage=stage, attempt=attempt, phase=beat.phase, since=since, fraction=fraction)


def activity_text(words: str, since: float, fraction: float | None) -> str:
    """Such as `compiling for 40 s, 36 % done`."""
    done = "" if fraction is None else f", {format_share(fraction)} done"
    return f"{words} for {format_duration(max(0.0, time.time() - since))}{done}"


class Noted(Frozen):
    """A fact for the job's event list."""

    kind: Literal["fact"] = "fact"
    at: float
    fact: AnyFact


class CheckResult(Frozen):
    """What goes into job.checked."""

    plan: CheckSummary


class PrepareResult(Frozen):
    """What goes into job.prepared."""

    data: PreparedSummary
    rows_per_epoch: int | None
    steps: int
    limited_by: StepLimit = "epochs"
    time: TimeSummary | None
    memory: MemorySummary | None
    adopted: Adopted | None


class TrainResult(Frozen):
    """What goes into job.succeeded."""

    model: str | None
    loss: float | None
    first_loss: float | None
    step: int
    chosen_by: str | None = None
    better_step: int | None = None
    kept_from: str | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - pydantic copies it
    intervals: dict[str, ConfidenceInterval] = {}  # noqa: RUF012
    verdict: Verdict | None = None

    @property
    def figure(self) -> str | None:
        """By which the model was chosen, for people."""
        return None if self.chosen_by is None else chosen_figure(self.chosen_by, self.loss, self.metrics)


Result = CheckResult | PrepareResult | TrainResult | Empty


class Finished(Frozen):
    """Last line of an attempt file."""

    kind: Literal["finished"] = "finished"
    at: float
    reason: Reason
    step: int = 0
    error: Fault | None = None
    result: Result = Empty()
    """Of its stage; empty unless its work is complete."""


AttemptLine = Annotated[Heartbeat | Noted | Finished, Field(discriminator="kind")]


attempt_line: TypeAdapter[Heartbeat | Noted | Finished] = TypeAdapter(AttemptLine)


def parse_line(line: bytes, file: Path) -> Heartbeat | Noted | Finished | None:
    """A line of an attempt file, or None, with a warning, for one that is not valid."""
    try:
        return attempt_line.validate_json(line)
    except ValidationError as error:
        log.error("%s has a line that is skipped: %s", file, error.errors()[0]["msg"])
        return None
