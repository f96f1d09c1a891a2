"""The figures in a Discord message: fields of an embed, and samples as an embed of their own."""

from __future__ import annotations

from jobs.events import Fault, JobPrepared
from jobs.metrics import MetricRow
from jobs.text.units import format_bytes, format_duration, format_figure, format_number, format_share
from worker.sinks.base import SinkJob
from worker.sinks.discord.limits import Embed, EmbedField, cut
from worker.sinks.wording import change, plain, sentence

SAMPLE_TEXT = 500


def fault_fields(error: Fault) -> list[EmbedField]:
    """Code, key and hint of an error."""
    fields = [field("Code", f"`{error.code}`", inline=True)]
    if error.param:
        fields.append(field("Key", f"`{error.param}`", inline=True))
    if error.hint:
        fields.append(field("What helps", sentence(error.hint)))
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
        fields.append(field("Metrics", sentence(job.last_evaluation.metrics_text)))
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
    return [field("Time needed", sentence(job.time))] if job.time else []


def memory_needed(fact: JobPrepared) -> list[EmbedField]:
    """As planned for the longest rows that there are."""
    return [field("Memory needed", sentence(fact.memory.text))] if fact.memory else []


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
