"""SwiGLU's gate: silu(gate) · up in one, which keeps its two inputs alone.

Plain torch keeps silu(gate), too, in every layer: one activation in four of the feed-forward's width. Here it is
computed again to go back. The numbers are those of torch's two operations, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Of equal shapes: silu(gate) * up."""
    if torch.compiler.is_compiling():  # the compiler itself computes it again
        return F.silu(gate) * up
    gated: torch.Tensor = _GatedSiLU.apply(gate, up)  # type: ignore[no-untyped-call]  # untyped
    return gated


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_up = F.silu(gate).mul_(gradient)
        return torch.ops.aten.silu_backward(gradient * up, gate), of_up
