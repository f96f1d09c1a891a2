"""RMS norm. torch has one kernel for it on CUDA; on the CPU it makes a dozen passes over fp32 copies of everything.

Here the CPU takes it piece by piece, each small enough to stay in the processor's cache from the first operation to the
last: a third of the time, and what is kept for the backward pass is the input and one number a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# -- gated silu --------------------------------------------------------------------------------------------------------
# SwiGLU's gate: silu(gate) · up in one, which keeps its two inputs alone.
#
# Plain torch keeps silu(gate), too, in every layer: one activation in four of the feed-forward's width. Here it is
# computed again to go back. The numbers are those of torch's two operations, bit for bit.


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


# -- rms norm ----------------------------------------------------------------------------------------------------------

_PIECE = 2**17
"""Numbers in a piece: 512 KiB in fp32, of which the backward pass holds four."""


def rms_norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[..., D], [D] -> [..., D]: values / sqrt(mean square + epsilon) * weight, computed in fp32 or better."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(values, weight.shape, weight, epsilon)
    normed: torch.Tensor = _RMSNorm.apply(values, weight, epsilon)  # type: ignore[no-untyped-call]  # untyped
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        width, wide = weight.shape[0], torch.promote_types(values.dtype, torch.float32)
        rows, weights = values.reshape(-1, width), weight.to(wide)
        normed, scales = torch.empty_like(rows), torch.empty(len(rows), 1, dtype=wide)
        for piece, result, scale in _pieces(rows, normed, scales):
            exact = piece.to(wide)
            norm = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
            scale.copy_(norm.square_().div_(width).add_(epsilon).rsqrt_())
            result.copy_((exact * scale).mul_(weights))
        ctx.save_for_backward(values, weight, scales)
        return normed.view(values.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        values, weight, scales = ctx.saved_tensors
        width, wide = weight.shape[0], scales.dtype
        rows, weights = values.reshape(-1, width), weight.to(wide)
        inward, of_weight = torch.empty_like(rows), torch.zeros_like(weights)
        for piece, given, result, scale in _pieces(rows, gradient.reshape(-1, width), inward, scales):
            normed = piece.to(wide) * scale
            product = normed * given
            if ctx.needs_input_grad[1]:
                of_weight += product.sum(0)
            mean = (product @ weights).div_(-width)[:, None]
            result.copy_((given.to(wide) * weights).addcmul_(normed, mean).mul_(scale))
        return inward.view(values.shape), of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None


def _pieces(*matrices: torch.Tensor) -> Any:
    rows = max(1, _PIECE // matrices[0].shape[1])
    return zip(*(matrix.split(rows) for matrix in matrices), strict=True)
