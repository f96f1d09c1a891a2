"""What W&B receives: rows of history, keyed by our own step, tables of samples, alerts, the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.events import EvaluationFinished, Event, Fault, JobFailed, JobPaused, JobQueued, JobSucceeded, OomRecovered
from jobs.metrics import MetricRow
from worker.sinks.base import SinkJob
from worker.sinks.shortage import shortage
from worker.sinks.wandb.artifacts import model_artifact
from worker.sinks.wandb.protocol import AlertRequest, ArtifactRequest, FinishRequest, LogRequest, WandbRow

EXIT_CODES = {"job.succeeded": 0, "job.paused": 0, "job.failed": 1, "job.cancelled": 255}
SAMPLES = "eval/samples"
SAMPLE_COLUMNS: list[str | int] = ["step", "input", "target", "generated"]
ALERT_TITLE = 63
ALERT_TEXT = 2000

_GROUPS = {"gpu_": "gpu/", "host_": "host/", "trainer_": "host/trainer_"}
"""How the names of our metrics begin, and where they go; all others are `train/`."""


def metric_row(row: MetricRow) -> WandbRow:
    """One row of metrics, without what this machine does not have. W&B has its own clock."""
    return {_key(name): value for name, value in row.model_dump(exclude={"at"}, exclude_none=True).items()}


def _key(name: str) -> str:
    for begin, group in _GROUPS.items():
        if name.startswith(begin):
            return group + name.removeprefix(begin)
    return f"train/{name}"


def evaluation(event: Event, fact: EvaluationFinished) -> LogRequest:
    """One evaluation with its table of samples; the event's number makes a repeat recognizable."""
    row: WandbRow = {
        "train/step": fact.step,
        "eval/loss": fact.loss,
        "eval/rows": fact.rows,
        "eval/seconds": fact.seconds,
        "eval/event": event.number,
        **{f"eval/{name}": value for name, value in fact.metrics.items()},
    }
    samples: list[list[int | str]] = [[fact.step, each.input, each.target, each.generated] for each in fact.samples]
    return {"do": "log", "rows": [row], "table": {"key": SAMPLES, "columns": SAMPLE_COLUMNS, "data": samples}}


def fresh_rows(rows: Sequence[MetricRow], highest: int) -> list[MetricRow]:
    """Rows above the highest step so far; an attempt that repeats steps does not repeat them here."""
    fresh = []
    for row in rows:
        if row.step > highest:
            fresh.append(row)
            highest = row.step
    return fresh


def alert(event: Event, job: SinkJob) -> AlertRequest | None:
    """What W&B should call a person for: a job that cannot continue, an attempt that failed, memory that ran out."""
    match event.fact:
        case JobFailed(error=error) | JobPaused(error=Fault() as error):
            hint = f"\n{error.hint}" if error.hint else ""
            what = event.type.removeprefix("job.")
            return _alert(job, what, f"{error.code}: {error.message}{hint}", "ERROR")
        case JobQueued() if job.failed_attempt is not None:
            ended = job.failed_attempt
            why = f": {ended.error.message}" if ended.error else ""
            text = f"{ended.reason.headline}{f' {ended.where}' if ended.step else ''}{why}"
            return _alert(job, f"attempt {event.attempt} failed, trying again", text, "WARN")
        case OomRecovered() as fact:
            text = f"Nothing was lost at step {fact.step:,}. {shortage(fact)}. {fact.message}"
            return _alert(job, "out of memory, recovered", text, "WARN")
        case _:
            return None


def _alert(job: SinkJob, what: str, text: str, level: str) -> AlertRequest:
    title = f"{job.submitted.name}: {what}"
    return {"do": "alert", "title": title[:ALERT_TITLE], "text": text[:ALERT_TEXT], "level": level}


def finish_request(event: Event, job: SinkJob) -> FinishRequest:
    """Exit state and summary."""
    summary: dict[str, str | float | None] = {"status": event.type.removeprefix("job."), "attempts": job.attempt}
    artifacts: list[ArtifactRequest] = []
    match event.fact:
        case JobSucceeded() as fact:
            artifacts = model_artifact(job, fact)
            summary |= {"model": fact.model, "model_step": fact.step, "model_loss": fact.loss}
            summary |= {
                "chosen_by": fact.chosen_by,
                "better_step": fact.better_step,
                "kept_from": fact.kept_from,
                "reason": fact.reason.value,
            }
            summary |= {f"model_{name}": figure for name, figure in fact.metrics.items()}
            for name, between in fact.intervals.items():
                summary |= {f"model_{name}_low": between.low, f"model_{name}_high": between.high}
            if fact.verdict is not None:
                summary |= {"verdict": fact.verdict.outcome, "verdict_text": fact.verdict.text}
        case JobFailed(error=error) | JobPaused(error=Fault() as error):
            summary |= {"error_code": error.code, "error": error.message[:2000]}
    return {
        "do": "finish", "exit_code": EXIT_CODES[event.type], "summary": summary, "alert": alert(event, job),
        "artifacts": artifacts,
    }  # fmt: skip
