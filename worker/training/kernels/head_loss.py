"""Head and loss in one: logits are never held in fp32 as a whole, and for large vocabularies not at all.

Plain torch keeps logits [N, V] in bf16, again in fp32, their log-softmax and, going back, its gradient in fp32 and in
bf16: 14 bytes a logit. Here the gradient takes the place of the logits at once, in pieces: 2 bytes. Where even those
are many (152,000 tokens, 4,096 positions), or the head is not trained, each piece is multiplied out at once, and no
logit is kept. The numbers are those of `cross_entropy` on fp32 copies of the logits.

Why not torch's `linear_cross_entropy`: of bf16 its loss is bf16, too, 0.6 to 2.8 % off (here 0.00003), its gradient of
the head is two to four times less exact, and on a CPU it takes 3 to 15 times as long (docs/measurements.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from worker.training.kernels import gradient_sums

IGNORED = -100
"""Label of a padding position; cross entropy passes over it."""
_MOST_KEPT = 2**28
"""Logits: 512 MiB in bf16."""


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[N, D], [V, D], [N] -> negative log likelihood summed over labels other than -100 (0-dim, fp32 or better)."""
    if not torch.is_grad_enabled():
        return token_losses(hidden, weight, labels)[0]
    kept = weight.requires_grad and hidden.shape[0] * weight.shape[0] <= _MOST_KEPT
    function = _KeptLogits if kept or not hidden.requires_grad else _NoLogits
    loss: torch.Tensor = function.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]  # untyped
    return loss


def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """To evaluate, without gradients: `head_loss`; [N] that of each label; [N] whether it is the most probable one.

    Logits exist a piece at a time, so that it takes less memory than a step.
    """
    total = torch.zeros((), dtype=_wide(hidden.dtype), device=hidden.device)
    losses = torch.empty(len(labels), dtype=total.dtype, device=hidden.device)
    right = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
    rows = _rows(weight)
    inward = weight.T  # last and once: where weights are widened as they are used, each use makes a copy
    for piece, label, loss, told in zip(*(each.split(rows) for each in (hidden, labels, losses, right)), strict=True):
        likelihood = (piece @ inward).log_softmax(-1, dtype=total.dtype)
        loss.copy_(likelihood.gather(1, label.clamp(min=0)[:, None])[:, 0] * (label != IGNORED)).neg_()
        total += loss.sum()
        told.copy_(likelihood.argmax(-1) == label)
    return total, losses, right


class _KeptLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = hidden @ weight.T
        counts = labels != IGNORED
        total = torch.zeros((), dtype=_wide(hidden.dtype), device=hidden.device)
        for piece, label, count in zip(*(t.split(_rows(weight)) for t in (logits, labels, counts)), strict=True):
            index = label.clamp(min=0)[:, None]
            likelihood = piece.log_softmax(-1, dtype=total.dtype)
            total -= (likelihood.gather(1, index)[:, 0] * count).sum()
            if any(ctx.needs_input_grad):
                piece.copy_(likelihood.exp_().scatter_add_(1, index, likelihood.new_full(index.shape, -1.0)))
        ctx.save_for_backward(hidden, weight, logits, counts)
        ctx.parameter = weight  # what is saved may come back as another tensor
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden, weight, logits, counts = ctx.saved_tensors
        # Rows that do not count have a gradient in `logits`, too; multiplied by 0 it comes to nothing.
        scale = (counts * gradient).to(hidden.dtype)[:, None]
        of_weight = gradient_sums.add_product(ctx.parameter, logits.T, hidden * scale)
        return (logits @ weight).mul_(scale), of_weight, None


class _NoLogits(torch.autograd.Function):
    # Both gradients are made in the forward pass, up to the factor that the backward pass brings.

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = _wide(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for piece, label, inward in zip(*(t.split(_rows(weight)) for t in (hidden, labels, of_hidden)), strict=True):
            counts, index = label != IGNORED, label.clamp(min=0)[:, None]
            likelihood = (piece @ weight.T).log_softmax(-1, dtype=wide)
            total -= (likelihood.gather(1, index)[:, 0] * counts).sum()
            likelihood.exp_().scatter_add_(1, index, likelihood.new_full(index.shape, -1.0)).mul_(counts[:, None])
            logits = likelihood.to(hidden.dtype)
            torch.mm(logits, weight, out=inward)
            if of_weight is not None:
                of_weight.addmm_(logits.T, piece)
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.parameter = weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        scale = gradient.to(of_hidden.dtype)
        if of_weight is not None:
            of_weight = gradient_sums.add(ctx.parameter, of_weight.mul_(scale))
        return of_hidden * scale, of_weight, None


_NUMBERS = (2**26, 2**21)
"""In a piece, whose copies are in fp32: on a GPU 256 MiB, for few kernels; on the CPU 8 MiB, which its caches hold."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _rows(weight: torch.Tensor) -> int:
    """Positions in a piece."""
    return max(1, _NUMBERS[weight.device.type == "cpu"] // weight.shape[0])
