"""Memory of the training process: what is in use, what an out-of-memory error looks like, clearing the cache."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass

import torch

# Not only torch.OutOfMemoryError: drivers, libraries and the CPU allocator have their own words.
MESSAGES = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "could not create a primitive",
    "bad_alloc",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and "NCCL" in text and "memory" in text:
        return True
    return isinstance(error, RuntimeError) and any(message in text for message in MESSAGES)


class Cache:
    """The allocator's cache: clears it, and counts how often and for how long (both go into the metrics)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clears = 0
        self.seconds = 0.0

    def clear(self) -> None:
        """Give unused memory back to the card (CUDA) or to the system (CPU)."""
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            gc.collect()
            _malloc_trim()
        self.clears += 1
        self.seconds += time.perf_counter() - start


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


def describe(device: torch.device) -> str:
    """The state of memory in one line, for error messages."""
    if device.type != "cuda":
        return f"resident {_gib(process_bytes('VmRSS'))}, at peak {_gib(process_bytes('VmHWM'))}"
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"allocated {_gib(torch.cuda.memory_allocated(device))}, reserved {_gib(torch.cuda.memory_reserved(device))}, "
        f"free {_gib(free)} of {_gib(total)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _malloc_trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
