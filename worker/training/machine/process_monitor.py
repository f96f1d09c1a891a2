"""Which other processes hold memory of the GPU. On a CPU nothing is monitored: the host's free memory is enough."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.text.units import bytes_alike, format_bytes, format_duration
from jobs.trainer_facts import DeviceWaiting, GpuProcess
from worker.training.journal import Journal, StopSignal
from worker.training.machine.device import gpu_id
from worker.training.machine.nvml import NvmlGpu, open_gpu

WAIT_S = 60.0
POLL_S = 0.2
NOISE_BYTES = 256 * 2**20
"""Memory that belongs to no visible process is ours up to this size: kernels that our libraries load on demand."""
INITIAL_NAMESPACE = "pid:[4026531836]"
"""The machine's own namespace of pids (source: Linux, proc_ns.h: PROC_PID_INIT_INO); a container has another."""

log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class OtherProcessesUse:
    """What others hold of the GPU."""

    bytes: int
    processes: tuple[GpuProcess, ...] = ()
    """Those that the driver shows here; in a container often none."""

    @property
    def text(self) -> str:
        """Such as `6.2 GiB by python3 (pid 4711)`."""
        return f"{format_bytes(self.bytes)} by {self._who()}"

    def _who(self) -> str:
        if not self.processes:
            return "processes the driver does not show here"
        if len(self.processes) == 1:
            [only] = self.processes
            return f"{only.name or 'a process'} (pid {only.pid})"
        return ", ".join(
            f"{each.name or 'a process'} (pid {each.pid}{_size(each.memory_bytes)})" for each in self.processes
        )


class ProcessMonitor:
    """The other processes on a GPU. Create it before anything is on the GPU: that is how it learns what we hold.

    A pid that NVML shows in a container may be the host's. So our own is the one that appears when our CUDA context is
    made, and its size is the drop in free memory.
    """

    def __init__(self, gpu: NvmlGpu | None, device: torch.device) -> None:
        self._gpu = gpu
        self._device = device
        self._own_pid: int | None = os.getpid()
        self._context_bytes = 0
        if gpu is not None:
            self._make_context(gpu)

    @classmethod
    def of(cls, device: torch.device) -> ProcessMonitor:
        """For this device; on a CPU there are none."""
        return cls(open_gpu(gpu_id(device)) if device.type == "cuda" else None, device)

    def use(self) -> OtherProcessesUse | None:
        """What others hold now; None if unknown."""
        memory = None if self._gpu is None else self._gpu.memory()
        if self._gpu is None or memory is None:
            return None
        shown = self._gpu.processes() or []
        own = reserved_bytes(self._device) + self._context_bytes
        own = max([own, *(each.memory_bytes or 0 for each in shown if each.pid == self._own_pid)])
        others = tuple(_named(each, shown) for each in shown if each.pid != self._own_pid)
        rest = max(0, memory.used - own)
        return OtherProcessesUse(0 if rest < NOISE_BYTES and not others else rest, others)

    def free(self) -> int | None:
        """Free bytes of the GPU; None on a CPU."""
        memory = None if self._gpu is None else self._gpu.memory()
        if memory is not None:
            return memory.free
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """What is taken of the GPU inside, besides by torch's allocator, is ours, and not of other processes."""
        before = self._beside_torch()
        yield
        after = self._beside_torch()
        if before is not None and after is not None:
            self._context_bytes += max(0, after - before)

    def _beside_torch(self) -> int | None:
        memory = None if self._gpu is None else self._gpu.memory()
        return None if memory is None else memory.used - reserved_bytes(self._device)

    def wait(self, needed: int, journal: Journal, stop: StopSignal) -> bool:
        """Whether `needed` bytes of the GPU are free, at once or within `WAIT_S`. True if unknown.

        Notes once which processes hold it. Raises StopAsked.
        """
        until = time.monotonic() + WAIT_S
        noted = False
        while (free := self.free()) is not None and free < needed:
            stop.raise_if_asked()
            if time.monotonic() > until:
                return False
            if not noted:
                who = self.use()
                wanted, there = bytes_alike(needed, free)
                journal.note(
                    DeviceWaiting(
                        message=f"{wanted} of the GPU are needed and {there} are free"
                        f"{'' if who is None else f'; others hold {who.text}'}; waiting up to {format_duration(WAIT_S)}"
                    )
                )
                noted = True
            time.sleep(POLL_S)
            journal.progress()
        return True

    def _make_context(self, gpu: NvmlGpu) -> None:
        before, was = gpu.memory(), {each.pid for each in gpu.processes() or []}
        make_context(self._device)
        after, now = gpu.memory(), {each.pid for each in gpu.processes() or []}
        if before is not None and after is not None:
            self._context_bytes = max(0, after.used - before.used - reserved_bytes(self._device))
        if os.getpid() not in now:
            # None when it is not shown, or another process came at the same moment.
            self._own_pid = next(iter(now - was)) if len(now - was) == 1 else None


def make_context(device: torch.device) -> None:
    """Make this process's CUDA context on the device, unless it is there."""
    if device.type == "cuda":
        torch.cuda.mem_get_info(device)


def reserved_bytes(device: torch.device) -> int:
    """What torch's allocator holds of the GPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _named(process: GpuProcess, shown: list[GpuProcess]) -> GpuProcess:
    """With the name that the kernel has for it, where its pid is one of ours; else the driver's."""
    ours = os.getpid() in {each.pid for each in shown} or _in_initial_namespace()
    try:
        name = Path(f"/proc/{process.pid}/comm").read_text().strip() if ours else ""
    except OSError:
        name = ""
    return process.model_copy(update={"name": name}) if name else process


def _in_initial_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == INITIAL_NAMESPACE
    except OSError:
        return False


def _size(size: int | None) -> str:
    return "" if size is None else f", {format_bytes(size)}"
