"""Attention within rows of different lengths that lie behind each other, on a CPU.

torch's kernel for padded rows compares every token with as many places as the longest row of the micro-batch has, and
with dropout passes over all of these six times. Here rows whose lengths are the same, rounded up to 8, go through plain
matrix products together. Scores are in fp32 or better: oneDNN compiles a product of bf16 for every new shape, which
takes longer than these small ones do, and they have many shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from worker.training.kernels.dropout import keep

_MULTIPLE = 8
_FILLED = 16
"""There are a multiple of this many tokens, for oneDNN compiles the products of a layer for every new number."""


@dataclass(frozen=True)
class Group:
    """Rows that are padded to the same width."""

    rows: slice
    """In the order of groups."""
    positions: slice
    """Among the positions of all groups, padding included."""
    width: int
    hidden: torch.Tensor | None
    """[rows, 1, 1, width] bool, true behind the end of a row; None: none is shorter."""


@dataclass(frozen=True)
class PackedRows:
    """Rows whose tokens lie behind each other, group after group. T: tokens, and behind them some of no row."""

    places: torch.Tensor
    """[T] of each token its position among rows padded to one width, flattened; those of no row repeat the first."""
    within: torch.Tensor
    """[T] of each its position in its row."""
    apart: torch.Tensor
    """[positions] of each the token that is there; of padding one of no row."""
    together: torch.Tensor
    """[T] of each token where it is among the positions; of no row: behind them all."""
    firsts: torch.Tensor
    """[B] the first token of each row, in the order of groups."""
    order: torch.Tensor
    """[B] of each row its number in that order."""
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], width: int) -> PackedRows:
        """Of rows of these lengths [B], padded at their ends to `width`."""
        widths = -(-lengths // _MULTIPLE) * _MULTIPLE
        by_width = np.argsort(widths, kind="stable")
        lengths, widths = lengths[by_width], widths[by_width]
        ends, padded_ends = np.cumsum(lengths), np.cumsum(widths)
        tokens, positions = int(ends[-1]), int(padded_ends[-1])
        unused = (0, _FILLED - tokens % _FILLED)  # one at least
        within = np.arange(tokens) - np.repeat(ends - lengths, lengths)
        together = np.repeat(padded_ends - widths, lengths) + within
        apart = np.full(positions, tokens)
        apart[together] = np.arange(tokens)
        groups = []
        for value in np.unique(widths).tolist():
            first, last = np.searchsorted(widths, [value, value + 1]).tolist()
            some = lengths[first:last]
            behind = torch.tensor(np.arange(value) >= some[:, None])[:, None, None] if some.min() < value else None
            begin = int(padded_ends[first]) - value
            groups.append(Group(slice(first, last), slice(begin, int(padded_ends[last - 1])), value, behind))
        return cls(
            places=torch.tensor(np.pad(np.repeat(by_width * width, lengths) + within, unused)),
            within=torch.tensor(np.pad(within, unused)),
            apart=torch.tensor(apart),
            together=torch.tensor(np.pad(together, unused, constant_values=positions)),
            firsts=torch.tensor(ends - lengths),
            order=torch.tensor(np.argsort(by_width)),
            groups=tuple(groups),
        )


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows, heads: int, scale: float, rate: float
) -> torch.Tensor:
    """[T, H·D] each -> [T, H·D]: every token sees all of its row. `rate`: of dropout, of the weights.

    A query [B, H·D] is that of one token a row, in the order of groups, and so is then what comes back. The gradient of
    tokens of no row must be zero, as it is where nothing is made of them.
    """
    attended: torch.Tensor = _PackedAttention.apply(query, key, value, rows, heads, scale, rate)  # type: ignore[no-untyped-call]  # untyped
    return attended


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PackedRows,
        heads: int,
        scale: float,
        rate: float,
    ) -> torch.Tensor:
        one = len(query) != len(key)
        queries = query if one else query.index_select(0, rows.apart)
        keys, values = key.index_select(0, rows.apart), value.index_select(0, rows.apart)
        result = _positions(query, rows, one=one)
        saved = []
        for group in rows.groups:
            seen = group.positions
            mine, width = (group.rows, 1) if one else (seen, group.width)
            asking = _heads(queries[mine], width, heads)
            asked, told = _heads(keys[seen], group.width, heads), _heads(values[seen], group.width, heads)
            scores = torch.bmm(asking, asked.mT).mul_(scale)
            if group.hidden is not None:
                scores.view(-1, heads, width, group.width).masked_fill_(group.hidden, float("-inf"))
            weight = scores.softmax(-1)
            kept = keep(weight, rate) if rate else None
            _put(torch.bmm(weight if kept is None else weight * kept, told), result[mine], heads)
            saved += [asking, asked, told, weight, kept]
        ctx.save_for_backward(*saved)
        ctx.rows, ctx.heads, ctx.scale, ctx.one = rows, heads, scale, one
        return result if one else result.index_select(0, rows.together)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, heads, one, saved = ctx.rows, ctx.heads, ctx.one, ctx.saved_tensors
        given = gradient if one else gradient.index_select(0, rows.apart)
        of_query, of_key, of_value = (_positions(gradient, rows, one=only) for only in (one, False, False))
        for number, group in enumerate(rows.groups):
            asking, asked, told, weight, kept = saved[5 * number : 5 * number + 5]
            seen = group.positions
            mine, width = (group.rows, 1) if one else (seen, group.width)
            arrived = _heads(given[mine], width, heads)
            of_weight = torch.bmm(arrived, told.mT)
            if kept is not None:
                of_weight.mul_(kept)
            _put(torch.bmm((weight if kept is None else weight * kept).mT, arrived), of_value[seen], heads)
            of_scores = torch._softmax_backward_data(of_weight, weight, -1, weight.dtype).mul_(ctx.scale)
            _put(torch.bmm(of_scores, asked), of_query[mine], heads)
            _put(torch.bmm(of_scores.mT, asking), of_key[seen], heads)
        return (
            of_query if one else of_query.index_select(0, rows.together),
            of_key.index_select(0, rows.together),
            of_value.index_select(0, rows.together),
            None, None, None, None,
        )  # fmt: skip


def _positions(like: torch.Tensor, rows: PackedRows, *, one: bool) -> torch.Tensor:
    """[positions + 1, H·D], the last zero, for tokens of no row; of one token a row [B, H·D]."""
    empty = like.new_empty(len(rows.firsts) if one else len(rows.apart) + 1, like.shape[1])
    if not one:
        empty[-1] = 0
    return empty


def _heads(values: torch.Tensor, width: int, heads: int) -> torch.Tensor:
    """[n·width, H·D] -> [n·H, width, D] in fp32 or better."""
    apart = values.view(-1, width, heads, values.shape[1] // heads).transpose(1, 2)
    wide = torch.promote_types(values.dtype, torch.float32)
    return apart.to(wide, memory_format=torch.contiguous_format).flatten(0, 1)


def _put(values: torch.Tensor, there: torch.Tensor, heads: int) -> None:
    """[n·H, width, D] into [n·width, H·D]."""
    apart = values.view(-1, heads, *values.shape[1:])
    there.view(len(apart), -1, heads, apart.shape[-1]).copy_(apart.transpose(1, 2))
