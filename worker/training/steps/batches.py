"""What goes into the model: rows of a step as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker.training.dataset.data import Int64, Rows
from worker.training.steps.limits import Limit, Shape, cut, widths

IGNORED = -100
"""Label of a padding position; cross entropy passes over it."""


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

    @property
    def shape(self) -> Shape:
        """Rows and padded widths."""
        return Shape(len(self.rows), self.input_ids.shape[1], self.labels.shape[1])


def micro_batches(rows: Rows, groups: Sequence[Int64], limit: Limit, pad_id: int) -> list[Batch]:
    """The rows of the groups in micro-batches."""
    return [_batch(rows, piece, pad_id) for piece in cut(rows, groups, limit)]


def _batch(rows: Rows, chosen: Int64, pad_id: int) -> Batch:
    input_lengths = rows.input_lengths[chosen]
    width, target_width = widths(rows, chosen)
    mask = np.arange(width) < input_lengths[:, None]
    return Batch(
        input_ids=torch.from_numpy(rows.gather("input", chosen, width, pad_id)),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        labels=torch.from_numpy(rows.gather("target", chosen, target_width, IGNORED)),
        target_tokens=int(rows.target_lengths[chosen].sum()),
        rows=chosen,
        input_padded=bool(input_lengths.min() < width),
    )
