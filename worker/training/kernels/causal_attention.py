"""Causal attention over short rows on a CPU, where torch's flash kernel takes most of its time to go back.

Of bf16 it needs 24 ms for 4 rows of 256 in 8 heads of 64, forward and backward, and 19 ms for 16 rows of 64; this needs
15 and 8. A few heads at a time go through plain matrix products, so that the weights of attention stay in the
processor's cache, and these are computed again to go back: what is kept is query, key and value, and not even the
result, which flash keeps. Scores of bf16 are rounded to bf16, as in transformers' eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

LONGEST = 512
"""Positions of a row at most: the half of all pairs that a causal model does not look at is computed, too."""
_PIECE = 2**19
"""Weights in a piece: 1 MiB in bf16, of which the backward pass holds three."""


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, H, S, D], [B, K, S, D], [B, K, S, E] -> [B, S, H, E]; heads of the query share those of key and value in
    groups of H / K."""
    attended: torch.Tensor = _Attention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]  # untyped
    return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        parts = [
            torch.bmm(_weights(queries, keys, scale), values)
            for queries, keys, values in _pieces(key, _grouped(query, key), _grouped(key, key), _grouped(value, key))
        ]
        rows, heads, width = query.shape[:3]
        return torch.cat(parts).view(rows, heads, width, -1).transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value = ctx.saved_tensors
        grouped = [_grouped(each, key) for each in (query, key, value, gradient.transpose(1, 2))]
        parts = []
        for queries, keys, values, given in _pieces(key, *grouped):
            weights = _weights(queries, keys, ctx.scale)
            of_values = torch.bmm(weights.mT, given)
            of_scores = torch._softmax_backward_data(torch.bmm(given, values.mT), weights, -1, weights.dtype)
            del weights
            parts.append((torch.bmm(of_scores, keys), torch.bmm(of_scores.mT, queries), of_values))
        of_query, of_key, of_value = (torch.cat(each) for each in zip(*parts, strict=True))
        return (
            of_query.mul_(ctx.scale).view(query.shape),
            of_key.mul_(ctx.scale).view(key.shape),
            of_value.view(value.shape),
            None,
        )


def _grouped(heads: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] -> [B·K, H / K·S, D]: heads that share a key are behind each other."""
    rows, shared, width = key.shape[:3]
    return heads.reshape(rows * shared, heads.shape[1] // shared * width, heads.shape[3])


def _weights(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """[N, G·S, D], [N, S, D] -> [N, G·S, S], which sum up to 1."""
    width = keys.shape[1]
    hidden = torch.full((width, width), float("-inf"), dtype=queries.dtype, device=queries.device).triu_(1)
    scores = torch.bmm(queries, keys.mT).mul_(scale)
    scores.view(-1, width, width).add_(hidden)
    return scores.softmax(-1)


def _pieces(key: torch.Tensor, *grouped: torch.Tensor) -> Any:
    size = max(1, _PIECE // (grouped[0].shape[1] * key.shape[2]))
    return zip(*(each.split(size) for each in grouped), strict=True)
