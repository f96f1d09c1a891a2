"""Memory that ran out: what such an error looks like, what it says, and why it came.

Not only torch.OutOfMemoryError: drivers, libraries, the CPU's allocators and the kernel have their own words.
"""

from __future__ import annotations

import errno
import logging
import re
import resource
import traceback
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from jobs.text.units import bytes_by_name
from jobs.trainer_facts import GpuProcess
from worker.training.journal import Journal, StopSignal
from worker.training.machine.host import host_memory
from worker.training.machine.usage import process_bytes

Cause = Literal["fragmentation", "other_processes", "exhausted"]

KINDS = (RuntimeError, MemoryError, OSError)
"""What to catch, and to raise again unless `is_out_of_memory`."""
LIBRARY_BYTES = 64 * 2**20
"""Assumed request if the error does not name one: cuBLAS wants 32 MiB for its workspace on recent GPUs."""
ABOUT = 0.9
"""Share of the missing memory that others must hold to be the cause. The two figures are read at different times."""
LONGEST_MESSAGE = 500

_FORMS = re.compile(
    r"CU(?:BLAS|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC\w*_FAILED|cudaErrorMemoryAllocation"
    # A handle that cannot be made: so these libraries say that there is no room for their context.
    r"|CU(?:BLAS|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED,? when calling `\w+Create\w*\("
    # Before it raises its own error torch asks NVML who is on the GPU; where that fails, this is all it says.
    r"|NVML_SUCCESS == .*CUDACachingAllocator\.cpp"
    r"|NCCL\b.*\bFailed to (?:CUDA )?(?:host )?[cm]?alloc"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|std::bad_alloc|Cannot allocate memory"
    # Of a primitive's *descriptor* it says so when an operation does not exist.
    r"|could not create a primitive(?! descriptor)",
    re.DOTALL,
)
_OF_HOST = re.compile(r"DefaultCPUAllocator|std::bad_alloc|Cannot allocate memory")
_SAID = re.compile(r"\bout of memory\b", re.IGNORECASE)
_WHOSE = re.compile(r"\b(?:cuda|cu|hip|nccl|triton|xpu|mps)(?:\b|_)|OutOfMemoryError", re.IGNORECASE)
_REQUESTED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


log = logging.getLogger("longhaul.trainer")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    found = _FORMS.search(text) or (_SAID.search(text) and _WHOSE.search(text))
    return isinstance(error, RuntimeError) and found is not None


def is_of_host(error: BaseException) -> bool:
    """Whether the memory that ran out (`is_out_of_memory`) is the host's."""
    return not isinstance(error, torch.OutOfMemoryError) and (
        isinstance(error, (MemoryError, OSError)) or _OF_HOST.search(str(error)) is not None
    )


class OtherProcesses(Protocol):
    """What others hold of the GPU."""

    @property
    def bytes(self) -> int:
        """All of them together."""

    @property
    def processes(self) -> tuple[GpuProcess, ...]:
        """Those that the driver shows."""

    @property
    def text(self) -> str:
        """How much and who, for people."""


class MemoryProbe(Protocol):
    """Who knows about the other processes on the GPU (`monitor.MemoryProbe`)."""

    def use(self) -> OtherProcesses | None:
        """What they hold now; None if unknown."""

    def wait(self, needed: int, journal: Journal, stop: StopSignal) -> bool:
        """Whether so many bytes of the GPU are free, at once or before long. Raises StopAsked."""


@dataclass(frozen=True)
class Figures:
    """Bytes, as the allocator sees them; None for what could not be read.

    CUDA: allocated and reserved by torch, free on the GPU. CPU: resident, data segment, free below its limit (or free
    on the host).
    """

    allocated: int | None = None
    reserved: int | None = None
    free: int | None = None
    room: int | None = None
    """CUDA: what the limit of this process leaves of it."""


def figures(device: torch.device) -> Figures:
    """The current figures. Never raises for lack of memory: it is called when memory has run out."""
    try:
        if device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            free, total = torch.cuda.mem_get_info(device)
            room = int(torch.cuda.get_per_process_memory_fraction() * total) - reserved
            return Figures(allocated, reserved, free, room)
        data = process_bytes("VmData")
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        free = host_memory().available if limit == resource.RLIM_INFINITY else max(0, limit - data)
        return Figures(process_bytes("VmRSS"), data, free)
    except KINDS as error:
        if not is_out_of_memory(error):
            raise
    return Figures()


@dataclass(frozen=True)
class MemoryShortage:
    """One error, described without the error itself: its traceback would keep the tensors of the failed pass alive."""

    message: str
    """The line of the error that says it."""
    requested: int | None
    """Bytes asked for; None where the error does not say."""
    figures: Figures
    """At the moment of the error."""
    device: str
    trace: tuple[str, ...] = ()
    """Lines of the traceback."""
    summary: str | None = field(default=None, repr=False)
    """CUDA: the allocator's own report at the moment of the error."""
    snapshot: Any = field(default=None, repr=False)
    """CUDA: every segment and block of the allocator at that moment, as pytorch.org/memory_viz reads it."""
    other_processes: OtherProcesses | None = None
    """What others held of the GPU; None if unknown."""
    cause: Cause = "exhausted"

    @classmethod
    def of(cls, error: BaseException, device: torch.device, *, details: bool = False) -> MemoryShortage | None:
        """Call it inside the `except`, while everything is still held. None: it is not a memory error."""
        if not is_out_of_memory(error):
            return None
        now = figures(device)
        try:
            found = cls(
                message=message_of(error),
                requested=requested_bytes(str(error)),
                figures=now,
                device=device.type,
                trace=tuple(traceback.format_exception(error)),
            )
        except MemoryError:  # not even for words
            return cls(message="memory ran out", requested=None, figures=now, device=device.type)
        return found._detailed(device) if details and device.type == "cuda" else found

    def _detailed(self, device: torch.device) -> MemoryShortage:
        try:
            return replace(self, summary=torch.cuda.memory_summary(device), snapshot=torch.cuda.memory._snapshot())
        except Exception as error:  # whatever it is: no reason to end a run that can continue
            log.warning("the state of the allocator cannot be read: %s", error)
        return self

    @property
    def asked(self) -> int:
        """Bytes asked for, as far as can be known."""
        return LIBRARY_BYTES if self.requested is None else self.requested

    @property
    def limited(self) -> bool:
        """Whether it is our own limit that is reached, whatever others hold."""
        return self.figures.room is not None and self.asked > self.figures.room

    @property
    def text(self) -> str:
        """The message and the figures in one line, for people."""
        known = {
            "allocated" if self.device == "cuda" else "resident": self.figures.allocated,
            "reserved" if self.device == "cuda" else "data": self.figures.reserved,
            "free": self.figures.free,
        }
        known_sizes = ", ".join(bytes_by_name(known))
        others = (
            f"; others hold {self.other_processes.text}"
            if self.other_processes is not None and self.other_processes.bytes
            else ""
        )
        return f"{self.message} ({known_sizes or 'figures unknown'}{others})"

    def beside(self, other_processes: OtherProcesses | None) -> MemoryShortage:
        """The same, classified, when others hold so much of the GPU.

        `other_processes`: they hold about what is missing, and the GPU itself is full and not our own limit.
        `fragmentation`: of what is reserved, enough was not in use, in pieces that were too small. On a CPU only
        `exhausted` is known.
        """
        cause: Cause = "exhausted"
        if self.device == "cuda":
            now = self.figures
            missing = self.asked - (now.free or 0)
            others = 0 if other_processes is None or self.limited else other_processes.bytes
            if missing > 0 and others >= ABOUT * missing:
                cause = "other_processes"
            elif now.reserved is not None and now.allocated is not None and now.reserved - now.allocated >= self.asked:
                cause = "fragmentation"
        return replace(self, other_processes=other_processes, cause=cause)


def requested_bytes(text: str) -> int | None:
    """How much was asked for, by the words of an error."""
    found = _REQUESTED.search(text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2].lower()])


def message_of(error: BaseException) -> str:
    """The line of such an error that says that memory ran out: compilers put lines of their own before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if _FORMS.search(line) or _SAID.search(line)), lines[0])[:LONGEST_MESSAGE]
