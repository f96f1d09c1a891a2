"""Connections to Redis: how long they wait, how they run a Lua script, one error when Redis is away; and tickets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.errors import Recovering, StoreUnavailable
from jobs.state import Stage

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


# -- queue -------------------------------------------------------------------------------------------------------------
# Tickets: RQ jobs that say "there is work on this queue", and nothing else. The only user of rq's Queue.
#
# Longhaul itself keeps the order, the retries and the truth (architecture.md: Truth): a lost ticket is harmless, and a
# surplus one finds nothing to do.

log = logging.getLogger("longhaul.queue")
TICKET_FUNCTION = "worker.supervise.work"
"""The only function that a ticket may name; workers reject all others."""


def queue_name(stage: Stage) -> str:
    """One queue per stage and kind of worker."""
    return f"longhaul-{stage.value}"


class Tickets:
    """Adds and counts tickets."""

    def __init__(self, client: redis.Redis) -> None:
        self._queues = {
            stage: Queue(queue_name(stage), connection=client, serializer=JSONSerializer) for stage in Stage
        }

    def add(self, stage: Stage) -> None:
        """Add a ticket. If Redis is unreachable the ticket is lost, and reconcile adds another."""
        try:
            with reachable():
                self._queues[stage].enqueue(
                    TICKET_FUNCTION, stage.value, job_timeout=-1, result_ttl=0, failure_ttl=3600, ttl=None
                )
        except StoreUnavailable as error:
            log.warning("ticket for %s not added: %s", stage.value, error)

    def count(self, stage: Stage) -> int:
        """Tickets that no worker has taken yet."""
        with reachable():
            return self._queues[stage].count
