"""What templates need of words: figures for people, and what a job does in one sentence."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime

from markupsafe import Markup, escape

from jobs.comparison.answer import Difference
from jobs.evaluation_metrics import chosen_text, metric_figure, metric_words
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
from jobs.verdict import measured, measured_text
from service import answers
from service.pages.trial_charts import clipped, setting_text

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
    return measured(shown.final_loss, shown.final_metrics, shown.final_intervals)


def now(shown: answers.Job) -> str:
    """What the job does, or what became of it."""
    step = f"step {shown.progress.step:,}" + (f" of {shown.steps:,}" if shown.steps else "")
    if shown.error is not None:
        return _sentence(shown.error.message)
    if shown.requested != "none":
        what = "Pausing" if shown.requested == "pause" else "Cancelling"
        return f"{what}: it saves a checkpoint, then stops."
    match shown.status:
        case "validating":
            if shown.queue_position and shown.waiting_reason:
                return _waiting(shown)
            return {
                "check": "Checking the job, the model's configuration and the first rows.",
                "prepare": "Fetching the model, and reading and tokenizing all rows.",
            }.get(shown.stage.value, "Being checked.")
        case "queued":
            return _waiting(shown)
        case "running":
            return _running(shown, step)
        case "paused":
            return f"Paused at {step}. It continues from its checkpoint when it is resumed."
        case "succeeded":
            if shown.kind == "evaluate":
                return f"Evaluated in {duration(shown.training_s)}."
            done = f"Finished after {duration(shown.training_s)} of training"
            if shown.verdict is not None:
                return f"{done}: {shown.verdict.text}."
            if shown.final_loss is not None:
                return f"{done}. Validation loss {_from_to(shown.first_loss, shown.final_loss)}."
            return f"{done}."
        case "cancelled":
            never = "Cancelled before it trained." if shown.kind == "train" else "Cancelled before it was evaluated."
            return f"Cancelled at {step}." if shown.attempt else never
        case "validated":
            return "Checked; a dry run trains nothing."
    return "Its run directory cannot be read."


def _waiting(job: answers.Job) -> str:
    if job.waiting_reason:
        return _sentence(job.waiting_reason)
    if job.not_before and (wait := job.not_before - time.time()) > 0:
        return f"The next attempt begins in {duration(wait)}."
    place = "Next in the queue" if job.queue_position == 1 else f"Number {job.queue_position} in the queue"
    starts = "" if job.estimated_start is None else f"; it starts in about {_in(job.estimated_start)}"
    return f"{place if job.queue_position else 'Waiting'}{starts}."


def _running(job: answers.Job, step: str) -> str:
    progress = job.progress
    if job.waiting_reason:
        return _sentence(job.waiting_reason)
    if job.kind == "evaluate":
        return "The model is being evaluated."
    if progress.at is None:
        return "Starting: the model is being loaded."
    age = time.time() - progress.at
    if age > 120:
        return f"Training, {step}; its last figures are {duration(age)} old."
    left = "" if progress.eta_s is None else f"; {duration(progress.eta_s - age)} left"
    return f"Training, {step}{left}."


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
