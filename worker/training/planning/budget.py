"""How much of the memory a job may use."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.errors import Rejected
from jobs.gpus import MARGIN, REFERENCE, GpuFacts
from jobs.memory_plan import BudgetSource, Device
from jobs.spec import MemorySpec, ResourcesSpec
from jobs.text.units import GIB, bytes_alike, format_bytes
from worker.training.machine.host import host_memory


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
