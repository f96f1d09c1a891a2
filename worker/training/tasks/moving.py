"""From the host to the device."""

from __future__ import annotations

import torch


def onto(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device: pinned, so that the copy runs while the host continues."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
