"""Events as they happen: one reader of Redis per process, fanned out to any number of followers (design §12).

A follower has a bounded queue. One that is too slow, or that the reader may have missed something for, loses its queue
and reads on from the job's own stream, by number: nobody misses an event and nobody slows another down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import redis
import redis.asyncio

from jobs.events import Event
from jobs.state import Status
from jobs.store import ALL_EVENTS, events_key

log = logging.getLogger("longhaul.feed")
QUEUE_LENGTH = 256
PAGE = 500
BLOCK_MS = 1000
RETRY_S = 1.0
LAST_EVENTS = frozenset(f"job.{status}" for status in Status if status.terminal)
"""Types after which a job has no more events."""


class Feed:
    """Use as an async context manager; the reader runs inside."""

    def __init__(self, url: str) -> None:
        # The timeout must outlast a blocking read.
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=BLOCK_MS / 1000 + 4, socket_connect_timeout=2)
        self._queues: dict[str, set[asyncio.Queue[Event | None]]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Feed:
        self._reader = asyncio.create_task(self._read_for_ever())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._redis.aclose()

    async def follow(self, job: str, *, after: int, idle_s: float) -> AsyncIterator[Event | None]:
        """The job's events above number `after`, in order, without gap, up to its last. None: idle for `idle_s`."""
        with self._queue(job) as queue:
            while True:
                # The queue is open before this read: what happens during it waits there.
                for event in await self._stored(job, after):
                    after = event.number
                    yield event
                    if event.type in LAST_EVENTS:
                        return
                following = True
                while following:
                    try:
                        live = await asyncio.wait_for(queue.get(), idle_s)
                    except TimeoutError:
                        yield None
                        continue
                    if live is None or live.number > after + 1:
                        following = False
                    elif live.number == after + 1:
                        after = live.number
                        yield live
                        if live.type in LAST_EVENTS:
                            return

    # ----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _queue(self, job: str) -> Iterator[asyncio.Queue[Event | None]]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue(QUEUE_LENGTH)
        self._queues.setdefault(job, set()).add(queue)
        try:
            yield queue
        finally:
            followers = self._queues[job]
            followers.discard(queue)
            if not followers:
                del self._queues[job]

    async def _stored(self, job: str, after: int) -> list[Event]:
        """All events above `after` in the job's own stream; waits for Redis as long as it takes."""
        events: list[Event] = []
        while True:
            start = events[-1].number if events else after
            try:
                rows = cast(
                    list[Any],
                    await self._redis.xrange(events_key(job), min=f"({start}-0", count=PAGE),
                )
            except (redis.ConnectionError, redis.TimeoutError):
                await asyncio.sleep(RETRY_S)
                continue
            events += [Event.model_validate_json(fields[b"event"]) for _, fields in rows]
            if len(rows) < PAGE:
                return events

    async def _read_for_ever(self) -> None:
        position: str | None = None
        while True:
            try:
                if position is None:
                    newest = cast(list[Any], await self._redis.xrevrange(ALL_EVENTS, count=1))
                    position = newest[0][0].decode() if newest else "0-0"
                    self._all_read_again()
                answer = cast(Any, await self._redis.xread({ALL_EVENTS: position}, count=1000, block=BLOCK_MS))
                for _, rows in answer or []:
                    for row, fields in rows:
                        self._hand_out(fields[b"job"].decode(), fields[b"event"])
                        position = row.decode()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                # What came meanwhile may be trimmed, or Redis replaced: begin at the end, and let everybody look.
                log.warning("the feed lost Redis: %s", error)
                position = None
                await asyncio.sleep(RETRY_S)

    def _hand_out(self, job: str, raw: bytes) -> None:
        queues = self._queues.get(job)
        if not queues:
            return
        event = Event.model_validate_json(raw)
        for queue in queues:
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                _read_again(queue)

    def _all_read_again(self) -> None:
        for queues in self._queues.values():
            for queue in queues:
                _read_again(queue)


def _read_again(queue: asyncio.Queue[Event | None]) -> None:
    """Drop what waits; None tells the follower to read from the job's stream."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
