"""Events as they happen: one reader of Redis per process, fanned out to any number of followers.

What a follower receives of an event is made once for all of them. What waits for a follower is bounded: one that is too
slow, or for which the reader may have missed something, reads on from the job's own stream, by number. No follower
misses an event or slows another down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import redis
import redis.asyncio
from pydantic import ValidationError

from jobs.events import Event
from jobs.redis.store import ALL_EVENTS, events_key
from jobs.state import Status

log = logging.getLogger("longhaul.feed")
MOST_WAITING = 256
"""Events that wait for one follower."""
MOST_KEPT = 2048
"""Newest events, of any job, that are kept as they are sent: followers that come at the same time ask for the same."""
PAGE = 500
CONNECTIONS = 8
"""To Redis, for followers that look into the stream of their job: all may come at once when the service starts."""
TOGETHER_S = 0.001
"""After a delivery, news for a follower are collected for so long, and then sent in one write.
The first news go at once; one follower waits for 1 ms after them, 500 for half a second, and cost little more."""
AT_ONCE = 20
"""Followers served in one turn of the event loop; then it is free for PAUSE_S."""
PAUSE_S = 0.002
BLOCK_MS = 1000
RETRY_S = 1.0
LAST_EVENTS = frozenset(f"job.{status}" for status in Status if status.terminal)
"""Types after which a job has no more events."""


class Delivered(NamedTuple):
    """An event, as all its followers receive it."""

    number: int
    last: bool
    frame: bytes


class Feed:
    """Use as an async context manager; the reader runs inside. `frame` says how an event is sent, `unread` how one of
    a job is that this version cannot read: from the job's id, its number and what Redis holds.
    """

    def __init__(
        self, url: str, frame: Callable[[Event], bytes], unread: Callable[[str, int, bytes], bytes] | None = None
    ) -> None:
        # The timeout must outlast a blocking read.
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=BLOCK_MS / 1000 + 4, socket_connect_timeout=2)
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._followers: dict[str, set[_Follower]] = {}
        self._reader: asyncio.Task[None] | None = None

        @lru_cache(maxsize=MOST_KEPT)
        def delivery(raw: bytes) -> Delivered:
            event = Event.model_validate_json(raw)
            return Delivered(event.number, event.type in LAST_EVENTS, frame(event))

        self._delivery = delivery
        self._unread = unread

    async def __aenter__(self) -> Feed:
        self._reader = asyncio.create_task(self._read_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._redis.aclose()

    async def follow(self, job: str, *, after: int, idle_s: float) -> AsyncIterator[list[Delivered]]:
        """The job's events above number `after`, in order, without gap, up to its last; empty: idle for `idle_s`."""
        with self._follower(job) as follower:
            look = True
            while True:
                if look:
                    # Already a follower: what happens during this read waits there.
                    new = await self._stored(job, after)
                    look = len(new) == PAGE
                else:
                    try:
                        async with asyncio.timeout(idle_s):
                            await follower.news.wait()
                    except TimeoutError:
                        yield []
                        continue
                    new, look = follower.take(after)
                if new:
                    after = new[-1].number
                    yield new
                    if new[-1].last:
                        return

    async def ended(self, job: str, *, after: int) -> None:
        """Returns when a job that had not ended at event `after` has."""
        async for _ in self.follow(job, after=after, idle_s=3600):
            pass

    # ----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _follower(self, job: str) -> Iterator[_Follower]:
        follower = _Follower()
        self._followers.setdefault(job, set()).add(follower)
        try:
            yield follower
        finally:
            others = self._followers[job]
            others.discard(follower)
            if not others:
                del self._followers[job]

    async def _stored(self, job: str, after: int) -> list[Delivered]:
        """The next events above `after` in the job's own stream, a page at most. Waits for Redis."""
        while True:
            try:
                async with self._turns:
                    rows = await answered(self._redis.xrange(events_key(job), min=f"({after}-0", count=PAGE))
                found = [self._readable(job, row, fields) for row, fields in rows]
                return [delivery for delivery in found if delivery is not None]
            except (redis.ConnectionError, redis.TimeoutError):
                await asyncio.sleep(RETRY_S)

    def _readable(self, job: str, row: bytes, fields: dict[bytes, bytes]) -> Delivered | None:
        """An entry of the job's own stream, whose id begins with the event's number; as it is, if it cannot be read."""
        number, raw = int(row.partition(b"-")[0]), fields.get(b"event", b"")
        try:
            return self._delivery(raw)
        except ValidationError as error:
            log.error("job %s: event %d cannot be read by this version: %s", job, number, error.errors()[0]["msg"])
        return Delivered(number, _type(raw) in LAST_EVENTS, self._unread(job, number, raw)) if self._unread else None

    async def _read_forever(self) -> None:
        """Nothing ends the reader: everybody who follows any job hears from it."""
        while True:
            try:
                await self._read()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                log.warning("the feed lost Redis: %s", error)
            except Exception:
                log.exception("the reader of the feed failed; it starts again in %.0f s", RETRY_S)
            await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        """From the newest event on: what came before may be trimmed, or Redis replaced, so everybody looks first."""
        newest = await answered(self._redis.xrevrange(ALL_EVENTS, count=1))
        position = newest[0][0].decode() if newest else "0-0"
        self._reread_all()
        while True:
            answer = await answered(self._redis.xread({ALL_EVENTS: position}, count=1000, block=BLOCK_MS))
            for _, rows in answer or []:
                news: dict[str, list[bytes]] = {}
                for row, fields in rows:
                    news.setdefault(fields[b"job"].decode(), []).append(fields[b"event"])
                    position = row.decode()
                followers = 0
                for job, events in news.items():
                    followers += await self._dispatch(job, events)
                await asyncio.sleep(followers * TOGETHER_S)

    async def _dispatch(self, job: str, events: list[bytes]) -> int:
        """Returns how many followers were notified."""
        followers = list(self._followers.get(job, ()))
        if not followers:
            return 0
        news: list[Delivered] = []
        for raw in events:
            try:
                news.append(self._delivery(raw))
            except ValidationError as error:
                # Its followers look where its number stands beside it; the reader is there for those of all the others.
                log.error("job %s has an event that this version cannot read: %s", job, error.errors()[0]["msg"])
                for follower in followers:
                    follower.reread()
        # A few at a time: other requests do not wait until hundreds of answers are sent.
        for count, follower in enumerate(followers, start=1):
            follower.deliver(news)
            if count % AT_ONCE == 0:
                await asyncio.sleep(PAUSE_S)
        return len(followers)

    def _reread_all(self) -> None:
        for followers in self._followers.values():
            for follower in followers:
                follower.reread()


def _type(raw: bytes) -> object:
    """Of an event that cannot be read otherwise."""
    try:
        return json.loads(raw)["fact"]["type"]
    except (ValueError, LookupError, TypeError):
        return None


async def answered(asked: Awaitable[Any]) -> Any:
    """What Redis answers. redis-py looks at its connection under a timeout of 0, and a cancellation that comes at that
    moment is taken for that timeout: without this, a task that is stopped then would run forever.
    """
    try:
        return await asked
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


class _Follower:
    """What waits for one follower of a job."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._waiting: list[Delivered] = []
        self._missed = False

    def deliver(self, news: list[Delivered]) -> None:
        if len(self._waiting) + len(news) <= MOST_WAITING:
            self._waiting += news
            self.news.set()
        else:
            self.reread()

    def reread(self) -> None:
        """Drop what waits: it is to be read from the job's stream."""
        self._waiting.clear()
        self._missed = True
        self.news.set()

    def take(self, after: int) -> tuple[list[Delivered], bool]:
        """What follows event `after` without gap, and whether the job's stream has to be looked into for more."""
        waiting, self._waiting = self._waiting, []
        missed, self._missed = self._missed, False
        self.news.clear()
        new = [delivery for delivery in waiting if delivery.number > after]
        gap = any(delivery.number != number for number, delivery in enumerate(new, start=after + 1))
        return ([], True) if missed or gap else (new, False)
