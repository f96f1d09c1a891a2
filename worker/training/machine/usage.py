"""Memory of the training process: what is in use, and clearing the cache."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass

import torch


class Cache:
    """The allocator's cache: clears it, and counts how often, for how long, and what came of it (for the metrics)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clears = 0
        self.seconds = 0.0
        self.freed = 0
        """Bytes: CUDA: reserved by torch before, less after; CPU: resident."""

    def clear(self) -> None:
        """Give unused memory back to the GPU (CUDA) or to the system (CPU)."""
        start, held = time.perf_counter(), self._held()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            gc.collect()
            _malloc_trim()
        self.clears += 1
        self.seconds += time.perf_counter() - start
        self.freed += max(0, held - self._held())

    def _held(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else process_bytes("VmRSS")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. CUDA: allocated and reserved at peak since the last look; CPU: resident now, and its peak so far."""

    allocated: int
    reserved: int


def memory_use(device: torch.device) -> MemoryUse:
    """What is in use; begins a new period of measurement on CUDA."""
    if device.type == "cuda":
        use = MemoryUse(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        return use
    return MemoryUse(process_bytes("VmRSS"), process_bytes("VmHWM"))


def process_bytes(field: str) -> int:
    """A size from /proc/self/status, such as VmRSS (resident now) or VmHWM (at peak)."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _malloc_trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
