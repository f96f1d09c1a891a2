"""Memory in use by this process: resident on the CPU (anonymous and mapped pages), the allocator's on CUDA."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.training.machine.usage import process_bytes


def read_all(model: torch.nn.Module) -> None:
    """Read every number of every parameter."""
    for parameter in model.parameters():
        for piece in parameter.detach().view(torch.int16).view(-1).split(1 << 20):
            piece.max()


def in_use(device: torch.device) -> int:
    """Bytes."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_bytes("VmRSS")


def begin_use(device: torch.device) -> int:
    """Bytes in use; the peak is counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return in_use(device)


def peak_use(device: torch.device) -> int:
    """Bytes, since `begin_use` (or since `load`, which starts over)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_bytes("VmHWM")


def mapped_bytes(folder: Path) -> int:
    """Resident pages of the weight files."""
    total, counts = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                counts = str(folder) in line
            elif counts and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total
