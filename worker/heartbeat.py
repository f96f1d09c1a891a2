"""A worker process reports its state to Redis; with Redis away it keeps working."""

from __future__ import annotations

import logging
import os
import platform
import time

from jobs.disk.files import unwritable
from jobs.errors import StoreUnavailable
from jobs.heartbeat import WorkerHeartbeat
from jobs.redis.connection import queue_name
from jobs.redis.store import Store
from jobs.state import Stage
from jobs.version import VERSION, library_versions
from worker.runs_lock import id_file
from worker.settings import WorkerSettings

log = logging.getLogger("longhaul.worker")


def report(store: Store, heartbeat: WorkerHeartbeat) -> float:
    """A heartbeat; with Redis away it is left out. Returns by how many seconds our clock is ahead of that of Redis."""
    asked_at = time.time()
    try:
        told_at = store.workers.report(heartbeat)
    except StoreUnavailable as error:
        log.warning("heartbeat left out: %s", error)
        return 0.0
    return (asked_at + time.time()) / 2 - told_at


class Fitness:
    """Whether a worker can still write where it must, as a part of its heartbeats. Each change is logged once.

    With a `store` also whether its runs directory is that of the jobs in Redis: a box may have an empty folder there.
    """

    def __init__(self, role: str, settings: WorkerSettings, store: Store | None = None) -> None:
        first, *rest = settings.writes(role)
        self._runs, self._store = first, store
        self._outdated: str | None = None
        self._folders = (first / ".locks", *rest)  # what changes in the runs folder itself makes publish list it again
        self.why: str | None = None
        """Why it cannot, as far as was seen."""

    def check(self) -> None:
        """Look again."""
        why = self._outdated or self._elsewhere() or unwritable(self._folders)
        if why != self.why:
            log.error("no work can be done: %s", why) if why else log.warning("work can be done again")
            self.why = why

    def outdate(self, why: str) -> None:
        """No work can be done until this process is one of another version."""
        self._outdated = why

    def _elsewhere(self) -> str | None:
        """Why the runs directory is not that of the jobs in Redis; None: it is, or Redis does not say."""
        if self._store is None:
            return None
        try:
            expected = self._store.maintenance.runs_name()
        except StoreUnavailable:
            return None
        if expected is None:
            return None
        file = id_file(self._runs)
        try:
            wrong = "has another id than" if file.read_text() != expected else None
        except OSError as error:
            wrong = f"cannot be read ({error.strerror}), so this is not"
        return wrong and f"{file} {wrong} the runs directory of the jobs in Redis; mount that one and start again"


def forget(store: Store, name: str) -> None:
    """Leave in good order; with Redis away the heartbeat runs out by itself."""
    try:
        store.workers.forget(name)
    except StoreUnavailable as error:
        log.warning("worker %s could not sign off: %s", name, error)


def first_heartbeat(stage: str, settings: WorkerSettings) -> WorkerHeartbeat:
    """The heartbeat of this process when it starts."""
    return WorkerHeartbeat(
        # A restarted container has the same host name and often the same pid: RQ would take it for a living one.
        name=f"{stage}-{platform.node()}-{os.getpid()}-{os.urandom(3).hex()}",
        pid=os.getpid(),
        parent_pid=os.getppid(),
        box=settings.box,
        stage=stage,
        healthy=True,
        why=None,
        busy=False,
        queue=queue_name(Stage(stage)) if stage in set(Stage) else None,
        device=settings.device,
        gpu=None,
        versions={"longhaul": VERSION, **library_versions("torch", "transformers", "rq", "redis")},
    )
