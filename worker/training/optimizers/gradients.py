"""What every optimizer does with gradients before it uses them: their norm, its limit, and NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from jobs.errors import NonFinite

PIECE = 2**18
"""Numbers that a CPU holds in its cache while it updates them: 1 MiB in fp32, of each of four kinds."""


def update_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which weights of `dtype` are updated: fp32, or float64 where they are that."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to layer norms and biases."""
    return parameter.ndim >= 2 and "bias" not in name


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Global norm (0-dim, on the device), in the precision of the update without a copy of a gradient in it.

    A CPU does make that copy, of a piece at a time.
    """
    norms: list[torch.Tensor] = [
        torch.linalg.vector_norm(piece, dtype=update_dtype(parameter.dtype))
        for parameter in parameters
        if parameter.grad is not None
        for piece in (parameter.grad.flatten().split(PIECE) if parameter.device.type == "cpu" else [parameter.grad])
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clipping(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor for the gradients (0-dim, on the device): 1, or less where `norm` is above its limit."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def finite_clipping(step: int, norm: torch.Tensor, loss: torch.Tensor, max_norm: float | None) -> float:
    """The same as a number on the host. Waits for the device. Raises NonFinite if loss or norm of `step` is not."""
    factor = torch.ones_like(norm) if max_norm is None else clipping(norm, max_norm)
    finite, number = torch.stack([torch.isfinite(norm + loss.to(norm.dtype)).to(norm.dtype), factor]).tolist()
    if not finite:
        raise nonfinite(step)
    return float(number)


def nonfinite(step: int) -> NonFinite:
    """Error of the first step that was not finite."""
    return NonFinite(
        f"loss or gradient norm of step {step} is NaN or infinite; the weights are those of step {step - 1}",
        hint="lower training.learning_rate, or look at the rows of that step; the checkpoints are intact",
    )
