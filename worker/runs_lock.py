"""Who tells the sinks of a runs directory, and reconciles it: one publish, which holds `.locks/publish.lock` in it.

`.locks/id` is a random name, which Redis has, too: so a worker of another box knows the directory when it sees it.

The lock is the kernel's (flock): it is free as soon as its holder has ended, in any way. The file says who holds
it. Another publish of the same control plane waits for it; one whose Redis does not hear of the holder is refused: of
two control planes each would declare the attempts of the other's workers lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ValidationError

from jobs.disk.files import write_atomically
from jobs.errors import LonghaulError, StoreUnavailable
from jobs.redis.store import Store

log = logging.getLogger("longhaul.worker")
RETRY_S = 1.0
UNKNOWN_S = 15.0
"""A holder of the same control plane is heard of in its Redis every 5 s."""


def id_file(runs: Path) -> Path:
    """What it is known by."""
    return runs / ".locks" / "id"


def identified(runs: Path) -> str:
    """Its id, which it is given here if it has none."""
    file = id_file(runs)
    file.parent.mkdir(exist_ok=True)
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex.encode())
    return file.read_text()


class Holder(BaseModel):
    """The holder of the lock, as in the file."""

    name: str
    """Under which it reports to its Redis."""
    host: str
    pid: int
    redis: str
    """Without its password."""
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (Redis {self.redis}) since {self.since}"


class RunsDirectoryInUse(LonghaulError):
    """The runs directory is held by a publish of another control plane, or by one that hangs."""


class RunsLock:
    """Use as a context manager: leaving it releases the lock."""

    def __init__(self, runs: Path, store: Store, *, name: str, redis: str) -> None:
        """`name` is that of this process' own heartbeats in `store`."""
        self._runs = runs
        self._store = store
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self._me = Holder(name=name, host=platform.node(), pid=os.getpid(), redis=redis, since=since)
        self._known: str | None = None

    def __enter__(self) -> Self:
        folder = self._runs / ".locks"
        folder.mkdir(exist_ok=True)
        self._file = open(folder / "publish.lock", "a+b", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def take(self) -> bool:
        """Whether it is this process's now."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            self._file.truncate(0)
            self._file.write(self._me.model_dump_json().encode() + b"\n")
        return True

    def holder(self) -> Holder | None:
        """Who holds it; None: it does not say, or has only just taken it."""
        try:
            self._file.seek(0)
            return Holder.model_validate_json(self._file.read())
        except ValidationError:
            return None

    def wait_or_join(self, stop: threading.Event) -> bool:
        """True: it is ours. False: its holder is of our control plane, and to be waited for; or we are stopped.

        Raises RunsDirectoryInUse: our Redis answers, and has heard nothing of the holder for longer than it is ever
        silent.
        """
        left = UNKNOWN_S
        while not stop.is_set():
            if self.take():
                return True
            holder = self.holder()
            if holder is not None and holder.name == self._known:
                return False
            try:
                if holder is not None and holder.name in {each.name for each in self._store.workers.all()}:
                    log.warning("%s tells the sinks of %s; this one waits until it has gone", holder, self._runs)
                    self._known = holder.name
                    return False
                if left <= 0:
                    raise RunsDirectoryInUse(
                        f"{self._runs} is held by {holder or 'an unknown process'}, of which the Redis of "
                        "this one has not heard for a minute: it belongs to another control plane, or hangs. End that "
                        "process, or give this one a runs directory of its own (LONGHAUL_RUNS)"
                    )
                left -= RETRY_S
            except StoreUnavailable as error:
                log.warning("the holder of %s is unknown: %s", self._runs, error)
            stop.wait(RETRY_S)
        return False
