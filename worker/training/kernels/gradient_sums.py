"""Gradients as large as a vocabulary, added to `.grad` by the function that makes them.

autograd makes a gradient as a whole before it adds it to `.grad`, and holds that of a head that is also the embedding
until the embedding's is there: beside all gradients one or two more, of Qwen2.5-7B 1.04 GiB each. Here a product is
added as it is made, and what was made before at once, and nothing is left to return: `backward()` finds all in `.grad`,
`torch.autograd.grad` finds nothing.

A backward pass that fails may leave a part of a sum behind. Whoever does a step again drops all of its gradients first
(`memory/recovery.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

aten = torch.ops.aten
_ROWS_ON_CPU = 2048


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
    # On a CPU in pieces: one without bf16 instructions makes fp32 copies of them.
    rows = _ROWS_ON_CPU if parameter.device.type == "cpu" else len(left)
    for sums, some in zip(parameter.grad.split(rows), left.split(rows), strict=True):
        sums.addmm_(some, right)
    return None


class SummedEmbedding(nn.Embedding):
    """Looks up as its base class does. Going back, it makes the gradient of the tokens that occur, not of all V.

    Where it is set to do more (`max_norm`, `scale_grad_by_freq`, `sparse`), and in compiled code, it is its base class.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token numbers of any shape -> [..., D]."""
        more = self.max_norm is not None or self.scale_grad_by_freq or self.sparse or torch.compiler.is_compiling()
        if more or input.numel() >= self.num_embeddings or not _can_be_added(self.weight):
            return super().forward(input)
        found: torch.Tensor = _Lookup.apply(input, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
        return found


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding = weight, padding  # the parameter itself: what is saved may come back as another tensor
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        tokens, weight = ctx.saved_tensors[0].flatten(), ctx.weight
        # A place for each token, the first among the sorted ones for all of its kind: torch's own kernel sums them up
        # there, as it would for a whole vocabulary, and what all the other places add is 0, in whatever order.
        ordered = tokens.sort().values
        places = torch.searchsorted(ordered, tokens)
        sums = aten.embedding_dense_backward(gradient.flatten(0, -2), places, len(tokens), -1, False)
        if ctx.padding is not None:
            sums.masked_fill_((ordered == ctx.padding)[:, None], 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ordered, sums)
        return None, None, None


def _can_be_added(parameter: torch.Tensor) -> bool:
    """Whether it is trained, a parameter itself rather than made of one, and `.grad` has its precision."""
    return parameter.requires_grad and parameter.is_leaf and parameter.grad_dtype == parameter.dtype
