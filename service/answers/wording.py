"""Each event as one sentence for people, or as it is."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from jobs.events import Event

log = logging.getLogger("longhaul.service")
UNWORDED = Counter(
    "longhaul_events_unworded", "Events shown as raw JSON because they could not be worded.", registry=None
)


def sentence(event: Event) -> str:
    """What happened, in plain words, with the figures that matter; an event without words for it as it is."""
    try:
        return event.sentence
    except Exception:  # a mistake of ours: nobody who follows may be cut off by it
        log.exception("job %s: event %d cannot be worded and is shown as raw JSON", event.job, event.number)
        UNWORDED.inc()
        return f"{event.type} {event.fact.model_dump_json(exclude={'type'})}"
