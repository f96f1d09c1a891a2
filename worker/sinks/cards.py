"""What Discord is told: one function per kind of message, each an embed within `limits`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    DeviceWaiting,
    DiskLow,
    Event,
    JobCancelled,
    JobFailed,
    JobPrepared,
    JobQueued,
    JobSucceeded,
    OomRecovered,
)  # fmt: skip
from worker.sinks.base import Job
from worker.sinks.fields import fault_fields, field, figures, memory_needed, row_of, samples_embed, time_needed
from worker.sinks.limits import Embed, cut, fit
from worker.sinks.shortage import micro_batches, shortage_sizes
from worker.sinks.wording import REASONS, SHORTAGES, bar, change, code, duration, gibibytes

RUNNING, GOOD, BAD, WARNING, QUIET = 0x5865F2, 0x2ECC71, 0xE74C3C, 0xF1C40F, 0x95A5A6
MESSAGE_TEXT = 1500
"""Of an error: hundreds of tensor names would push what helps out of sight. All of it is in the record."""

Payload = dict[str, Any]


def progress(job: Job, note: str, event: Event | None = None) -> Payload:
    """The message of an attempt, as it stands: posted at its start, edited in place."""
    row, total = row_of(job), job.steps
    step = row.step if row else 0
    lines = []
    if row and total:
        lines.append(f"`{bar(step / total)}` **{min(1.0, step / total):.1%}**")
        lines.append(f"step {step:,} of {total:,} · epoch {row.epoch:.2f}")
    elif row:
        lines.append(f"step {step:,} · epoch {row.epoch:.2f}")
    lines.append(note)
    embed = _embed(job, f"{job.submitted.name}: training", RUNNING, "\n".join(lines), event)
    embed["fields"] = figures(job, row)
    return _payload(embed)


def ended(job: Job, event: Event, fact: AttemptEnded, remarks: Sequence[str] = ()) -> Payload:
    """The last edit of an attempt's message."""
    row, total = row_of(job), job.steps
    lines = [f"`{bar(fact.step / total)}` {fact.step:,} of {total:,} steps"] if total else []
    lines += [REASONS[fact.reason], *remarks]
    colour = GOOD if fact.reason == "done" else QUIET if fact.reason in ("interrupted", "device_busy", "lost") else BAD
    embed = _embed(job, f"{job.submitted.name}: attempt {event.attempt} over", colour, "\n".join(lines), event)
    embed["fields"] = [each for each in figures(job, row) if each["name"] not in ("Time left", "Time needed", "Card")]
    return _payload(embed)


def planned(job: Job, event: Event, fact: JobPrepared) -> Payload:
    """All rows are counted: what the run will need, told while nobody has waited for it yet."""
    text = f"Ready to train: {fact.steps:,} steps. The job waits for its card."
    embed = _embed(job, f"{job.submitted.name}: planned", QUIET, text, event)
    embed["fields"] = time_needed(job) + memory_needed(fact)
    return _payload(embed)


def retry(job: Job, event: Event, fact: JobQueued, ended: AttemptEnded) -> Payload:
    """An attempt failed and another one follows."""
    when = f"in {duration(fact.not_before_s)}" if fact.not_before_s else "as soon as the card is free"
    where = f"at step {ended.step:,}" if ended.step else "before its first step"
    text = f"{REASONS[ended.reason]} {where}. The next attempt starts {when}, from the newest checkpoint."
    embed = _embed(job, f"{job.submitted.name}: attempt {event.attempt} failed, trying again", WARNING, text, event)
    if ended.error:
        embed["fields"] = [field("What happened", code(ended.error.message))]
    return _payload(embed)


def no_card(job: Job, event: Event, fact: DeviceWaiting) -> Payload:
    """The job is ready and its turn has come, but no train worker has a card that it can use."""
    text = "It starts by itself once a train worker has a usable card. Until then no job is trained."
    embed = _embed(job, f"{job.submitted.name}: waits for a card", WARNING, text, event)
    embed["fields"] = [field("What the workers say", code(cut(fact.message, MESSAGE_TEXT)))]
    return _payload(embed)


def out_of_memory(job: Job, event: Event, fact: OomRecovered) -> Payload:
    """Memory ran out in a step, and nothing was lost."""
    how = "in smaller pieces" if fact.micro_batch_after < fact.micro_batch_before else "as it was"
    text = f"The step was done again {how}: nothing was lost, rows and order are unchanged."
    embed = _embed(job, f"{job.submitted.name}: out of memory, recovered", WARNING, text, event)
    fields = [
        field("Step", f"{fact.step:,}", inline=True),
        field("Micro-batch", micro_batches(fact), inline=True),
        field("Time lost", duration(fact.milliseconds_lost / 1000), inline=True),
    ]
    if fact.cause is not None:
        fields.append(field("Cause", SHORTAGES[fact.cause], inline=True))
    if fact.bucket is not None:
        fields.append(field("Length bucket", fact.bucket, inline=True))
    if sizes := shortage_sizes(fact):
        fields.append(field("Memory", sizes))
    embed["fields"] = [*fields, field("What happened", code(cut(fact.message, MESSAGE_TEXT)))]
    return _payload(embed)


def disk_low(job: Job, event: Event, fact: DiskLow) -> Payload:
    """A checkpoint was skipped for want of room."""
    text = f"The checkpoint at step {fact.step:,} was skipped; training goes on. The next one needs more free room."
    embed = _embed(job, f"{job.submitted.name}: the disk is nearly full", WARNING, text, event)
    embed["fields"] = [
        field("Free", gibibytes(fact.free_bytes), inline=True),
        field("Needed", gibibytes(fact.needed_bytes), inline=True),
    ]
    return _payload(embed)


def succeeded(job: Job, event: Event, fact: JobSucceeded, picture: str | None) -> Payload:
    """The model is done; `picture` is the name of the attached file."""
    embed = _embed(job, f"{job.submitted.name}: done", GOOD, f"The model is in `{job.id}/{fact.model}`.", event)
    embed["fields"] = [
        field("Validation loss", change(fact.first_loss, fact.loss), inline=True),
        field("Kept step", f"{fact.step:,}" + (f" of {job.steps:,}" if job.steps else ""), inline=True),
        field("Time in attempts", duration(fact.seconds), inline=True),
    ]
    if picture is not None:
        embed["image"] = {"url": f"attachment://{picture}"}
    samples = job.last_evaluation.samples if job.last_evaluation else []
    return _payload(embed, *([samples_embed(samples, GOOD)] if samples else []))


def failed(job: Job, event: Event, fact: JobFailed, picture: str | None) -> Payload:
    """Why, and what to do about it."""
    what = "failed" if job.attempt else "refused before training"
    embed = _embed(job, f"{job.submitted.name}: {what}", BAD, code(cut(fact.error.message, MESSAGE_TEXT)), event)
    embed["fields"] = fault_fields(fact.error)
    if job.latest is not None:
        of = f" of {job.steps:,}" if job.steps else ""
        embed["fields"].append(field("Reached", f"step {job.latest.step:,}{of}", inline=True))
    if picture is not None:
        embed["image"] = {"url": f"attachment://{picture}"}
    return _payload(embed)


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
    text = "Nothing was wrong. No training was started."
    embed = _embed(job, f"{job.submitted.name}: dry run passed", GOOD, text, event)
    embed["fields"] = time_needed(job)
    return _payload(embed)


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
