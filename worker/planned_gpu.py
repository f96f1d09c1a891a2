"""What check and prepare plan a job for, as train workers report it."""

from __future__ import annotations

import logging

from jobs.errors import StoreUnavailable
from jobs.frozen import Empty
from jobs.gpu_needs import GpuNeeds
from jobs.gpus import GpuFacts
from jobs.heartbeat import Worker
from jobs.redis.store import Store
from jobs.spec import JobSpec
from jobs.state import Stage

log = logging.getLogger("longhaul.supervise")


def trainers_for(store: Store, spec: JobSpec) -> list[Worker]:
    """The train workers of the job's engine, or of our own machines."""
    try:
        workers = store.workers.all()
    except StoreUnavailable as error:
        log.warning("time and memory are planned without knowing the GPUs: %s", error)
        return []
    return [each for each in workers if each.stage == Stage.TRAIN and each.engine == spec.resources.engine]


def planned_device(store: Store, spec: JobSpec) -> str | None:
    """`cpu` or `cuda`: what the nodes of the job's engine have. None: as this machine."""
    trainers = trainers_for(store, spec) if spec.resources.engine is not None else []
    return next((each.device for each in trainers), None)


def planned_gpu(store: Store, spec: JobSpec) -> GpuFacts | None:
    """The GPU that a job is planned for: of those that its train workers report and that meet `resources`, the largest,
    and of these one with native bf16, the fastest, and the one whose host has the most memory. None: there is none.

    A job that needs native bf16 gets one without only where there is no other: *check* then refuses it.
    """
    return max(_fitting(store, spec), key=_best, default=None)


def _fitting(store: Store, spec: JobSpec) -> list[GpuFacts]:
    trainers = trainers_for(store, spec)
    if any(each.device == "cuda" and each.gpu is None for each in trainers):
        return []
    needs = GpuNeeds.of(spec.resources, Empty())
    reported = [each.gpu.facts for each in trainers if each.gpu is not None]
    fitting = [gpu for gpu in reported if needs.unmet(gpu) is None]
    return [gpu for gpu in fitting if gpu.native_bf16] or fitting if spec.needs_native_bf16 else fitting


def _best(gpu: GpuFacts) -> tuple[int, bool, float, int, int]:
    return gpu.memory_bytes, gpu.native_bf16, gpu.peak_flops or 0.0, gpu.host_memory_bytes or 0, gpu.count
