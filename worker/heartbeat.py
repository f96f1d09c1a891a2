"""What a worker process says of itself, to Redis; with Redis away it keeps working."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from typing import Any

from jobs.disk.writable import unwritable
from jobs.errors import StoreUnavailable
from jobs.redis.queue import queue_name
from jobs.redis.store import Store
from jobs.state import Stage
from worker.settings import WorkerSettings

log = logging.getLogger("longhaul.worker")


def report(store: Store, facts: dict[str, Any]) -> None:
    """A heartbeat; with Redis away it is left out."""
    try:
        store.workers.report(facts)
    except StoreUnavailable as error:
        log.warning("heartbeat left out: %s", error)


class Fitness:
    """Whether a worker can still write where it must, as a part of its heartbeats. It says each change once."""

    def __init__(self, role: str, settings: WorkerSettings) -> None:
        first, *rest = settings.writes(role)
        self._folders = (first / ".locks", *rest)  # what changes in the runs folder itself makes publish list it again
        self._why: str | None = None

    def look(self) -> None:
        """Look again."""
        why = unwritable(self._folders)
        if why != self._why:
            log.error("no work can be done: %s", why) if why else log.warning("all folders can be written again")
            self._why = why

    @property
    def facts(self) -> dict[str, Any]:
        """What was found."""
        return {"healthy": self._why is None, "why": self._why}


def forget(store: Store, name: str) -> None:
    """Leave in good order; with Redis away the heartbeat runs out by itself."""
    try:
        store.workers.forget(name)
    except StoreUnavailable as error:
        log.warning("worker %s could not sign off: %s", name, error)


def worker_facts(stage: str, settings: WorkerSettings) -> dict[str, Any]:
    """What a heartbeat says of this process."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "rq", "redis")}
    return {
        # A restarted container has the same host name and often the same pid: RQ would take it for a living one.
        "name": f"{stage}-{platform.node()}-{os.getpid()}-{os.urandom(3).hex()}",
        "pid": os.getpid(),
        "stage": stage,
        "healthy": True,
        "why": None,
        "busy": False,
        "queue": None if stage == "publish" else queue_name(Stage(stage)),
        "device": settings.device,
        "gpu": None,
        "versions": versions,
    }
