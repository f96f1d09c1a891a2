"""What Discord is told: one function per kind of message, each an embed within `limits`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    DiskLow,
    Event,
    Fault,
    JobCancelled,
    JobFailed,
    JobQueued,
    JobSucceeded,
    MetricRow,
    OomRecovered,
    Sample,
)  # fmt: skip
from worker.sinks.base import Job
from worker.sinks.limits import Embed, cut, fit
from worker.sinks.wording import REASONS, bar, change, code, duration, gibibytes, plain, sentence

RUNNING, GOOD, BAD, WARNING, QUIET = 0x5865F2, 0x2ECC71, 0xE74C3C, 0xF1C40F, 0x95A5A6
SAMPLES_SHOWN = 3
SAMPLE_TEXT = 500
MESSAGE_TEXT = 1500
"""Of an error: hundreds of tensor names would push what helps out of sight. All of it is in the record."""

Payload = dict[str, Any]


def progress(job: Job, note: str, event: Event | None = None) -> Payload:
    """The message of an attempt, as it stands: posted at its start, edited in place."""
    row, total = _row_of(job), job.steps
    step = row.step if row else 0
    lines = []
    if row and total:
        lines.append(f"`{bar(step / total)}` **{min(1.0, step / total):.1%}**")
        lines.append(f"step {step:,} of {total:,} · epoch {row.epoch:.2f}")
    elif row:
        lines.append(f"step {step:,} · epoch {row.epoch:.2f}")
    lines.append(note)
    embed = _embed(job, f"{job.submitted.name}: training", RUNNING, "\n".join(lines), event)
    embed["fields"] = _figures(job, row)
    return _payload(embed)


def ended(job: Job, event: Event, fact: AttemptEnded) -> Payload:
    """The last edit of an attempt's message."""
    row, total = _row_of(job), job.steps
    lines = [f"`{bar(fact.step / total)}` {fact.step:,} of {total:,} steps"] if total else []
    lines.append(REASONS[fact.reason])
    colour = GOOD if fact.reason == "done" else QUIET if fact.reason in ("interrupted", "device_busy", "lost") else BAD
    embed = _embed(job, f"{job.submitted.name}: attempt {event.attempt} over", colour, "\n".join(lines), event)
    embed["fields"] = [field for field in _figures(job, row) if field["name"] not in ("Time left", "Card")]
    return _payload(embed)


def retry(job: Job, event: Event, fact: JobQueued, ended: AttemptEnded) -> Payload:
    """An attempt failed and another one follows."""
    when = f"in {duration(fact.not_before_s)}" if fact.not_before_s else "as soon as the card is free"
    where = f"at step {ended.step:,}" if ended.step else "before its first step"
    text = f"{REASONS[ended.reason]} {where}. The next attempt starts {when}, from the newest checkpoint."
    embed = _embed(job, f"{job.submitted.name}: attempt {event.attempt} failed, trying again", WARNING, text, event)
    if ended.error:
        embed["fields"] = [_field("What happened", code(ended.error.message))]
    return _payload(embed)


def out_of_memory(job: Job, event: Event, fact: OomRecovered) -> Payload:
    """Memory ran out in a step, and nothing was lost."""
    text = "The step was done again in smaller pieces: nothing was lost, rows and order are unchanged."
    embed = _embed(job, f"{job.submitted.name}: out of memory, recovered", WARNING, text, event)
    embed["fields"] = [
        _field("Step", f"{fact.step:,}", inline=True),
        _field("Micro-batch", f"{fact.micro_batch_before} → {fact.micro_batch_after} rows", inline=True),
        _field("Time lost", duration(fact.milliseconds_lost / 1000), inline=True),
        _field("What happened", code(fact.message)),
    ]
    return _payload(embed)


def disk_low(job: Job, event: Event, fact: DiskLow) -> Payload:
    """A checkpoint was skipped for want of room."""
    text = f"The checkpoint at step {fact.step:,} was skipped; training goes on. The next one needs more free room."
    embed = _embed(job, f"{job.submitted.name}: the disk is nearly full", WARNING, text, event)
    embed["fields"] = [
        _field("Free", gibibytes(fact.free_bytes), inline=True),
        _field("Needed", gibibytes(fact.needed_bytes), inline=True),
    ]
    return _payload(embed)


def succeeded(job: Job, event: Event, fact: JobSucceeded, picture: str | None) -> Payload:
    """The model is done; `picture` is the name of the attached file."""
    embed = _embed(job, f"{job.submitted.name}: done", GOOD, f"The model is in `{job.id}/{fact.model}`.", event)
    embed["fields"] = [
        _field("Validation loss", change(fact.first_loss, fact.loss), inline=True),
        _field("Kept step", f"{fact.step:,}" + (f" of {job.steps:,}" if job.steps else ""), inline=True),
        _field("Time in attempts", duration(fact.seconds), inline=True),
    ]
    if picture is not None:
        embed["image"] = {"url": f"attachment://{picture}"}
    samples = job.last_evaluation.samples if job.last_evaluation else []
    return _payload(embed, *([_samples(samples)] if samples else []))


def failed(job: Job, event: Event, fact: JobFailed, picture: str | None) -> Payload:
    """Why, and what to do about it."""
    what = "failed" if job.attempt else "refused before training"
    embed = _embed(job, f"{job.submitted.name}: {what}", BAD, code(cut(fact.error.message, MESSAGE_TEXT)), event)
    embed["fields"] = fault_fields(fact.error)
    if job.latest is not None:
        of = f" of {job.steps:,}" if job.steps else ""
        embed["fields"].append(_field("Reached", f"step {job.latest.step:,}{of}", inline=True))
    if picture is not None:
        embed["image"] = {"url": f"attachment://{picture}"}
    return _payload(embed)


def fault_fields(error: Fault) -> list[dict[str, Any]]:
    """Code, key and hint of an error."""
    fields = [_field("Code", f"`{error.code}`", inline=True)]
    if error.param:
        fields.append(_field("Key", f"`{error.param}`", inline=True))
    if error.hint:
        fields.append(_field("What helps", sentence(error.hint)))
    return fields


def cancelled(job: Job, event: Event, fact: JobCancelled) -> Payload:
    """A user did not want it any more."""
    kept = (
        f"The newest checkpoint is kept: `{fact.checkpoint}`."
        if fact.checkpoint
        else "There was no checkpoint to keep."
    )
    return _payload(_embed(job, f"{job.submitted.name}: cancelled", QUIET, kept, event))


def paused(job: Job, event: Event) -> Payload:
    """The job rests."""
    return _payload(
        _embed(
            job, f"{job.submitted.name}: paused", QUIET, "It goes on from its newest checkpoint when resumed.", event
        )
    )


def validated(job: Job, event: Event) -> Payload:
    """End of a dry run."""
    return _payload(
        _embed(job, f"{job.submitted.name}: dry run passed", GOOD, "Nothing was wrong. No training was started.", event)
    )


def started_note(fact: AttemptStarted) -> str:
    """What the message of an attempt says first."""
    return f"Started on {fact.device} by {fact.worker}; loading the model."


# -- pieces ----------------------------------------------------------------------------------------------------------


def _payload(*embeds: Embed) -> Payload:
    return {"embeds": fit(list(embeds))}


def _embed(job: Job, title: str, colour: int, description: str, event: Event | None) -> Embed:
    where = [
        job.id,
        *([f"attempt {job.attempt}"] if job.attempt else []),
        *([f"event {event.number}"] if event else []),
    ]
    embed: Embed = {"title": title, "color": colour, "description": description, "footer": {"text": " · ".join(where)}}
    if event is not None:
        embed["timestamp"] = datetime.fromtimestamp(event.at, UTC).isoformat(timespec="seconds")
    return embed


def _row_of(job: Job) -> MetricRow | None:
    """Figures of the present attempt; those of an earlier one would be misleading."""
    return job.latest if job.latest and job.latest.attempt == job.attempt else None


def _figures(job: Job, row: MetricRow | None) -> list[dict[str, Any]]:
    fields = []
    if row is not None:
        fields.append(_field("Loss", f"{row.loss:.4g}", inline=True))
    if job.evaluations:
        first, last = (job.evaluations[pick(job.evaluations)] for pick in (min, max))
        fields.append(_field("Validation loss", change(first, last), inline=True))
    if row is not None:
        fields += [
            _field("Time left", duration(row.eta_s), inline=True),
            _field("Rows per second", f"{row.rows_per_s:,.1f}", inline=True),
            _field("Memory", gibibytes(row.memory_bytes), inline=True),
            _field("Learning rate", f"{row.learning_rate:.3g}", inline=True),
        ]
        if card := _card(row):
            fields.append(_field("Card", card))
    return fields or [_field("Model", f"`{job.submitted.model}`", inline=True)]


def _card(row: MetricRow) -> str:
    """How the card is, as far as its driver tells."""
    parts = [
        f"{row.gpu_utilisation:.0%} busy" if row.gpu_utilisation is not None else "",
        f"{gibibytes(row.gpu_memory_used_bytes)} in use" if row.gpu_memory_used_bytes is not None else "",
        f"{row.gpu_temperature_c} °C" if row.gpu_temperature_c is not None else "",
        f"{row.gpu_power_w:.0f} W" if row.gpu_power_w is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def _samples(samples: list[Sample]) -> Embed:
    shown = samples[:SAMPLES_SHOWN]
    fields = [
        field
        for number, sample in enumerate(shown, 1)
        for field in (
            _field(f"{number}. Input", cut(plain(sample.input), SAMPLE_TEXT)),
            _field("Wanted", cut(plain(sample.target), SAMPLE_TEXT)),
            _field("Written", cut(plain(sample.generated), SAMPLE_TEXT)),
        )
    ]
    title = f"Samples ({len(shown)} of {len(samples)})" if len(samples) > len(shown) else "Samples"
    return {"title": title, "color": GOOD, "fields": fields}


def _field(name: str, value: str, inline: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "inline": inline}
