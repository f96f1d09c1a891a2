"""What a job needs of the GPU that trains it. `suits` in `jobs/redis/scripts.py` decides the same in Redis."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from jobs.frozen import Empty
from jobs.gpus import HOST_ROOM, GpuFacts
from jobs.heartbeat import TrainWorker, WorkerHeartbeat
from jobs.plan import CheckSummary
from jobs.spec import ResourcesSpec
from jobs.text.units import GIB, bytes_alike

NO_GPU = "no GPU here can take the job"


@dataclass(frozen=True)
class GpuNeeds:
    """None: whatever there is."""

    memory_gib: float | None = None
    """`resources.gpu_memory_gib`."""
    name: str | None = None
    """`resources.gpu_name`."""
    least_bytes: int | None = None
    """What a peak takes at the least, once it is planned."""
    native_bf16: bool = False
    """The job is planned in bfloat16."""
    gpus: int = 1
    """`resources.gpus`."""
    engine: str | None = None
    """`resources.engine`."""
    host_bytes: int | None = None
    """Of the host's memory, for the states of an optimizer that is planned to be there."""

    @classmethod
    def of(cls, resources: ResourcesSpec, plan: CheckSummary | Empty) -> GpuNeeds:
        """Those of a job. In plans of earlier versions the peak stands for the least: so much is known to do."""
        memory = plan.memory if isinstance(plan, CheckSummary) else None
        least, native, host = None, False, None
        if memory is not None and memory.device == "cuda":
            host = (memory.host and memory.host.optimizer_bytes) or None
            least = memory.peak_bytes if memory.least_bytes is None else memory.least_bytes
            native = memory.dtype == "bfloat16"
        return cls(resources.gpu_memory_gib, resources.gpu_name, least, native, resources.gpus, resources.engine, host)

    def unmet(self, gpu: GpuFacts | None) -> str | None:
        """Why this GPU (None: a CPU) cannot take the job, for people; None: it can."""
        if gpu is None:
            return (
                "the job asks for a GPU, and this worker trains on the CPU"
                if self.memory_gib is not None or self.name is not None
                else None
            )
        if gpu.count < self.gpus:
            has = "one GPU" if gpu.count == 1 else f"{gpu.count} GPUs"
            return f"a worker has {has} ({gpu.name}), and the job needs {self.gpus} (resources.gpus)"
        if self.name is not None and not self._is_named(gpu.name):
            return f"{gpu.name} is not {self.name!r}"
        if self.memory_gib is not None and gpu.whole_gib < self.memory_gib:
            has, asked = bytes_alike(gpu.whole_gib * GIB, self.memory_gib * GIB)
            return f"{gpu.name} has {has}, and resources.gpu_memory_gib asks for {asked}"
        if self.least_bytes is not None and gpu.limit_bytes < self.least_bytes:
            has, needed = bytes_alike(gpu.limit_bytes, self.least_bytes)
            return f"{gpu.name} has {has} for a job, and this one needs at least {needed}"
        if self.native_bf16 and not gpu.native_bf16:
            return f"{gpu.name} has no native bf16, and the job is planned in bfloat16"
        if self.host_bytes is not None and gpu.host_memory_bytes is not None:
            room = gpu.host_memory_bytes - HOST_ROOM
            if room < self.host_bytes:
                has, needed = bytes_alike(room, self.host_bytes)
                return f"the host of {gpu.name} has {has} for optimizer states, and this job keeps {needed} there"
        return None

    def _is_named(self, gpu: str) -> bool:
        """Whether the name stands in that of the GPU as whole words: an A100 is not an `A10`."""
        words = re.escape((self.name or "").lower())
        return re.search(f"(?<![a-z0-9]){words}(?![a-z0-9])", gpu.lower()) is not None

    def unmet_by(self, trainer: TrainWorker | WorkerHeartbeat) -> str | None:
        """`unmet` of the GPU of this train worker; it must be that of the job's engine. While it looks for one, that
        may be any.
        """
        if trainer.engine != self.engine:
            if self.engine is None:
                return f"the engine {trainer.engine} trains only jobs that name it (resources.engine)"
            where = f"trains on the engine {trainer.engine}" if trainer.engine else "trains on its own machine"
            return f"the job is for the engine {self.engine}, and a worker {where}"
        if trainer.gpu is None:
            return self.unmet(None) if trainer.device == "cpu" else None
        return self.unmet(trainer.gpu.facts)

    def unmet_by_all(self, trainers: Collection[TrainWorker] | Collection[WorkerHeartbeat]) -> str | None:
        """Why none of these train workers can take the job; None: one can, or there is none."""
        unmet = {self.unmet_by(each) for each in trainers}
        reasons = sorted(why for why in unmet if why is not None)
        return f"{NO_GPU}: {'; '.join(reasons)}" if reasons and None not in unmet else None
