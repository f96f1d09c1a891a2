"""What workers say of themselves, for tests of those who read it."""

from __future__ import annotations

from typing import Any

from jobs.heartbeat import Gpu, WorkerHeartbeat

H200 = Gpu(uuid="GPU-1", name="NVIDIA H200", memory_bytes=2**37, driver="580")


def heartbeat(name: str, why: str | None = None, **more: Any) -> WorkerHeartbeat:
    """Of a worker whose name begins with its stage, unless `more` says another."""
    facts: dict[str, Any] = {"name": name, "stage": name.partition("-")[0], "healthy": why is None, "why": why}
    return WorkerHeartbeat(**facts | more)
