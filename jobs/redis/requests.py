"""Requests that somebody waits for, such as a text to continue: a bounded queue for each kind, and the answers.

    longhaul:requests:<kind>:clients      list of the clients with waiting requests, in the order of their turns
    longhaul:requests:<kind>:of:<client>  list of that client's waiting requests, in the order in which they came
    longhaul:requests:<kind>:bell         list: workers block on it until a request comes
    longhaul:requests:<kind>:at_work      set of the requests that workers are at work on
    longhaul:request:<id>                 hash: kind, job, payload, client, progress; gone once nobody waits any more;
                                          `cancelled`: its worker ends it
    longhaul:request:<id>:held            set while a worker is at work on it
    longhaul:request:<id>:answer          stream: the parts of the answer; the last is `done` or `error`

A request lives as long as whoever asks keeps it alive: one whose asker is gone is skipped, or given up by its worker.
Nothing here is part of a job: Redis may lose all of it, and whoever waits is told so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import redis
import redis.asyncio

from jobs.errors import LonghaulError, QueueFull, StoreUnavailable
from jobs.redis.connection import Scripts, reachable
from jobs.redis.feed import answered
from jobs.redis.workers import Workers
from jobs.spec import JOB_ID
from jobs.text.units import format_bytes, format_duration

# -- request scripts ---------------------------------------------------------------------------------------------------
# Lua of the queues of requests; `jobs.redis.requests` describes their keys.

HELPERS = """
local function request(id) return 'longhaul:request:' .. id end
local function clients(kind) return 'longhaul:requests:' .. kind .. ':clients' end
local function waiting(kind, client) return 'longhaul:requests:' .. kind .. ':of:' .. client end
local function at_work(kind) return 'longhaul:requests:' .. kind .. ':at_work' end
local function ring(kind)
  local bell = 'longhaul:requests:' .. kind .. ':bell'
  redis.call('RPUSH', bell, 1)
  redis.call('LTRIM', bell, -16, -1)
end
"""

# ARGV: id, kind, job, payload, client, ms that it stays without a word of its asker, most waiting, most of one client,
# most bytes → {1 if it waits, 0 if the queue is full; requests that waited before; of these, the client's; their bytes}
SUBMIT = """
local kind, client = ARGV[2], ARGV[5]
local all, own, bytes = 0, 0, 0
for _, each in ipairs(redis.call('LRANGE', clients(kind), 0, -1)) do
  for _, id in ipairs(redis.call('LRANGE', waiting(kind, each), 0, -1)) do
    if redis.call('EXISTS', request(id)) == 0 then redis.call('LREM', waiting(kind, each), 0, id)
    elseif id == ARGV[1] then return {1, all, own, bytes}  -- sent twice
    else
      all = all + 1
      bytes = bytes + redis.call('HSTRLEN', request(id), 'payload')
      if each == client then own = own + 1 end
    end
  end
  if redis.call('EXISTS', waiting(kind, each)) == 0 then redis.call('LREM', clients(kind), 0, each) end
end
if all >= tonumber(ARGV[7]) or own >= tonumber(ARGV[8]) or bytes + #ARGV[4] > tonumber(ARGV[9]) then
  return {0, all, own, bytes}
end
redis.call('HSET', request(ARGV[1]), 'kind', kind, 'job', ARGV[3], 'payload', ARGV[4], 'client', client)
redis.call('PEXPIRE', request(ARGV[1]), ARGV[6])
if own == 0 then redis.call('RPUSH', clients(kind), client) end
redis.call('RPUSH', waiting(kind, client), ARGV[1])
ring(kind)
return {1, all, own, bytes}
"""

# ARGV: kind, token of this call, ms that it is held
# → {id, job, payload, progress} of the next client's first, or nothing
TAKE = """
local kind, mine = ARGV[1], 'longhaul:requests:' .. ARGV[1] .. ':taken:' .. ARGV[2]
local id = redis.call('GET', mine)  -- sent twice: the first one did it
while not id do
  local client = redis.call('LPOP', clients(kind))
  if not client then return {} end
  id = redis.call('LPOP', waiting(kind, client))
  if redis.call('EXISTS', waiting(kind, client)) == 1 then redis.call('RPUSH', clients(kind), client) end
  if id and redis.call('EXISTS', request(id)) == 0 then id = false end
end
redis.call('SET', mine, id, 'PX', 60000)
redis.call('HSET', request(id), 'taken', 1)
redis.call('SET', request(id) .. ':held', 1, 'PX', ARGV[3])
redis.call('SADD', at_work(kind), id)
local h = redis.call('HMGET', request(id), 'job', 'payload', 'progress')
return {id, h[1] or '', h[2] or '', h[3] or '{}'}
"""

# ARGV: id, ms that it stays without another word of its asker ('': as before)
# → {state, requests at work or waiting before it}
KEEP = """
local h = redis.call('HMGET', request(ARGV[1]), 'kind', 'client', 'taken', 'ended')
if not h[1] then return {'gone', 0} end
if ARGV[2] ~= '' then redis.call('PEXPIRE', request(ARGV[1]), ARGV[2]) end
if h[4] then return {'ended', 0} end
if h[3] then return {redis.call('EXISTS', request(ARGV[1]) .. ':held') == 1 and 'taken' or 'lost', 0} end
local before = 0
for _, id in ipairs(redis.call('SMEMBERS', at_work(h[1]))) do
  if redis.call('EXISTS', request(id) .. ':held') == 1 then before = before + 1
  else redis.call('SREM', at_work(h[1]), id) end
end
for _, client in ipairs(redis.call('LRANGE', clients(h[1]), 0, -1)) do
  for place, id in ipairs(redis.call('LRANGE', waiting(h[1], client), 0, -1)) do
    if id == ARGV[1] then return {'waiting', before} end
    before = before + 1
  end
end
return {'gone', 0}
"""

# ARGV: id, number of the part from 1 on, its type, its JSON, ms that it is held, ms that answers stay, 1 if it is last
# → 1: somebody waits; 0: nobody does. The number makes a second call harmless.
ANSWER = """
if redis.call('EXISTS', request(ARGV[1])) == 0 then return 0 end
local stream = request(ARGV[1]) .. ':answer'
redis.pcall('XADD', stream, ARGV[2] .. '-0', 'type', ARGV[3], 'data', ARGV[4])
redis.call('PEXPIRE', stream, ARGV[6])
redis.call('SET', request(ARGV[1]) .. ':held', 1, 'PX', ARGV[5])
if ARGV[7] == '1' then
  redis.call('HSET', request(ARGV[1]), 'ended', 1)
  redis.call('PEXPIRE', request(ARGV[1]), ARGV[6])
  redis.call('DEL', request(ARGV[1]) .. ':held')
end
return 1
"""

# ARGV: id, progress, which is another each time → 1: it waits again, behind all other clients; 0: no other client waits
PASS_TURN = """
local h = redis.call('HMGET', request(ARGV[1]), 'kind', 'client', 'progress')
local kind, client = h[1], h[2]
if not kind then return 0 end
if h[3] == ARGV[2] then return 1 end  -- sent twice
local others = false
for _, each in ipairs(redis.call('LRANGE', clients(kind), 0, -1)) do
  for _, id in ipairs(each == client and {} or redis.call('LRANGE', waiting(kind, each), 0, -1)) do
    others = others or redis.call('EXISTS', request(id)) == 1
  end
end
if not others then return 0 end
redis.call('HSET', request(ARGV[1]), 'progress', ARGV[2])
redis.call('HDEL', request(ARGV[1]), 'taken')
redis.call('DEL', request(ARGV[1]) .. ':held')
redis.call('LPUSH', waiting(kind, client), ARGV[1])
redis.call('LREM', clients(kind), 0, client)
redis.call('RPUSH', clients(kind), client)
ring(kind)
return 1
"""

# ARGV: id → 1: it waited, and is forgotten, or its worker ends it at its next HOLD; 0: it does neither wait nor run
CANCEL = """
local h = redis.call('HMGET', request(ARGV[1]), 'kind', 'taken', 'ended')
if not h[1] or h[3] then return 0 end
if not h[2] then redis.call('DEL', request(ARGV[1]), request(ARGV[1]) .. ':answer')
elseif redis.call('EXISTS', request(ARGV[1]) .. ':held') == 1 then redis.call('HSET', request(ARGV[1]), 'cancelled', 1)
else return 0 end
return 1
"""

# ARGV: id, ms → 1: somebody waits; 0: nobody does
HOLD = """
if redis.call('HEXISTS', request(ARGV[1]), 'cancelled') == 1 then
  redis.call('DEL', request(ARGV[1]), request(ARGV[1]) .. ':held', request(ARGV[1]) .. ':answer')
end
if redis.call('EXISTS', request(ARGV[1])) == 0 then return 0 end
redis.call('SET', request(ARGV[1]) .. ':held', 1, 'PX', ARGV[2])
return 1
"""


# -- requests ----------------------------------------------------------------------------------------------------------

log = logging.getLogger("longhaul.requests")
MOST_WAITING = 128
"""Requests of one kind that wait."""
MOST_OF_CLIENT = 32
"""Of these, requests of one client."""
MOST_BYTES = 32 * 2**20
"""Of what those of one kind that wait ask."""
PATIENCE_S = 30.0
"""A request is forgotten when its asker has not been heard of for so long."""
HELD_S = 15.0
"""A worker that has not been heard of for so long is gone."""
ANSWER_S = 600.0
"""Parts of an answer stay for so long after the newest one."""
RETRY_AFTER_S = 5


class Standing(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    TAKEN = "taken"
    ENDED = "ended"
    LOST = "lost"
    """Its worker is gone."""
    GONE = "gone"
    """Redis was emptied, or it was given up."""


@dataclass(frozen=True)
class Request:
    """Something that one worker does for whoever waits."""

    id: str
    kind: str
    job: str
    payload: Mapping[str, Any]
    """What its kind needs; JSON."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """What its worker has kept of earlier turns; JSON."""


class Requests:
    """Both sides of the queues. Raises StoreUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._script = Scripts(client, HELPERS)

    # -- who asks ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        kind: str,
        job: str,
        payload: Mapping[str, Any],
        *,
        client: str,
        patience_s: float = PATIENCE_S,
        id: str | None = None,
    ) -> Request:
        """Let a new request wait: the clients take turns. It is forgotten `patience_s` after the last `keep`.

        `id`: of what is done once at a time, and found again by whoever knows what it is. Raises QueueFull.
        """
        request = Request(id or uuid.uuid4().hex, kind, job, payload)
        waits, ahead, own, size = self._script(
            SUBMIT, request.id, kind, job, _json(payload), client, round(patience_s * 1000),
            MOST_WAITING, MOST_OF_CLIENT, MOST_BYTES,
        )  # fmt: skip
        if not waits:
            if own >= MOST_OF_CLIENT:
                whose = f"{own} requests of yours wait"
            elif ahead >= MOST_WAITING:
                whose = f"{ahead} requests wait"
            else:
                whose = (
                    f"requests of {format_bytes(size)} wait; with this one it is more than {format_bytes(MOST_BYTES)}"
                )
            raise QueueFull(
                f"{whose}, which is the limit",
                hint=f"wait for answers, or try again in {format_duration(RETRY_AFTER_S)}",
            )
        return request

    def keep(self, id: str, *, patience_s: float = PATIENCE_S) -> tuple[Standing, int]:
        """Say that somebody still waits. Returns where it stands, and of a waiting one how many others are at
        work or wait before it at most: the clients take turns."""
        standing, ahead = self._script(KEEP, id, round(patience_s * 1000))
        return Standing(standing.decode()), int(ahead)

    def standing(self, id: str) -> tuple[Standing, int]:
        """The same, without a word of whoever asked."""
        standing, ahead = self._script(KEEP, id, "")
        return Standing(standing.decode()), int(ahead)

    def payload(self, id: str) -> Mapping[str, object] | None:
        """Of a request that is known; None: it is not."""
        with reachable():
            found: Any = self._redis.hget(request_key(id), "payload")
        return None if found is None else dict(json.loads(found))

    def give_up(self, id: str) -> None:
        """Nobody waits any more: it is skipped, or its worker stops."""
        with reachable():
            self._redis.delete(request_key(id), f"{request_key(id)}:held", answer_key(id))

    def cancel(self, id: str) -> bool:
        """End it: one that waits is forgotten, and one that is taken when its worker says the next time that it holds
        it, within seconds. False: it neither waits nor is taken."""
        return bool(self._script(CANCEL, id))

    def cancelled(self, id: str) -> bool:
        """Whether its worker is about to end it."""
        with reachable():
            return bool(self._redis.hexists(request_key(id), "cancelled"))

    def newest_part(self, id: str) -> tuple[str, Mapping[str, object]] | None:
        """Type and data of the newest part of its answer; None: there is none."""
        with reachable():
            found: Any = self._redis.xrevrange(answer_key(id), count=1)
        return (found[0][1][b"type"].decode(), json.loads(found[0][1][b"data"])) if found else None

    # -- who answers ---------------------------------------------------------------------------------------------------

    def take(self, kind: str) -> Request | None:
        """The first request of the client whose turn it is; None: nobody waits. One that is damaged is dropped."""
        while found := self._script(TAKE, kind, uuid.uuid4().hex, round(HELD_S * 1000)):
            id, job = (each.decode(errors="replace") for each in found[:2])
            try:
                if re.fullmatch(JOB_ID, job) is None:
                    raise ValueError(f"{job[:80]!r} is no id of a job")
                return Request(id, kind, job, dict(json.loads(found[2])), dict(json.loads(found[3])))
            except (ValueError, TypeError) as error:
                log.error("%s %s is damaged, and dropped: %s", kind, id, error)
                self.give_up(id)
        return None

    def wait(self, kind: str, timeout_s: float) -> None:
        """Return when a request may be waiting, or after the timeout (1 s at most)."""
        with reachable():
            self._redis.blpop([f"longhaul:requests:{kind}:bell"], timeout=min(timeout_s, 1.0))

    def hold(self, id: str) -> bool:
        """Say that a worker is still at work on it. False: nobody waits any more."""
        return bool(self._script(HOLD, id, round(HELD_S * 1000)))

    def pass_turn(self, id: str, progress: Mapping[str, Any]) -> bool:
        """Let it wait again where other clients wait, its next turn behind theirs; `progress` is kept for it, and must
        be another each time. False: no other client waits."""
        return bool(self._script(PASS_TURN, id, _json(progress)))

    def answer(self, id: str, number: int, type: str, data: Mapping[str, Any]) -> bool:
        """Add a part, numbered from 1 on; `done` and `error` are the last. False: nobody waits any more."""
        last = int(type in LAST)
        held_ms, answer_ms = round(HELD_S * 1000), round(ANSWER_S * 1000)
        return bool(self._script(ANSWER, id, number, type, _json(data), held_ms, answer_ms, last))


def _json(data: Mapping[str, Any]) -> bytes:
    """As short as it can be; half a surrogate pair, which a row may have, is kept as it is."""
    return json.dumps(data, ensure_ascii=False).encode(errors="surrogatepass")


def role_of(kind: str) -> str:
    """Of the workers that take requests of this kind."""
    return "push" if kind == "push" else "generate"


LAST = ("done", "error")
"""Types of the last part of an answer. Of an error, `data` has `code`, `message` and `hint`."""


def request_key(id: str) -> str:
    """Key of a request's hash."""
    return f"longhaul:request:{id}"


def answer_key(id: str) -> str:
    """Key of the stream of its answer, whose entries have `type` and `data` (JSON)."""
    return f"{request_key(id)}:answer"


# -- answers -----------------------------------------------------------------------------------------------------------
# The answers to requests as they come, for those who wait: each waits in the event loop, and holds no thread.

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
