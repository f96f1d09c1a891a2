"""What of a job's events a page draws: evaluations with their samples, and marks beside the curves."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from markupsafe import Markup, escape

from jobs import answers
from jobs.attempt import activity_text
from jobs.comparison.answer import Difference
from jobs.evaluation_metrics import chosen_text, metric_figure, metric_scale, metric_words
from jobs.events import AttemptStarted, Event, JobSucceeded
from jobs.memory_plan import layers
from jobs.plan import limit_words
from jobs.text.units import (
    bytes_alike,
    format_bytes,
    format_duration,
    format_figure,
    format_number,
    format_parameters,
    format_share,
)
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, MemoryMeasured, ModelLoaded, OomRecovered
from jobs.verdict import measured, measured_text
from service.pages.trial_charts import clipped, setting_text

# -- words -------------------------------------------------------------------------------------------------------------
# What templates need of words: figures for people, and what a job does in one sentence.

DASH = "–"


def duration(seconds: float | None) -> str:
    """Its two largest units."""
    return DASH if seconds is None else format_duration(seconds)


def size(count: float | None) -> str:
    """Bytes."""
    return DASH if count is None else format_bytes(count)


def figure(value: float | None, places: int = 4) -> str:
    """A loss, or another figure of that size."""
    return DASH if value is None else format_figure(value, places)


def whole(count: float | None) -> str:
    """With separators."""
    return DASH if count is None else f"{count:,.0f}"


def percent(share: float | None) -> str:
    """0.256 is 25.6 %."""
    return DASH if share is None else f"{format_share(share)}"


def small(value: float | None, digits: int = 4) -> str:
    """Such as a learning rate."""
    return DASH if value is None else format_number(value, digits)


def moment(at: float) -> str:
    """UTC; a script shows it in the time zone of whoever looks."""
    found = _date(at)
    return DASH if found is None else found.strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(at: float) -> str:
    """For `<time datetime>`."""
    found = _date(at)
    return "" if found is None else found.isoformat()


def _date(at: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):  # no time that a calendar has
        return None


def code(text: str) -> Markup:
    """A docstring, with what stands in backticks as code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(text.split("`"))
    )


def measured_of(shown: answers.Job) -> dict[str, str]:
    """What its model was found to be: the loss and the metrics by their words, with intervals."""
    return measured(shown["final_loss"], shown["final_metrics"], shown["final_intervals"])


def now(shown: answers.Job) -> str:
    """What the job does, or what became of it."""
    step = f"step {shown['progress']['step']:,}" + (f" of {shown['steps']:,}" if shown["steps"] else "")
    if shown["error"] is not None:
        return _sentence(shown["error"].message)
    if shown["requested"] != "none":
        what = "Pausing" if shown["requested"] == "pause" else "Cancelling"
        return f"{what}: it saves a checkpoint, then stops."
    match shown["status"]:
        case "validating":
            if shown["queue_position"] and shown["waiting_reason"]:
                return _waiting(shown)
            if shown["activity"] is not None and shown["activity"]["phase"] != shown["stage"]:
                return _doing(shown["activity"])
            going = "" if shown["activity"] is None else f" {_doing(shown['activity'])}"
            what = {
                "check": "Checking the job, the model's configuration and the first rows.",
                "prepare": "Fetching the model, and reading and tokenizing all rows.",
            }.get(shown["stage"], "Being checked.")
            return f"{what}{going}"
        case "queued":
            return _waiting(shown)
        case "running":
            return _running(shown, step)
        case "paused":
            return f"Paused at {step}. It continues from its checkpoint when it is resumed."
        case "succeeded":
            if shown["kind"] == "evaluate":
                return f"Evaluated in {duration(shown['training_s'])}."
            done = f"Finished after {duration(shown['training_s'])} of training"
            if shown["verdict"] is not None:
                return f"{done}: {shown['verdict'].text}."
            if shown["final_loss"] is not None:
                return f"{done}. Validation loss {_from_to(shown['first_loss'], shown['final_loss'])}."
            return f"{done}."
        case "cancelled":
            never = "Cancelled before it trained." if shown["kind"] == "train" else "Cancelled before it was evaluated."
            return f"Cancelled at {step}." if shown["attempt"] else never
        case "validated":
            return "Checked; a dry run trains nothing."
    return "Its run directory cannot be read."


def _waiting(job: answers.Job) -> str:
    if job["waiting_reason"]:
        return _sentence(job["waiting_reason"])
    if job["not_before"] and (wait := job["not_before"] - time.time()) > 0:
        return f"The next attempt begins in {duration(wait)}."
    place = "Next in the queue" if job["queue_position"] == 1 else f"Number {job['queue_position']} in the queue"
    starts = "" if job["estimated_start"] is None else f"; it starts in about {_in(job['estimated_start'])}"
    return f"{place if job['queue_position'] else 'Waiting'}{starts}."


def _running(job: answers.Job, step: str) -> str:
    progress = job["progress"]
    if job["waiting_reason"]:
        return _sentence(job["waiting_reason"])
    if job["activity"] is not None and job["activity"]["phase"] != "step":
        return _doing(job["activity"])
    if job["kind"] == "evaluate":
        return "The model is being evaluated."
    if progress["at"] is None:
        return "Training; there are no figures yet." if job["activity"] else "Starting: the model is being loaded."
    age = time.time() - progress["at"]
    if age > 120:
        return f"Training, {step}; its last figures are {duration(age)} old."
    left = "" if progress["eta_s"] is None else f"; {duration(progress['eta_s'] - age)} left"
    return f"Training, {step}{left}."


def _doing(activity: answers.JobActivity) -> str:
    return _sentence(activity_text(activity["words"], activity["since"], activity["fraction"]))


def _from_to(first: float | None, last: float) -> str:
    return figure(last) if first is None or first == last else f"{figure(first)} → {figure(last)}"


def _in(at: float) -> str:
    return duration(max(0.0, at - time.time()))


def _sentence(text: str) -> str:
    key = re.match(r"[a-z_]+(\.[\w.]+)?:|\w+\.json\b", text)  # is written as it is
    return (text if key else text[:1].upper() + text[1:]) + ("" if text.endswith((".", "!", "?", "…")) else ".")


def cost(difference: Difference, place: int) -> str:
    """What a difference costs a job, beside the reference: `+1.7 GiB, +3 h`."""
    counts = [
        (difference.bytes and difference.bytes[place], format_bytes),
        (difference.seconds and difference.seconds[place], format_duration),
    ]
    return ", ".join(f"{'+' if count > 0 else '−'}{worded(abs(count))}" for count, worded in counts if count)


FILTERS = {
    "duration": duration, "size": size, "figure": figure, "whole": whole, "percent": percent, "small": small,
    "moment": moment, "iso": iso, "now": now, "code": code, "layers": layers, "parameters": format_parameters,
    "cost": cost, "json": json.dumps,
    "metric": metric_words, "metric_figure": metric_figure, "measured_text": measured_text,
    "sizes": lambda counts: bytes_alike(*counts), "limit": limit_words, "chosen": chosen_text, "measured": measured_of,
    "setting": setting_text, "clip": clipped,
}  # fmt: skip


# -- job story ---------------------------------------------------------------------------------------------------------

Mark = dict[str, str | int | float | Mapping[str, float]]
"""`step`, `kind` (attempt, oom) and `text`; of an evaluation `step`, `kind`, `loss`, and metrics by their words,
`shares` from 0 to 1, `scores` to 100 and `correlations` from -1."""


@dataclass(frozen=True)
class SampleInTime:
    """A row that the model was asked at several evaluations."""

    input: str
    target: str
    before: str | None
    """What the model wrote at the first evaluation; None: it was not asked then."""
    generated: str
    """What it wrote at the one looked at."""
    probability: float | None


@dataclass(frozen=True)
class JobStory:
    """Of all events so far, in order."""

    evaluations: tuple[EvaluationFinished, ...]
    marks: tuple[Mark, ...]
    measured: MemoryMeasured | None
    loaded: ModelLoaded | None
    model_step: int | None
    """The step of the model that was kept; None: the job has not succeeded."""

    @property
    def peak_bytes(self) -> int | None:
        """Of the largest micro-batch that can come, as measured; None: no step was measured."""
        return None if self.measured is None else self.measured.peak_bytes

    def at(self, step: int | None) -> EvaluationFinished | None:
        """The last evaluation at this step; None: the newest."""
        found = [each for each in self.evaluations if step is None or each.step == step]
        return found[-1] if found else None

    def samples(self, evaluation: EvaluationFinished) -> list[SampleInTime]:
        """Its samples beside those of the first evaluation."""
        first = {each.input: each.generated for each in self.evaluations[0].samples}
        return [
            SampleInTime(each.input, each.target, first.get(each.input), each.generated, each.probability)
            for each in evaluation.samples
        ]


def story_of(events: Sequence[Event]) -> JobStory:
    """What is drawn of them. Of an evaluation that was done again, the newer counts."""
    evaluations: dict[int, EvaluationFinished] = {}
    marks: list[Mark] = []
    measured: MemoryMeasured | None = None
    loaded: ModelLoaded | None = None
    model_step: int | None = None
    step = 0
    for event in events:
        match event.fact:
            case EvaluationFinished() as fact:
                evaluations[fact.step] = fact
                step = fact.step
            case AttemptStarted() if event.attempt > 1:
                marks.append(_mark(step, "attempt", f"attempt {event.attempt}"))
            case ModelLoaded() as loaded:
                if loaded.resumed_step is not None:
                    step = loaded.resumed_step
                    if marks and marks[-1]["kind"] == "attempt":
                        marks[-1]["step"] = step
            case CheckpointSaved() as fact:
                step = fact.step
            case OomRecovered() as fact:
                before, after = fact.micro_batch_before, fact.micro_batch_after
                marks.append(_mark(fact.step, "oom", f"out of memory; micro-batch {before} → {after}"))
                step = fact.step
            case MemoryMeasured() as measured:
                pass
            case JobSucceeded(step=model_step):
                pass
    kept = sorted(evaluations.values(), key=lambda each: each.step)
    for each in kept:
        mark: Mark = {"step": each.step, "kind": "evaluation", "loss": each.loss}
        for scale in ("shares", "scores", "correlations"):
            mark[scale] = {
                metric_words(name): each.metrics[name] for name in each.metrics if metric_scale(name) == scale
            }
        marks.append(mark)
    return JobStory(tuple(kept), tuple(marks), measured, loaded, model_step)


def _mark(step: int, kind: Literal["attempt", "oom"], text: str) -> Mark:
    return {"step": step, "kind": kind, "text": text}


def side_by_side(evaluations: Mapping[str, EvaluationFinished | None]) -> list[tuple[str, str, list[str | None]]]:
    """Input, reference, and what each job wrote (None: it was not asked), of rows that two jobs or more were asked."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for job, evaluation in evaluations.items():
        for each in evaluation.samples if evaluation else ():
            rows.setdefault((each.input, each.target), {})[job] = each.answer
    return [(*row, [said.get(job) for job in evaluations]) for row, said in rows.items() if len(said) > 1]
