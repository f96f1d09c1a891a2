"""Long answers: server-sent events, and logs that are followed. None of them holds a pool thread while it waits.

Each keeps one connection and a bounded backlog, and there is a bound on how many of them are open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jobs.events import Event
from jobs.redis.feed import Feed
from jobs.text.units import format_duration
from service.answers.conversion import event_answer, unread_event
from service.errors import TooManyStreams

KEEP_ALIVE = b": keep-alive\n\n"


class Streams:
    """How many long answers this process has open, and how many it may have."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0

    def require(self) -> None:
        """Raises TooManyStreams where one more would be too many."""
        if self.open >= self.most:
            raise TooManyStreams(
                f"{self.open} streams are open, which is the limit",
                hint=f"close some, or try again in {format_duration(TooManyStreams.retry_after_s)}",
            )


class Stream(StreamingResponse):
    """An answer that lasts until `content` ends, or the reader leaves. Raises TooManyStreams when it is called."""

    def __init__(self, streams: Streams, content: AsyncIterator[bytes], media_type: str) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=media_type, headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        self._streams.require()
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1


def frame(event: Event) -> bytes:
    """A server-sent event: `id` is the event's number, `event` its type, `data` its JSON."""
    shown = event_answer(event)
    return _frame(shown.number, event.type, shown.model_dump_json())


def unread_frame(job: str, number: int, raw: bytes) -> bytes:
    """The same of an event that this version cannot read."""
    shown = unread_event(job, number, raw)
    return _frame(number, str(shown["type"]), json.dumps(shown, ensure_ascii=False))


def _frame(number: int, kind: str, data: str) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {data}\n\n".encode(errors="replace")


async def kept_alive(frames: AsyncGenerator[bytes], keep_alive_s: float) -> AsyncIterator[bytes]:
    """The same, with a comment each time that all has been quiet for so long."""
    upcoming: asyncio.Task[bytes] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.create_task(_next(frames))
            if not (await asyncio.wait((upcoming,), timeout=keep_alive_s))[0]:
                yield KEEP_ALIVE
                continue
            arrived, upcoming = upcoming, None
            try:
                yield arrived.result()
            except StopAsyncIteration:
                return
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait((upcoming,))
        await frames.aclose()


async def _next(frames: AsyncIterator[bytes]) -> bytes:
    return await anext(frames)


async def event_stream(feed: Feed, job: str, *, after: int, keep_alive_s: float) -> AsyncIterator[bytes]:
    """Frames of the job's events, to its last; a comment when all is quiet."""
    yield b": following\n\n"  # headers and a first byte at once, so that clients know they are connected
    async for delivery in feed.follow(job, after=after, idle_s=keep_alive_s):
        yield b"".join(each.frame for each in delivery) or KEEP_ALIVE
