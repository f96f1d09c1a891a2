"""How the groups of a step are cut into micro-batches, and what goes into the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from worker.training.data import Int64, Rows
from worker.training.order import rounded

IGNORED = -100
"""Label of a padding position; cross entropy passes over it."""
MIN_POSITIONS = 1024
"""A micro-batch of fewer takes in the next group, if that fits: on an RTX 5090 the kernel launches of FLAN-T5-XL (some
10,000) last as long as the arithmetic of about so many positions."""


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model at once, on the CPU."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    attention_mask: torch.Tensor
    """[B, S] int64, 1 where there is a token."""
    labels: torch.Tensor
    """[B, T] int64, -100 where there is none."""
    target_tokens: int
    """Labels that count."""
    rows: Int64
    """[B] their numbers in the dataset."""
    input_padded: bool
    """Whether any input is shorter than S: known here, so that nobody has to ask the device."""


@dataclass(frozen=True)
class Limit:
    """How much goes through the model at once: `micro_batch` rows of the longest shape that the data has.

    Shorter rows may be more, but never with more input positions nor more target positions in all than those; at 1 it
    is one row at a time, whatever its shape.
    """

    micro_batch: int
    input_width: int
    target_width: int

    @classmethod
    def of(cls, rows: Rows, micro_batch: int) -> Limit:
        """For the longest input and the longest target of these rows."""
        return cls(micro_batch, int(rounded(rows.input_lengths).max()), int(rounded(rows.target_lengths).max()))

    def rows(self, input_width: int, target_width: int) -> int:
        """Rows of this shape that may go together; at least one."""
        if self.micro_batch == 1:
            return 1
        fit = min(self.input_width / input_width, self.target_width / target_width)
        return max(1, int(self.micro_batch * fit))

    def smaller(self, rows: Rows, groups: Sequence[Int64]) -> Limit | None:
        """Half as much, or less: with it the largest micro-batch of these groups is really smaller. None at one row."""
        most = max(len(piece) for piece in cut(rows, groups, self))
        limit = self
        while limit.micro_batch > 1:
            limit = replace(limit, micro_batch=limit.micro_batch // 2)
            if max(len(piece) for piece in cut(rows, groups, limit)) < most:
                return limit
        return None


def cut(rows: Rows, groups: Sequence[Int64], limit: Limit) -> list[Int64]:
    """Row numbers of each micro-batch: small groups together, a large one in as few equal parts as the limit allows."""
    pieces: list[Int64] = []
    waiting: Int64 = np.empty(0, np.int64)
    for group in groups:
        both = np.concatenate([waiting, group])
        if not len(waiting) or len(both) <= limit.rows(*_widths(rows, both)):
            waiting = both
        else:
            pieces.append(waiting)
            waiting = group
        if (parts := -(-len(waiting) // limit.rows(*_widths(rows, waiting)))) > 1:
            *whole, waiting = np.array_split(waiting, parts)
            pieces += whole
        if len(waiting) * sum(_widths(rows, waiting)) >= MIN_POSITIONS:
            pieces.append(waiting)
            waiting = np.empty(0, np.int64)
    return [*pieces, waiting] if len(waiting) else pieces


def _widths(rows: Rows, chosen: Int64) -> tuple[int, int]:
    return int(rounded(rows.input_lengths[chosen].max())), int(rounded(rows.target_lengths[chosen].max()))


def micro_batches(rows: Rows, groups: Sequence[Int64], limit: Limit, pad_id: int) -> list[Batch]:
    """The rows of the groups in micro-batches."""
    return [_batch(rows, piece, pad_id) for piece in cut(rows, groups, limit)]


def _batch(rows: Rows, chosen: Int64, pad_id: int) -> Batch:
    input_lengths = rows.input_lengths[chosen]
    width, target_width = _widths(rows, chosen)
    mask = np.arange(width) < input_lengths[:, None]
    return Batch(
        input_ids=torch.from_numpy(rows.gather("input", chosen, width, pad_id)),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        labels=torch.from_numpy(rows.gather("target", chosen, target_width, IGNORED)),
        target_tokens=int(rows.target_lengths[chosen].sum()),
        rows=chosen,
        input_padded=bool(input_lengths.min() < width),
    )
