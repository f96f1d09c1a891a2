"""What Discord receives: one function per kind of message, each an embed within `limits`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from jobs.errors import Damaged
from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPrepared,
    JobQueued,
    JobRepaired,
    JobSubmitted,
    JobSucceeded,
    TaskStarted,
    TaskSubmitted,
    TaskWaiting,
)
from jobs.metrics import MetricRow
from jobs.plan import limit_text
from jobs.reasons import Reason
from jobs.text.units import capitalized, format_bytes, format_duration, format_figure, format_number, format_share
from jobs.trainer_facts import DeviceWaiting, DiskLow, Fault, OomRecovered
from worker.sinks.base import SinkJob
from worker.sinks.discord.limits import Embed, EmbedField, Payload, cut, fit
from worker.sinks.wording import bar, change, code, plain

# -- fields ------------------------------------------------------------------------------------------------------------
# The figures in a Discord message: fields of an embed, and samples as an embed of their own.

SAMPLE_TEXT = 500


def fault_fields(error: Fault) -> list[EmbedField]:
    """Code, key and hint of an error."""
    fields = [field("Code", f"`{error.code}`", inline=True)]
    if error.param:
        fields.append(field("Key", f"`{error.param}`", inline=True))
    if error.hint:
        fields.append(field("What helps", capitalized(error.hint)))
    return fields


def row_of(job: SinkJob) -> MetricRow | None:
    """Figures of the present attempt; those of an earlier one would be misleading."""
    return job.latest if job.latest and job.latest.attempt == job.attempt else None


def figures(job: SinkJob, row: MetricRow | None) -> list[EmbedField]:
    """How it goes; before the first row, what was planned."""
    fields = []
    if row is not None:
        fields.append(field("Loss", format_figure(row.loss), inline=True))
    if job.evaluations:
        first, last = (job.evaluations[pick(job.evaluations)] for pick in (min, max))
        fields.append(field("Validation loss", change(first, last), inline=True))
    if row is not None:
        fields.append(field("Time left", format_duration(row.eta_s), inline=True))
    if job.last_evaluation is not None and job.last_evaluation.metrics:
        verdict = job.last_evaluation.verdict
        fields += [] if verdict is None else [field("Quality", verdict.text)]
        fields.append(field("Metrics", capitalized(job.last_evaluation.metrics_text)))
    if row is not None:
        fields += [
            field("Rows per second", format_number(row.rows_per_s, 3), inline=True),
            *_speed(row),
            field("Memory", format_bytes(row.memory_bytes), inline=True),
            field("Learning rate", format_number(row.learning_rate), inline=True),
        ]
        if gpu := _gpu(row):
            fields.append(field("GPU", gpu))
    fields = fields or [field("Model", f"`{job.submitted.model}`", inline=True)]
    return fields if job.latest else fields + time_needed(job)


def links(job: SinkJob) -> list[EmbedField]:
    """Where there is more to see."""
    url = job.wandb_url()
    return [field("W&B", f"[open the run]({url})", inline=True)] if url else []


def time_needed(job: SinkJob) -> list[EmbedField]:
    """As planned: what counts until something was measured."""
    return [field("Time needed", capitalized(job.time))] if job.time else []


def memory_needed(fact: JobPrepared) -> list[EmbedField]:
    """As planned for the longest rows that there are."""
    return [field("Memory needed", capitalized(fact.memory.text))] if fact.memory else []


def _speed(row: MetricRow) -> list[EmbedField]:
    """Real tokens, and what that is of what the GPU could do."""
    fields = []
    if row.tokens_per_s is not None:
        fields.append(field("Tokens per second", format_number(row.tokens_per_s), inline=True))
    if row.mfu is not None:
        fields.append(field("MFU", format_share(row.mfu), inline=True))
    return fields


def _gpu(row: MetricRow) -> str:
    """The state of the GPU, as far as its driver reports it."""
    parts = [
        f"{format_share(row.gpu_utilization)} busy" if row.gpu_utilization is not None else "",
        f"{format_bytes(row.gpu_memory_used_bytes)} in use" if row.gpu_memory_used_bytes is not None else "",
        f"{row.gpu_temperature_c} °C" if row.gpu_temperature_c is not None else "",
        f"{row.gpu_power_w:.0f} W" if row.gpu_power_w is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def samples(job: SinkJob, most: int, colour: int) -> list[Embed]:
    """The first few samples of the last evaluation, each in three fields, in an embed of their own if there are any."""
    if job.last_evaluation is None or not job.last_evaluation.samples:
        return []
    made = job.last_evaluation.samples
    fields = [
        text
        for number, sample in enumerate(made[:most], 1)
        for text in (
            field(f"{number}. Input" if most > 1 else "Input", cut(plain(sample.input), SAMPLE_TEXT)),
            field("Wanted", cut(plain(sample.target), SAMPLE_TEXT)),
            field("Written", cut(plain(sample.answer), SAMPLE_TEXT)),
        )
    ]
    what = "Sample" if most == 1 else f"Samples ({most} of {len(made)})" if len(made) > most else "Samples"
    return [{"title": f"{what}, step {job.last_evaluation.step:,}", "color": colour, "fields": fields}]


def field(name: str, value: str, inline: bool = False) -> EmbedField:
    """One field of an embed."""
    return {"name": name, "value": value, "inline": inline}


# -- embeds ------------------------------------------------------------------------------------------------------------

RUNNING, GOOD, BAD, WARNING, QUIET = 0x5865F2, 0x2ECC71, 0xE74C3C, 0xF1C40F, 0x95A5A6
SAMPLES_AT_THE_END = 3
MESSAGE_TEXT = 1500
"""Of an error: hundreds of tensor names would push what helps out of sight. All of it is in the record."""


def progress(job: SinkJob, note: str, event: Event | None = None) -> Payload:
    """The message of an attempt, as it stands: posted at its start, edited in place."""
    row, total = row_of(job), job.steps
    step = row.step if row else 0
    lines = []
    if row and total:
        lines.append(f"`{bar(step / total)}` **{format_share(min(1.0, step / total))}**")
        lines.append(f"step {step:,} of {total:,} · epoch {row.epoch:.2f}")
    elif row:
        lines.append(f"step {step:,} · epoch {row.epoch:.2f}")
    lines += [note] if note else []
    embed = _embed(job, f"{job.submitted.name}: training", RUNNING, "\n".join(lines), event)
    if row is not None:
        embed["timestamp"] = time_text(row.at)  # of the figures: a phone shows how old they are
    embed["fields"] = figures(job, row) + links(job)
    return _payload(embed, *samples(job, 1, RUNNING))


def unworded(job: SinkJob, event: Event) -> Payload:
    """An event as it is."""
    text = code(cut(event.fact.model_dump_json(exclude={"type"}), MESSAGE_TEXT))
    return _payload(_embed(job, f"{job.submitted.name}: {event.type}", WARNING, text, event))


def ended(job: SinkJob, event: Event, fact: AttemptEnded, remarks: Sequence[str] = ()) -> Payload:
    """The last that the progress message says of an attempt."""
    row, total = row_of(job), job.steps
    lines = [f"`{bar(fact.step / total)}` {fact.step:,} of {total:,} steps"] if total else []
    lines += [fact.reason.headline, *remarks]
    colour = BAD if fact.reason.severity == "error" else QUIET  # green is the message that follows
    embed = _embed(job, f"{job.submitted.name}: attempt {event.attempt} ended", colour, "\n".join(lines), event)
    embed["fields"] = [each for each in figures(job, row) if each["name"] not in ("Time left", "Time needed", "GPU")]
    return _payload(embed)


def planned(job: SinkJob, event: Event, fact: JobPrepared) -> Payload:
    """All rows are counted: what the run will need, before anyone has waited for it."""
    ready = (
        f"Ready to train: {fact.steps:,} steps{limit_text(fact.limited_by)}" if fact.steps else "Ready to be evaluated"
    )
    text = f"{ready}. The job waits for its GPU."
    embed = _embed(job, f"{job.submitted.name}: {fact.title}", QUIET, text, event)
    embed["fields"] = time_needed(job) + memory_needed(fact)
    return _payload(embed)


def retry(job: SinkJob, event: Event, fact: JobQueued, ended: AttemptEnded) -> Payload:
    """An attempt failed and another one follows."""
    where = f"at step {ended.step:,}" if ended.step else "before its first step"
    again = f" {_steps(ended.steps_lost)} trained again." if ended.steps_lost else ""
    text = f"{ended.reason.headline} {where}. {next_attempt(job, fact)}{again}"
    embed = _embed(job, f"{job.submitted.name}: attempt {event.attempt} failed, trying again", WARNING, text, event)
    if ended.error:
        embed["fields"] = [field("What happened", code(cut(ended.error.message, MESSAGE_TEXT)))]
        if ended.error.hint:
            embed["fields"].append(field("What helps", capitalized(ended.error.hint)))
    return _payload(embed)


def next_attempt(job: SinkJob, fact: JobQueued) -> str:
    """When it starts by itself, and from where."""
    when = (
        f"in {format_duration(fact.not_before_s)} at the earliest"
        if fact.not_before_s
        else "as soon as it is first in the queue"
    )
    return f"The next attempt starts {when}. {_begins(job)}"


def no_gpu(job: SinkJob, event: Event, fact: DeviceWaiting) -> Payload:
    """The job is ready, but its worker lost the GPU, or no train worker has one that it can use."""
    text = "It starts as soon as a train worker has a usable GPU."
    embed = _embed(job, f"{job.submitted.name}: {fact.title}", WARNING, text, event)
    embed["fields"] = [field("What the workers say", code(cut(fact.message, MESSAGE_TEXT)))]
    return _payload(embed)


def gpu_again(job: SinkJob, event: Event, fact: DeviceWaiting) -> Payload:
    """What the message before it called a person for is over."""
    return _payload(_embed(job, f"{job.submitted.name}: {fact.title}", QUIET, capitalized(fact.message), event))


def out_of_memory(job: SinkJob, event: Event, fact: OomRecovered) -> Payload:
    """Memory ran out in a step, and nothing was lost."""
    how = "in smaller pieces" if fact.micro_batch_after < fact.micro_batch_before else "as it was"
    text = f"The step was repeated {how}: nothing was lost, rows and order are unchanged."
    embed = _embed(job, f"{job.submitted.name}: {fact.title}", WARNING, text, event)
    fields = [field(name, value, inline=name != "Memory") for name, value in fact.details.items()]
    embed["fields"] = [*fields, field("What happened", code(cut(fact.message, MESSAGE_TEXT)))]
    return _payload(embed)


def disk_low(job: SinkJob, event: Event, fact: DiskLow) -> Payload:
    """A checkpoint was skipped for want of room."""
    text = f"The checkpoint at step {fact.step:,} was skipped; training continues. The next one needs more free room."
    embed = _embed(job, f"{job.submitted.name}: {fact.title}", WARNING, text, event)
    embed["fields"] = [field(name, value, inline=True) for name, value in fact.details.items()]
    return _payload(embed)


def succeeded(job: SinkJob, event: Event, fact: JobSucceeded, picture: str | None, link: str | None = None) -> Payload:
    """The model is done; `picture` is the name of the attached file, `link` leads to the job's page."""
    text = f"The model is in `{job.id}/{fact.model}`. Fetch it with `longhaul download {job.id}`."
    if fact.model is None:
        text = "The model is evaluated."
    if fact.reason is Reason.EARLY_STOPPED:
        text = f"{fact.reason.headline}: {fact.reason.sentence}. {text}"
    colour = WARNING if fact.verdict is not None and fact.verdict.warns else GOOD
    embed = _embed(job, f"{job.submitted.name}: {fact.title}", colour, text, event)
    of = f" of {job.steps:,}" if job.steps else ""
    trained = [
        field("Validation loss", change(fact.first_loss, fact.loss), inline=True),
        field("Kept step", f"{fact.step:,}{of}", inline=True),
    ]
    evaluated = [field(capitalized(name), text, inline=True) for name, text in fact.measured.items()]
    embed["fields"] = [
        *([field("Quality", fact.verdict.text)] if fact.verdict is not None else []),
        *(trained if fact.model else evaluated),
        *([field("Chosen as", fact.chosen_text, inline=True)] if fact.chosen_text else []),
        field("Training time" if fact.model else "Time", format_duration(fact.seconds), inline=True),
        *links(job),
        *([field("Report", f"[all on one page]({link}/report)", inline=True)] if link else []),
    ]
    if picture is not None:
        embed["image"] = {"url": f"attachment://{picture}"}
    return _payload(embed, *samples(job, SAMPLES_AT_THE_END, colour))


def failed(job: SinkJob, event: Event, fact: JobFailed, picture: str | None) -> Payload:
    """Why, and what to do about it."""
    what = "failed" if job.attempt else "failed before training"
    embed = _embed(job, f"{job.submitted.name}: {what}", BAD, code(cut(fact.error.message, MESSAGE_TEXT)), event)
    fields = fault_fields(fact.error)
    if job.latest is not None:
        of = f" of {job.steps:,}" if job.steps else ""
        fields.append(field("Reached", f"step {job.latest.step:,}{of}", inline=True))
    embed["fields"] = fields + links(job)
    if picture is not None:
        embed["image"] = {"url": f"attachment://{picture}"}
    return _payload(embed)


def cancelled(job: SinkJob, event: Event, fact: JobCancelled) -> Payload:
    """A user did not want it any more."""
    kept = (
        f"The newest checkpoint is kept: `{fact.checkpoint}`."
        if fact.checkpoint
        else "There was no checkpoint to keep."
    )
    return _payload(_embed(job, f"{job.submitted.name}: {fact.title}", QUIET, kept, event))


def paused(job: SinkJob, event: Event, fact: JobPaused) -> Payload:
    """The job rests: a user wants that, or it cannot continue by itself."""
    if fact.error is not None:
        embed = _embed(
            job, f"{job.submitted.name}: {fact.title}", BAD, code(cut(fact.error.message, MESSAGE_TEXT)), event
        )
        embed["fields"] = fault_fields(fact.error)
        return _payload(embed)
    return _payload(
        _embed(
            job,
            f"{job.submitted.name}: {fact.title}",
            QUIET,
            f"It waits until somebody resumes it. {_begins(job)}",
            event,
        )
    )


def damaged(job: str, submitted: JobSubmitted | None, error: Damaged) -> Payload:
    """A job that waits for a person."""
    title = f"{submitted.name if submitted else job}: its run directory is damaged"
    text = cut(f"{error}. Until it is repaired its state is unknown; it may still be training.", MESSAGE_TEXT)
    embed: Embed = {"title": title, "color": BAD, "description": text, "footer": {"text": job}}
    embed["fields"] = fault_fields(Fault(code=error.code, message=str(error), hint=error.hint))
    return _payload(embed)


def repaired(job: SinkJob, event: Event, fact: JobRepaired) -> Payload:
    """What may have been sent events of the events that are lost counts no more."""
    lines = f"The last {fact.lines_lost:,} lines" if fact.lines_lost > 1 else "The last line"
    text = f"{lines} of its events could not be read. The job is in the state after event {event.number - 1}."
    return _payload(_embed(job, f"{job.submitted.name}: {fact.title}", WARNING, text, event))


def started_note(fact: AttemptStarted) -> str:
    """What the message of an attempt says first."""
    if fact.engine is not None:
        return f"The engine {fact.engine} gets the job."
    return f"Started on {fact.gpu_name or 'the CPU'}; loading the model."


def task_note(fact: TaskSubmitted | TaskWaiting | TaskStarted) -> str:
    """What the message of an attempt says of its task on an engine."""
    match fact:
        case TaskSubmitted():
            return f"Waits for its turn on the engine {fact.engine}, as task {fact.task}."
        case TaskWaiting():
            return f"Waits on its engine: {fact.message}."
        case TaskStarted():
            return f"Started on {fact.node}, as task {fact.task} of the engine; loading the model."


def _steps(count: int) -> str:
    return "1 step is" if count == 1 else f"{count:,} steps are"


def _begins(job: SinkJob) -> str:
    """Where the next attempt begins, as far as it is known: the newest checkpoint may turn out to be damaged."""
    if job.checkpoint_step is None:
        return "There is no checkpoint yet: it begins at step 0."
    return f"The newest checkpoint is that of step {job.checkpoint_step:,}."


# -- pieces ----------------------------------------------------------------------------------------------------------


def _payload(*embeds: Embed) -> Payload:
    return {"embeds": fit(list(embeds))}


def _embed(job: SinkJob, title: str, colour: int, description: str, event: Event | None) -> Embed:
    where = [
        job.id,
        *([f"attempt {job.attempt}"] if job.attempt else []),
        *([f"event {event.number}"] if event else []),
    ]
    embed: Embed = {"title": title, "color": colour, "description": description, "footer": {"text": " · ".join(where)}}
    if event is not None:
        embed["timestamp"] = time_text(event.at)
    return embed


def time_text(at: float) -> str:
    """As Discord reads it."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
