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

import json
import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import redis

from jobs.errors import QueueFull
from jobs.redis.connection import Scripts, reachable
from jobs.redis.request_scripts import ANSWER, CANCEL, HELPERS, HOLD, KEEP, PASS_TURN, SUBMIT, TAKE
from jobs.spec import JOB_ID
from jobs.text.units import format_bytes, format_duration

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
