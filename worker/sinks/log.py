"""Every event as one structured line (JSON) in the process log."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from jobs.events import Event, JobPaused, JobSubmitted
from jobs.metrics import MetricRow
from worker.sinks.base import DONE, Outcome, SinkJob

LONGEST_TEXT = 500

log = logging.getLogger("longhaul.events")


class LogSink:
    """Accepts every job; cannot fail."""

    name = "log"
    follows_metrics = False

    def accepts(self, submitted: JobSubmitted) -> bool:
        """Every job."""
        return True

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """One line."""
        bad = event.type in ("job.failed", "oom.recovered", "disk.low")
        bad = bad or (isinstance(event.fact, JobPaused) and event.fact.error is not None)
        level = logging.WARNING if bad else logging.INFO
        log.log(level, "%s", line(event))
        return DONE

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """Rows are in metrics.jsonl already."""
        return DONE

    def close(self, job: SinkJob) -> None:
        """Nothing is held."""


def line(event: Event) -> str:
    """The event as JSON, long texts cut, lists as their length, newlines escaped (so one event is one line)."""
    fact = event.fact.model_dump(mode="json", exclude={"type"}, exclude_none=True)
    head = {
        "job": event.job,
        "event": event.number,
        "type": event.type,
        "attempt": event.attempt,
        "at": round(event.at, 3),
    }
    return json.dumps(head | {key: _short(value) for key, value in fact.items()}, ensure_ascii=False)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    if isinstance(value, list):
        return len(value)
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return value
