"""Every event as one line in the process log; with LONGHAUL_LOG=json its facts are members of that line's object."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from jobs.events import Event, JobSubmitted
from jobs.metrics import MetricRow
from jobs.text.units import one_line
from worker.sinks.base import DONE, Outcome, SinkJob

LONGEST_TEXT = 500

log = logging.getLogger("longhaul.events")


_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class LogSink:
    """Accepts every job; cannot fail."""

    name = "log"
    follows_metrics = False

    def accepts(self, submitted: JobSubmitted) -> bool:
        """Every job."""
        return True

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """One line."""
        log.log(_LEVELS[event.fact.level], "%s", text(event), extra={"fields": fields(event)})
        return DONE

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """Rows are in metrics.jsonl already."""
        return DONE

    def close(self, job: SinkJob) -> None:
        """Nothing is held."""


def fields(event: Event) -> dict[str, JsonValue]:
    """The event; long texts cut, lists as their length."""
    fact = event.fact.model_dump(mode="json", exclude={"type"}, exclude_none=True)
    head: dict[str, JsonValue] = {"job": event.job, "event": event.number, "type": event.type, "attempt": event.attempt}
    return {**head, "at": round(event.at, 3), "fact": _short(fact)}


def text(event: Event) -> str:
    """The same for people, without newlines (so one event is one line)."""
    said = fields(event)
    values = ", ".join(f"{name}={one_line(str(value))}" for name, value in _flat("fact", said["fact"]))
    head = f"{event.job} event {event.number}, attempt {event.attempt}: {event.type}"
    return f"{head} ({values})" if values else head


def _flat(name: str, value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """The members of an object, and of those in it, by their dotted names."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    else:
        yield name.removeprefix("fact."), value


def _short(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    if isinstance(value, list):
        return len(value)
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return value
