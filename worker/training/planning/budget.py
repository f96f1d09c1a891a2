"""How much of the memory a job may use, and what host and disk have room for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import DiskFull, Rejected
from jobs.gpus import HOST_ROOM, MARGIN, REFERENCE, GpuFacts
from jobs.memory_plan import BudgetSource, Device, DiskPlan, HostPlan, MemoryPlan
from jobs.spec import JobSpec, MemorySpec, ResourcesSpec
from jobs.text.units import GIB, bytes_alike, format_bytes
from worker.training.machine.host import host_memory
from worker.training.tasks.task import Config, Task
from worker.training.tasks.widths import EVALUATED_TOGETHER


@dataclass(frozen=True)
class Budget:
    """Bytes that one attempt may use, CUDA context included."""

    bytes: int
    source: BudgetSource
    gpu: GpuFacts | None
    """None on a CPU."""
    margin: int
    """Bytes of the budget that stay free."""

    @property
    def limit(self) -> int:
        """Bytes that the peak may reach."""
        return self.bytes - self.margin

    @property
    def origin(self) -> str:
        """For people, such as `NVIDIA GeForce RTX 5090`."""
        named = {
            "job": "memory.budget",
            "gpu": f"{self.gpu_name}",
            "assumed": f"{self.gpu_name}, assumed",
            "host": "free here",
        }
        return named[self.source]

    @property
    def gpu_name(self) -> str | None:
        """As its driver names it; None on a CPU."""
        return None if self.gpu is None else self.gpu.name


def find_budget(
    memory: MemorySpec, device: Device, gpu: GpuFacts | None, resources: ResourcesSpec | None = None
) -> Budget:
    """`memory.budget`; otherwise the memory of the reported or assumed GPU, on a CPU that of the host.

    Raises Rejected (`budget_too_large`) if the job asks for more than the reported GPU has.
    """
    if device == "cpu":
        if memory.budget == "auto":
            processes = 1 if resources is None else resources.gpus
            return Budget(host_memory().available // processes, "host", None, margin=0)
        return Budget(int(memory.budget * GIB), "job", None, margin=0)
    facts = gpu or assumed_gpu(resources)
    usable = facts.usable_bytes
    if memory.budget == "auto":
        return on_gpu(usable, "assumed" if gpu is None else "gpu", facts)
    wanted = int(memory.budget * GIB)
    if gpu is not None and wanted > usable:
        most = int(usable / GIB * 10) / 10
        asked, has, whole = bytes_alike(wanted, usable, gpu.memory_bytes)
        raise Rejected(
            f"memory.budget is {asked}, but {gpu.name} has {has} for jobs ({whole} less what its driver keeps)",
            code="budget_too_large",
            param="memory.budget",
            hint=f"set memory.budget to at most {most:g}, or leave it at auto",
        )
    return on_gpu(wanted, "job", facts)


def assumed_gpu(resources: ResourcesSpec | None) -> GpuFacts:
    """The reference GPU, or one with the memory that the job asks for if that is more."""
    asked = None if resources is None else resources.gpu_memory_gib
    if asked is None or asked <= REFERENCE.whole_gib:
        return REFERENCE
    return GpuFacts(f"a GPU of {format_bytes(asked * GIB)}", int(asked * GIB))


def on_gpu(usable: int, source: BudgetSource, gpu: GpuFacts) -> Budget:
    """The budget of this many bytes of a GPU, with the margin taken from it."""
    return Budget(usable, source, gpu, margin=int(MARGIN * usable))


# -- room --------------------------------------------------------------------------------------------------------------
# Room for what comes beside training: a copy of what checkpoints hold, in the host's memory, and they themselves, on
# the disk; texts that an evaluation writes, where activations and gradients are during a step.

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
    fewer than planned show that there is less room than planned. Texts are no fewer than these, up to 32.
    """
    if memory is None:
        return EVALUATED_TOGETHER
    stays = sum(memory.parts.get(part, 0) for part in ("weights", "optimizer", "context"))
    top = memory.limit_bytes if memory.budget_source == "host" else memory.peak_bytes
    room = (top - stays) * min(1.0, micro_batch / memory.micro_batch)
    fitting = max(1, int(room / task.layout(config).text_bytes(memory.input_tokens, tokens)))
    return min(EVALUATED_TOGETHER, max(micro_batch, 1 << (fitting.bit_length() - 1)))
