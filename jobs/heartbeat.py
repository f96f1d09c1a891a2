"""What a worker reports every few seconds, and what else is known of it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from jobs.frozen import Frozen
from jobs.gpus import GpuFacts
from jobs.measured import MeasuredGpu

TOGETHER = "+"
"""Between the UUIDs of GPUs that train together."""


class TrainWorkerGpu(Frozen, strict=True, extra="allow"):
    """What decides which jobs a GPU can take."""

    uuid: str
    """As the driver names it for good; of GPUs that train together those of all, with `+` between."""
    name: str
    """Such as `NVIDIA GeForce RTX 5090`."""
    memory_bytes: Annotated[int, Field(gt=0, lt=2**50)]
    """Of the whole GPU; of several, of each."""
    native_bf16: bool = True
    """Whether it multiplies bf16 itself; false: it trains adapters beside a model in fp16, and nothing else."""
    count: Annotated[int, Field(ge=1)] = 1
    """GPUs that train together."""
    host_memory_bytes: int | None = None
    """Memory that the worker's machine, or container, has in all; null: not known."""

    @property
    def facts(self) -> GpuFacts:
        """The same, as needs are compared with it."""
        return GpuFacts(
            self.name, self.memory_bytes, None, self.native_bf16, self.host_memory_bytes, self.count
        )  # fmt: skip

    def text(self, count: int | None = None) -> str:
        """So many of these GPUs (None: all of them), for people."""
        count = count or self.count
        return f"{count} × {self.name}" if count > 1 else self.name

    @property
    def visible(self) -> str:
        """For CUDA_VISIBLE_DEVICES."""
        return self.uuid.replace(TOGETHER, ",")


class TrainWorker(Frozen, strict=True):
    """What decides which jobs a train worker can take: the same from heartbeat to heartbeat."""

    device: str | None = None
    """As in `WorkerHeartbeat`, like the next field."""
    gpu: TrainWorkerGpu | None = None
    slot: int = 0
    """Which of the places on its device it is: 0 takes any job, the others trials of sweeps alone."""
    engine: str | None = None
    """Where its jobs train; null: on its own machine."""


class Gpu(TrainWorkerGpu):
    """A GPU, as its driver describes it."""

    driver: str
    """Version of the driver."""
    measured: MeasuredGpu | None = None
    """What `longhaul doctor` and jobs measured of it with this driver; null: nothing."""

    @property
    def facts(self) -> GpuFacts:
        """What decides which jobs it can take, and how they are planned."""
        return GpuFacts(
            self.name, self.memory_bytes, self.measured, self.native_bf16, self.host_memory_bytes, self.count
        )


class SinkLag(Frozen, strict=True, extra="ignore", json_schema_extra={"additionalProperties": False}):
    """What a sink has not taken yet."""

    jobs_behind: int
    """Jobs with events that it has not taken."""
    oldest_s: float
    """Seconds since the oldest of those; 0 when there is none."""


class WorkerHeartbeat(Frozen, strict=True, extra="allow"):
    """What a worker reports of itself; one of another version may say more, or less."""

    name: str
    """Stage, host, process and six random digits."""
    stage: str
    """`check`, `prepare`, `train`, `generate`, `push` or `publish`."""
    healthy: bool
    """Whether it can work."""
    why: str | None
    """Why it cannot; null where it can."""
    pid: int | None = None
    """Its process, on its machine."""
    parent_pid: int | None = None
    """The process that started it."""
    box: str | None = None
    """Name of its box: `LONGHAUL_BOX`, or the host name; null of an earlier version."""
    clock_ahead_s: float | None = None
    """Seconds by which its clock is ahead of that of Redis (below 0: behind); null where that is less than 5 s."""
    queue: str | None = None
    """The queue it serves; null for generate, push and publish."""
    busy: bool | None = None
    """Whether it is processing a ticket."""
    device: str | None = None
    """`cpu` or `cuda`."""
    gpu: Gpu | None = None
    """Its GPU; null on a CPU."""
    slot: int | None = None
    """Which of the places on its device this train worker is: 0 takes any job, the others trials of sweeps alone. Null
    for other workers, and for one of an earlier version, which takes any job."""
    engine: str | None = None
    """The engine on whose nodes this train worker has its jobs trained, which it hands over and follows. Null: they
    train on its own machine."""
    sinks: dict[str, SinkLag] | None = None
    """Of publish: how far each sink is behind."""
    versions: dict[str, object] | None = None
    """Of longhaul, torch, transformers, rq and redis."""

    def shares_host(self, other: WorkerHeartbeat) -> bool:
        """Whether both are in one container, or on one host without containers: their pids are of one kind then."""
        return (self.box, _node(self.name)) == (other.box, _node(other.name))

    def with_health(self, why: str | None) -> Self:
        """The same, of a worker that cannot work because of `why`; None: it can."""
        return self.model_copy(update={"healthy": why is None, "why": why})


class Worker(WorkerHeartbeat):
    """A heartbeat of the last minute. Workers of other versions may say more."""

    job: str | None
    """Id of the job that it works on."""
    job_since: int | None
    """When it took that, Unix seconds."""
    last_seen_at: float
    """When it was last heard of, Unix seconds."""
    heartbeat_age_s: float
    """Seconds since then, by the clock of Redis."""


def device_of(name: str, parent_pid: int | None, gpu: str | None, box: str | None, engine: str | None = None) -> str:
    """What train workers have in common that are slots of one GPU (its UUID), or of one CPU; of an engine's places each
    is alone.
    """
    return gpu or (f"{engine} {name}" if engine else f"{box} {_node(name)} {parent_pid}")


def _node(name: str) -> str:
    """The host, or container, in the name of a worker."""
    return name.rsplit("-", 2)[0].partition("-")[2]
