"""Room beside the GPU: in the host's memory for a copy of what checkpoints hold, and on the disk for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs.errors import DiskFull
from jobs.gpus import HOST_ROOM
from jobs.memory_plan import DiskPlan, HostPlan
from jobs.spec import JobSpec
from jobs.text.units import GIB, bytes_alike
from worker.training.machine.host import host_memory

HOST_RESERVE = 8 * GIB
"""Bytes of a host's memory that are left to all else where optimizer states are planned to be there: the trainer and
CUDA's libraries take some, and so do other processes."""


def plan_host(copy_bytes: int, optimizer_bytes: int = 0, total: int | None = None) -> HostPlan:
    """Whether the host's memory has room for a copy of what a checkpoint holds, beside states of the optimizer.

    `total`: all that the host has that will train; None: what this one has free counts.
    """
    available, room = (host_memory().available, HOST_ROOM) if total is None else (total, HOST_RESERVE)
    return HostPlan(
        optimizer_bytes=optimizer_bytes,
        copy_bytes=copy_bytes,
        available_bytes=available,
        fits=optimizer_bytes + copy_bytes + room < available,
    )


def plan_disk(runs: Path, spec: JobSpec, checkpoint_bytes: int, model_bytes: int) -> DiskPlan:
    """What checkpoints and the final model take, and what is free. Raises DiskFull (`no_room`) if not one fits."""
    disk = DiskPlan(
        checkpoint_bytes=checkpoint_bytes,
        checkpoints=spec.checkpoint.keep + 2,
        model_bytes=model_bytes,
        free_bytes=shutil.disk_usage(runs).free,
    )
    if disk.checkpoint_bytes + disk.model_bytes > disk.free_bytes:
        free, one, model, least, most = bytes_alike(
            disk.free_bytes, checkpoint_bytes, model_bytes, checkpoint_bytes + model_bytes, disk.needed_bytes
        )
        raise DiskFull(
            f"the runs directory has {free} free, and one checkpoint ({one}) with the final model ({model}) "
            f"needs {least}",
            code="no_room",
            hint=f"make room; all {disk.checkpoints} checkpoints and the model take {most}, "
            "and a smaller checkpoint.keep less",
        )
    return disk
