"""Expandable segments of torch's allocator, left off where they cannot work.

Before the first one torch asks NVML whether the GPU is on a fabric. Without NVML that ends with SIGSEGV, and where the
query fails, as on WSL2, with RuntimeError. So the same is asked here first (source: torch 2.13, PeerToPeerAccess.cpp).
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
ON = "expandable_segments:True"

log = logging.getLogger("longhaul.trainer")


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def leave_off_where_broken(device: torch.device) -> None:
    """Switch expandable segments off, with a warning, where they would end the process. Before anything is loaded."""
    if device.type != "cuda" or ON not in (settings := torch._C._accelerator_getAllocatorSettings()):
        return
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack its PCI address
    bus = f"{gpu.pci_domain_id:08X}:{gpu.pci_bus_id:02X}:{gpu.pci_device_id:02X}.0"
    if (failure := _failure(bus)) is not None:
        log.warning("expandable segments are off, so free GPU memory may fragment: %s", failure)
        torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")


def _failure(bus: str) -> str | None:
    """Why torch's query would fail for the GPU with this PCI address; None: it would not."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return str(error)
    handle, info = ctypes.c_void_p(), _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
    calls = (
        ("nvmlInit_v2", ()),
        ("nvmlDeviceGetHandleByPciBusId_v2", (bus.encode(), ctypes.byref(handle))),
        ("nvmlDeviceGetGpuFabricInfoV", (handle, ctypes.byref(info))),
    )
    for name, arguments in calls:
        if not hasattr(nvml, name):  # an older driver, which torch does not ask then
            return None
        if (code := getattr(nvml, name)(*arguments)) != 0:
            return f"NVML's {name} fails with code {code}"
    return None
