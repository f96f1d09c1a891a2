"""Connections to Redis: how long they wait, how they run a Lua script, and one error when Redis is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from jobs.errors import Recovering, StoreUnavailable

RECOVERING = "LONGHAUL-RECOVERING"
"""The reply of a script that may not answer before Redis knows every job (`rebuilt()` of `jobs.redis.scripts`)."""


class Backoff(ExponentialBackoff):
    """Waits a little longer each time. Once it is `over`, a lost connection is an error."""

    def __init__(self, over: Callable[[], bool]) -> None:
        super().__init__(cap=2.0, base=0.05)
        self._over = over

    def compute(self, failures: int) -> float:
        """Seconds to wait after this many failures. Raises ConnectionError once it is over."""
        if self._over():
            raise redis.ConnectionError("Redis does not answer, and nothing waits for it any more")
        return super().compute(failures)

    def __deepcopy__(self, memo: object) -> Backoff:
        return self  # every connection copies its client's; what `over` asks is one for all


def connect(url: str, *, patient_until: Callable[[], bool] | None = None) -> redis.Redis:
    """A client that answers or fails within about 2 s. A patient one (for RQ's own loop) waits until told to stop."""
    if patient_until is not None:
        retry = Retry(Backoff(patient_until), -1)
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=5,
            retry=retry,
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )
    return redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2, retry=Retry(NoBackoff(), 1))


class Scripts:
    """Calls Lua scripts by their text, with `helpers` prepended. Each text is sent to Redis once."""

    def __init__(self, client: redis.Redis, helpers: str) -> None:
        self._redis = client
        self._helpers = helpers
        self._known: dict[str, Callable[..., Any]] = {}

    def __call__(self, script: str, *args: str | bytes | int) -> Any:
        """What the script returns for these ARGV. Raises StoreUnavailable."""
        call = self._known.get(script)
        if call is None:
            call = self._known[script] = self._redis.register_script(self._helpers + script)
        with reachable():
            return call(keys=[], args=list(args))


@contextmanager
def reachable() -> Iterator[None]:
    """Raises StoreUnavailable for every error of a Redis that is unreachable or rejects writes."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise StoreUnavailable(f"Redis does not answer: {error}") from error
    except redis.ResponseError as error:
        # Out of memory (noeviction), a read-only replica, or a disk that its AOF cannot be written to.
        if isinstance(error, redis.OutOfMemoryError | redis.ReadOnlyError) or "MISCONF" in str(error):
            raise StoreUnavailable(f"Redis takes no writes: {error}") from error
        if RECOVERING in str(error):
            raise Recovering("Redis is being rebuilt from the run directories") from error
        raise
