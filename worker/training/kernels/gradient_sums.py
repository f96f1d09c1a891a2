"""Gradients as large as a vocabulary, added to `.grad` by the function that makes them.

autograd makes a gradient as a whole before it adds it to `.grad`, and holds that of a head that is also the embedding
until the embedding's is there: beside all gradients one or two more, of Qwen2.5-7B 1.04 GiB each. Here they are added
at once, and nothing is left to return: `backward()` finds all in `.grad`, `torch.autograd.grad` finds nothing.

A backward pass that fails may leave a part of a sum behind. Whoever does a step again drops all of its gradients first
(`memory/recovery.py`).
"""

from __future__ import annotations

import torch


def add(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """What a backward pass returns for `parameter`: None, as it is added; where it cannot be, the gradient itself."""
    if not _can_be_added(parameter):
        return gradient
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return None


def add_product(parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The same of the gradient [V, D] that is the product of [V, N] and [N, D]; the sum is rounded once."""
    if not _can_be_added(parameter) or parameter.grad is None:
        return add(parameter, left @ right)
    parameter.grad.addmm_(left, right)
    return None


def _can_be_added(parameter: torch.Tensor) -> bool:
    """Whether it is trained, a parameter itself rather than made of one, and `.grad` has its precision."""
    return parameter.requires_grad and parameter.is_leaf and parameter.grad_dtype == parameter.dtype
