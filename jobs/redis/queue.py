"""Tickets: RQ jobs that say "there is work on this queue", and nothing else. The only user of rq's Queue.

Longhaul itself keeps the order, the retries and the truth (architecture.md: Truth): a lost ticket is harmless, and a
surplus one finds nothing to do.
"""

from __future__ import annotations

import logging

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from jobs.errors import StoreUnavailable
from jobs.redis.connection import reachable
from jobs.state import Stage

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
