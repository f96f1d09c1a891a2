"""Answers that go on: server-sent events, and logs that are followed. None of them holds a pool thread while it waits.

Each keeps one connection and a bounded backlog, and there is a bound on how many of them are open.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jobs.events import Event
from jobs.feed import Feed
from service.errors import error_response
from service.shapes import event_json

RETRY_AFTER_S = 10


class Streams:
    """How many answers of this process go on now, and how many may."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0


class Stream(StreamingResponse):
    """An answer that goes on until `content` ends, or the reader leaves; 429 when there are too many already."""

    def __init__(self, streams: Streams, content: AsyncIterator[bytes], media_type: str) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=media_type, headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self._streams.open >= self._streams.most:
            refusal = error_response(
                429,
                "too_many_streams",
                f"{self._streams.open} streams are open, and there may be no more",
                hint=f"close some, or come back in {RETRY_AFTER_S} s",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
            await refusal(scope, receive, send)
            return
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


def frame(event: Event) -> bytes:
    """A server-sent event: `id` is the event's number, `event` its type, `data` its JSON."""
    data = json.dumps(event_json(event), ensure_ascii=False)
    return f"id: {event.number}\nevent: {event.type}\ndata: {data}\n\n".encode()


async def event_stream(feed: Feed, job: str, *, after: int, keep_alive_s: float) -> AsyncIterator[bytes]:
    """Frames of the job's events, to its last; a comment when all is quiet."""
    yield b": following\n\n"  # headers and a first byte at once, so that clients know they are connected
    async for told in feed.follow(job, after=after, idle_s=keep_alive_s):
        yield b"".join(each.frame for each in told) or b": keep-alive\n\n"
