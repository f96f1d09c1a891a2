"""Room for what comes beside training: a copy of what checkpoints hold, in the host's memory, and they themselves, on
the disk; texts that an evaluation writes, where activations and gradients are during a step."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs.errors import DiskFull
from jobs.gpus import HOST_ROOM
from jobs.memory_plan import DiskPlan, HostPlan, MemoryPlan
from jobs.spec import JobSpec
from jobs.text.units import GIB, bytes_alike
from worker.training.machine.host import host_memory
from worker.training.tasks.task import Config, Task
from worker.training.tasks.widths import EVALUATED_TOGETHER

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


def texts_together(memory: MemoryPlan | None, task: Task, config: Config, tokens: int, micro_batch: int) -> int:
    """Texts of so many tokens that an evaluation writes at once: a power of two, 32 at most.

    Gradients and activations of a step are gone by then, and what they leave of its planned peak is taken, so that the
    peak stays one; on a CPU without a budget, all that is free. `micro_batch`: rows for which memory has been enough;
    fewer than planned show that there is less room than planned. Texts are never fewer than these.
    """
    if memory is None:
        return EVALUATED_TOGETHER
    stays = sum(memory.parts.get(part, 0) for part in ("weights", "optimizer", "context"))
    top = memory.limit_bytes if memory.budget_source == "host" else memory.peak_bytes
    room = (top - stays) * min(1.0, micro_batch / memory.micro_batch)
    fitting = max(1, int(room / task.layout(config).text_bytes(memory.input_tokens, tokens)))
    return min(EVALUATED_TOGETHER, max(micro_batch, 1 << (fitting.bit_length() - 1)))
