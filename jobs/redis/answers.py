"""The answers to requests as they come, for those who wait: each waits in the event loop, and holds no thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from jobs.errors import LonghaulError, StoreUnavailable
from jobs.redis.feed import answered
from jobs.redis.requests import HELD_S, LAST, PATIENCE_S, Request, Requests, Standing, answer_key, role_of
from jobs.redis.workers import Workers

BLOCK_MS = 1000
KEEP_EVERY_S = 2.0
RETRY_S = 0.5


class RequestLost(LonghaulError):
    """A request will get no answer: what was at work on it, or Redis, is gone."""

    code = "request_lost"
    hint = "ask again"


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer: what the worker added, or `waiting` with how many requests come `ahead` at most."""

    type: str
    data: Mapping[str, Any]

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.type in LAST


class Answers:
    """Follows answers. Close it at the end."""

    def __init__(self, url: str, requests: Requests, workers: Workers) -> None:
        # The timeout must outlast a blocking read.
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=BLOCK_MS / 1000 + 4, socket_connect_timeout=2)
        self._requests, self._workers = requests, workers

    async def close(self) -> None:
        """Leave Redis."""
        await self._redis.aclose()

    async def follow(self, request: Request) -> AsyncIterator[AnswerPart]:
        """The parts, in order, to the last; in between `waiting`, each time that the place in the queue is another.

        A request whose follower leaves early is given up; one whose last part has come is forgotten. Raises
        RequestLost, StoreUnavailable; WorkerMissing where it waits, and no worker that could take it has been heard of
        for `HELD_S`.
        """
        position, standing, lost_redis_at = "0-0", None, None
        kept_at, seen_at = float("-inf"), time.monotonic()
        try:
            while True:
                try:
                    if time.monotonic() - kept_at >= KEEP_EVERY_S:
                        now = await asyncio.to_thread(self._requests.keep, request.id)
                        kept_at = time.monotonic()
                        if now[0] is Standing.WAITING:
                            silent_s = await asyncio.to_thread(self._workers.since_heard, role_of(request.kind))
                            seen_at = max(seen_at, time.monotonic() - silent_s)
                            if time.monotonic() - seen_at > HELD_S:
                                raise await asyncio.to_thread(self._workers.missing, role_of(request.kind))
                        if now != standing and now[0] is Standing.WAITING:
                            yield AnswerPart("waiting", {"ahead": now[1]})
                        if now[0] in (Standing.LOST, Standing.GONE):
                            raise RequestLost(f"the request is lost: {_WHY[now[0]]}")
                        standing = now
                    found = await answered(
                        self._redis.xread({answer_key(request.id): position}, count=1000, block=BLOCK_MS)
                    )
                    lost_redis_at = None
                except (redis.ConnectionError, redis.TimeoutError, StoreUnavailable) as error:
                    lost_redis_at = lost_redis_at or time.monotonic()
                    if time.monotonic() - lost_redis_at > PATIENCE_S:
                        raise StoreUnavailable(f"Redis does not answer: {error}") from error
                    await asyncio.sleep(RETRY_S)
                    continue
                for _, rows in found or []:
                    for row, fields in rows:
                        position = row.decode()
                        part = AnswerPart(fields[b"type"].decode(), json.loads(fields[b"data"]))
                        if part.last:
                            await asyncio.to_thread(self._give_up, request)
                        yield part
                        if part.last:
                            return
        finally:
            await asyncio.shield(asyncio.to_thread(self._give_up, request))

    def _give_up(self, request: Request) -> None:
        try:
            self._requests.give_up(request.id)
        except StoreUnavailable:  # it is forgotten by itself, soon
            return


_WHY = {
    Standing.LOST: "the worker that worked on it is gone",
    Standing.GONE: "Redis was emptied, or has not heard of whoever asked for too long",
}
