"""Room beside the card: in the host's memory for a copy of what checkpoints hold, and on the disk for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs.errors import DiskFull
from jobs.memory_plan import GIB, DiskPlan, HostPlan, gibibytes
from jobs.spec import JobSpec
from worker.training.machine.host import host_memory

HOST_ROOM = 2 * GIB
"""Of the host's memory, left to everything else when a copy of the weights is made."""


def plan_host(copy_bytes: int) -> HostPlan:
    """Whether a copy of what checkpoints hold has room in the host's memory."""
    available = host_memory().available
    return HostPlan(copy_bytes=copy_bytes, available_bytes=available, fits=copy_bytes + HOST_ROOM < available)


def plan_disk(runs: Path, spec: JobSpec, checkpoint_bytes: int, model_bytes: int) -> DiskPlan:
    """What checkpoints and the final model take, and what is free. Raises DiskFull (`no_room`) if not even one fits."""
    disk = DiskPlan(
        checkpoint_bytes=checkpoint_bytes,
        checkpoints=spec.checkpoint.keep + 2,
        model_bytes=model_bytes,
        free_bytes=shutil.disk_usage(runs).free,
    )
    if disk.checkpoint_bytes + disk.model_bytes > disk.free_bytes:
        raise DiskFull(
            f"the runs directory has {gibibytes(disk.free_bytes)} free, and one checkpoint "
            f"({gibibytes(checkpoint_bytes)}) with the final model ({gibibytes(model_bytes)}) needs "
            f"{gibibytes(disk.checkpoint_bytes + disk.model_bytes)}",
            code="no_room",
            hint=f"make room and submit again; all {disk.checkpoints} checkpoints and the model take "
            f"{gibibytes(disk.needed_bytes)}, and a smaller checkpoint.keep less",
        )
    return disk
