"""What W&B is told: rows of history, keyed by our own step, and the last words of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.events import EvaluationFinished, Event, JobFailed, JobSucceeded, MetricRow
from worker.sinks.base import Job

EXIT_CODES = {"job.succeeded": 0, "job.paused": 0, "job.failed": 1, "job.cancelled": 255}


def evaluation_row(event: Event, fact: EvaluationFinished) -> dict[str, Any]:
    """One evaluation; the event's number makes a repeat recognisable."""
    row = {"train/step": fact.step, "eval/loss": fact.loss, "eval/rows": fact.rows, "eval/seconds": fact.seconds}
    return row | {"eval/event": event.number}


def fresh_rows(rows: Sequence[MetricRow], highest: int) -> list[MetricRow]:
    """Rows above the highest step so far; an attempt that repeats steps does not repeat them here."""
    fresh = []
    for row in rows:
        if row.step > highest:
            fresh.append(row)
            highest = row.step
    return fresh


def metric_row(row: MetricRow) -> dict[str, Any]:
    """One row of metrics; W&B has its own clock."""
    return {f"train/{key}": value for key, value in row.model_dump(exclude={"at"}).items()}


def farewell(event: Event, job: Job) -> dict[str, Any]:
    """Exit state and summary."""
    summary: dict[str, Any] = {"status": event.type.removeprefix("job."), "attempts": job.attempt}
    match event.fact:
        case JobSucceeded() as fact:
            summary |= {"model": fact.model, "model_step": fact.step, "model_loss": fact.loss}
        case JobFailed() as fact:
            summary |= {"error_code": fact.error.code, "error": fact.error.message[:2000]}
    return {"do": "finish", "exit_code": EXIT_CODES[event.type], "summary": summary}
