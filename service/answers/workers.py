"""Who works here, by what each reported of itself."""

from __future__ import annotations

from typing import Any

from service.answers.parts import Answer, Page


class Gpu(Answer, extra="allow"):
    """A GPU, as its driver describes it."""

    uuid: str
    """As the driver names it for good."""
    name: str
    """Such as `NVIDIA GeForce RTX 5090`."""
    memory_bytes: int
    """Of the whole GPU."""
    driver: str
    """Version of the driver."""


class SinkLag(Answer):
    """What a sink has not taken yet."""

    jobs_behind: int
    """Jobs with events that it has not taken."""
    oldest_s: float
    """Seconds since the oldest of those; 0 when there is none."""


class Worker(Answer, extra="allow"):
    """A heartbeat of the last minute. Workers of other versions may say more."""

    name: str
    """Stage, host, process and six random digits."""
    stage: str
    """`check`, `prepare`, `train` or `publish`."""
    healthy: bool
    """Whether it can work."""
    why: str | None
    """Why it cannot; null where it can."""
    pid: int | None = None
    """Its process, on its machine."""
    queue: str | None = None
    """The queue it serves; null for publish."""
    busy: bool | None = None
    """Whether it has a ticket in hand."""
    device: str | None = None
    """`cpu` or `cuda`."""
    gpu: Gpu | None = None
    """Its GPU; null on a CPU."""
    sinks: dict[str, SinkLag] | None = None
    """Of publish: how far each sink is behind."""
    versions: dict[str, Any] | None = None
    """Of torch, transformers, rq and redis."""
    job: str | None
    """Id of the job in its hands."""
    job_since: int | None
    """When it took that, Unix seconds."""
    last_seen_at: float
    """When it was last heard of, Unix seconds."""
    heartbeat_age_s: float
    """Seconds since then, by the clock of Redis."""


class WorkerList(Page):
    """Workers by name."""

    data: list[Worker]
    damaged: list[str]
    """Ids of jobs whose run directory cannot be read, oldest first: no worker takes them."""
