"""A lease on a job, renewed from a thread for as long as the block runs."""

from __future__ import annotations

import logging
import threading
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Self

from jobs.errors import StoreUnavailable
from jobs.redis.store import Store

log = logging.getLogger("longhaul.lease")
RENEW_S = 5.0


class Lease:
    """Holds the lease `token` on `job`. With Redis away it continues: then the trainer's lock decides."""

    def __init__(self, store: Store, job: str, token: str) -> None:
        self.job = job
        self.token = token
        self._store = store
        self._lost = threading.Event()
        self._done = threading.Event()
        renew = partial(copy_context().run, self._renew)  # what it logs is about the same job
        self._thread = threading.Thread(target=renew, name=f"lease-{job}", daemon=True)

    @property
    def lost(self) -> bool:
        """Another worker holds the job now."""
        return self._lost.is_set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_renewing()

    def stop_renewing(self) -> None:
        """Before the lease is released, so that a late renewal cannot take it again."""
        self._done.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._done.wait(RENEW_S):
            try:
                if not self._store.renew(self.job, self.token):
                    log.error("job %s: another worker holds its lease", self.job)
                    self._lost.set()
                    return
            except StoreUnavailable as error:
                log.warning("job %s: lease not renewed, continuing (%s)", self.job, error)
