"""What workers say of themselves, for tests of those who read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jobs.heartbeat import Gpu, WorkerHeartbeat
from jobs.redis.store import Store

H200 = Gpu(uuid="GPU-1", name="NVIDIA H200", memory_bytes=2**37, driver="580")


def heartbeat(name: str, why: str | None = None, **more: Any) -> WorkerHeartbeat:
    """Of a worker whose name begins with its stage, unless `more` says another."""
    facts: dict[str, Any] = {"name": name, "stage": name.partition("-")[0], "healthy": why is None, "why": why}
    return WorkerHeartbeat(**facts | more)


@contextlib.contextmanager
def beating(store: Store, *roles: str) -> Iterator[None]:
    """While a worker of each role reports itself every few seconds: a minute after the last time Redis forgets it."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(5.0):
            report()

    def report() -> None:
        for role in roles:
            store.workers.report(heartbeat(f"{role}-box", stage=role))

    report()
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
