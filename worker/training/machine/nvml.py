"""The GPU as its driver sees it (NVML): how busy, how full, how warm, how hungry; and who else computes on it.

By ctypes on the driver's own `libnvidia-ml.so.1`, so there is nothing to install. The symbols are those that NVML has
kept binary compatible since driver 450 (source: NVIDIA, nvml.h). No CUDA call is made here.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from jobs.trainer_facts import GpuProcess

LIBRARY = "libnvidia-ml.so.1"
TEMPERATURE_OF_THE_GPU = 0
CLOCK_OF_THE_CORES = 1
SLOWED_BY = {
    0x08: "hardware slowdown", 0x20: "temperature (driver)", 0x40: "temperature (hardware)", 0x80: "power brake",
}  # fmt: skip
"""Reasons of lower clocks that mean trouble. Another, the power limit (0x04), is usual under full load."""
MOST_PROCESSES = 64
LONGEST_NAME = 256
UNKNOWN_BYTES = 2**64 - 1

log = logging.getLogger("longhaul.trainer")


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Memory2(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuUse:
    """What NVML reports now; None for what this GPU, or its current mode (MIG), does not report."""

    utilization: float | None = None
    """Share of the last sampling period (1/6 s to 1 s) in which a kernel ran, 0 to 1."""
    memory_used: int | None = None
    """Bytes in use by every process on the GPU, and by the driver."""
    temperature_c: int | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class GpuClock:
    """How fast the GPU runs now, and what holds it back; None for what is not reported."""

    mhz: int | None = None
    """Of its multiprocessors."""
    slowed_by: tuple[str, ...] = ()
    """Reasons that mean trouble."""


@dataclass(frozen=True)
class GpuPower:
    """Watts; None for what is not reported."""

    limit: float | None = None
    """In force."""
    default: float | None = None
    """As delivered."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of the whole GPU. `used` is what processes hold: what the driver keeps for itself is in neither figure."""

    total: int
    free: int
    used: int


class NvmlGpu:
    """One GPU. Every call asks the driver, which takes well under a millisecond per figure."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def use(self) -> GpuUse:
        """The four figures."""
        rates, memory, temperature, milliwatts = _Utilization(), _Memory(), ctypes.c_uint(), ctypes.c_uint()
        has_rates = self._ask("nvmlDeviceGetUtilizationRates", ctypes.byref(rates))
        has_memory = self._ask("nvmlDeviceGetMemoryInfo", ctypes.byref(memory))
        has_warmth = self._ask("nvmlDeviceGetTemperature", TEMPERATURE_OF_THE_GPU, ctypes.byref(temperature))
        has_power = self._ask("nvmlDeviceGetPowerUsage", ctypes.byref(milliwatts))
        return GpuUse(
            utilization=rates.gpu / 100 if has_rates else None,
            memory_used=memory.used if has_memory else None,
            temperature_c=temperature.value if has_warmth else None,
            power_w=milliwatts.value / 1000 if has_power else None,
        )

    def clock(self) -> GpuClock:
        """The clock, and why it is low."""
        mhz, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        has_clock = self._ask("nvmlDeviceGetClockInfo", CLOCK_OF_THE_CORES, ctypes.byref(mhz))
        self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(reasons))
        slowed_by = tuple(name for bit, name in SLOWED_BY.items() if reasons.value & bit)
        return GpuClock(mhz.value if has_clock else None, slowed_by)

    def power(self) -> GpuPower:
        """The limit of its power."""
        limit, default = ctypes.c_uint(), ctypes.c_uint()
        has_limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", ctypes.byref(limit))
        has_default = self._ask("nvmlDeviceGetPowerManagementDefaultLimit", ctypes.byref(default))
        return GpuPower(limit.value / 1000 if has_limit else None, default.value / 1000 if has_default else None)

    def driver(self) -> str | None:
        """Version of the driver, such as `580.95.05`."""
        text = ctypes.create_string_buffer(LONGEST_NAME)
        try:
            answer = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(LONGEST_NAME))
        except AttributeError:
            return None
        return text.value.decode(errors="replace") or None if answer == 0 else None

    def memory(self) -> GpuMemory | None:
        """How full the GPU is; None if the driver does not report it. One without the newer function counts its own."""
        newer = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
        if self._ask("nvmlDeviceGetMemoryInfo_v2", ctypes.byref(newer)):
            return GpuMemory(newer.total, newer.free, newer.used)
        older = _Memory()
        if self._ask("nvmlDeviceGetMemoryInfo", ctypes.byref(older)):
            return GpuMemory(older.total, older.free, older.used)
        return None

    def processes(self) -> list[GpuProcess] | None:
        """Who computes or draws on the GPU, as far as the driver shows it here; None if it does not.

        In a container the driver shows few, or none, and pids may be those of the host.
        """
        found: dict[int, GpuProcess] = {}
        answered = False
        for kind in ("Compute", "Graphics"):
            count = ctypes.c_uint(MOST_PROCESSES)
            entries = (_Process * MOST_PROCESSES)()
            if not self._ask(f"nvmlDeviceGet{kind}RunningProcesses_v3", ctypes.byref(count), entries):
                continue
            answered = True
            for entry in entries[: count.value]:
                size = None if entry.used == UNKNOWN_BYTES else entry.used
                found.setdefault(entry.pid, GpuProcess(pid=entry.pid, name=self._name(entry.pid), memory_bytes=size))
        return list(found.values()) if answered else None

    def _name(self, pid: int) -> str | None:
        text = ctypes.create_string_buffer(LONGEST_NAME)
        try:
            answer = self._library.nvmlSystemGetProcessName(ctypes.c_uint(pid), text, ctypes.c_uint(LONGEST_NAME))
        except AttributeError:
            return None
        return PurePath(text.value.decode(errors="replace")).name or None if answer == 0 else None

    def _ask(self, function: str, *arguments: Any) -> bool:
        try:
            return int(getattr(self._library, function)(self._handle, *arguments)) == 0
        except AttributeError:  # a driver that does not have this function
            return False


def open_gpu(uuid: str, library: str = LIBRARY) -> NvmlGpu | None:
    """The GPU with this UUID (`GPU-…`, `MIG-…`, or no prefix). None, and one warning, where there is no NVML."""
    if not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        log.warning("no utilization, temperature or power among the metrics: %s", error)
        return None
    handle = ctypes.c_void_p()
    answer = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    if answer != 0:
        log.warning(
            "no utilization, temperature or power among the metrics: NVML knows no GPU %s (error %d)", uuid, answer
        )
        return None
    return NvmlGpu(nvml, handle)
