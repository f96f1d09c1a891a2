"""Rate limits: a token bucket for each key, or for each address where no key is needed.

Refusals have a smaller bucket for each address. It is checked after the key: guesses from the same address never lock
out a valid key (behind a proxy all share one address), and guessing 256 bits is hopeless at any rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.text.units import format_duration
from service.errors import error_response

OPEN = frozenset({"/health/live", "/health/ready"})
"""Paths that container engines and load balancers ask, without a key and as often as they like."""
SIGN_IN = "/sign-in"
"""Where a browser shows its key, and gets a session."""
STATIC = "/static/"
"""Scripts and styles of the pages: the same for everybody."""
REFUSALS_PER_S = 10.0
BURST = 2.0
"""Seconds' worth of requests that may come at once."""
MOST = 10_000
"""Buckets that are kept."""


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN or path == SIGN_IN or path.startswith(STATIC)


class Buckets:
    """A token bucket for each name: `per_s` tokens come in every second, twice as many have room. 0: no limit."""

    def __init__(self, per_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._room = max(1.0, per_s * BURST)
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> float:
        """Take a token and return 0.0; if there is none, return the seconds until the next one."""
        if not self._per_s:
            return 0.0
        now = self._now()
        level, since = self._levels.pop(name, (self._room, now))
        level = min(self._room, level + (now - since) * self._per_s)
        wait_s = 0.0 if level >= 1 else (1 - level) / self._per_s
        self._levels[name] = (level if wait_s else level - 1, now)
        if len(self._levels) > MOST:  # forget the one unused for longest: its bucket is the fullest
            del self._levels[next(iter(self._levels))]
        return wait_s


class RateLimit:
    """ASGI middleware inside BearerKey: 429 for more than `per_s` requests a second (0: no limit)."""

    def __init__(self, app: ASGIApp, per_s: float) -> None:
        self._app = app
        self._per_s = per_s
        self._buckets = Buckets(per_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            name = scope.get("state", {}).get("key_name")
            wait_s = self._buckets.take(f"key {name}" if name else address(scope))
            if wait_s:
                who = "one key" if name else "one address"
                message = f"more than {self._per_s:g} requests a second from {who}"
                await too_many(message, wait_s)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def too_many(message: str, wait_s: float) -> JSONResponse:
    """429, with the seconds to wait."""
    seconds = max(1, math.ceil(wait_s))
    return error_response(
        429, "rate_limited", message, hint=f"wait {format_duration(seconds)}", headers={"Retry-After": str(seconds)}
    )


def address(scope: Scope) -> str:
    """What a request without a key counts for: its address; of IPv6 the first half: one site has all the rest."""
    host = str((scope.get("client") or ("unknown", 0))[0])
    return ":".join(host.split(":")[:4]) if ":" in host else host
