"""Server-sent events: `id` is the event's number, `event` its type, `data` its JSON; a comment when all is quiet."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from jobs.feed import Feed
from service.shapes import event_json


async def event_stream(feed: Feed, job: str, *, after: int, keep_alive_s: float) -> AsyncIterator[str]:
    """The text of the stream; it ends after the job's last event."""
    yield ": following\n\n"  # headers and a first byte at once, so that clients know they are connected
    async for event in feed.follow(job, after=after, idle_s=keep_alive_s):
        if event is None:
            yield ": keep-alive\n\n"
        else:
            data = json.dumps(event_json(event), ensure_ascii=False)
            yield f"id: {event.number}\nevent: {event.type}\ndata: {data}\n\n"
