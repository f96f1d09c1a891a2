"""Which rows make up a step, and how a step is cut into micro-batches.

The order is a pure function of (seed, epoch), so a run that comes back needs only its step number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from worker.training.data import Int64, Rows

IGNORED = -100
"""Label of a padding position; cross entropy passes over it."""
_MULTIPLE = 8
"""Widths are rounded up to this: tensor cores want it, and there are fewer different shapes."""


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


class StepOrder:
    """The rows of every step of a run.

    Each epoch is a permutation of all rows. The stream of epochs is cut into steps of exactly `batch_size` rows: rows
    left at an epoch's end open the next epoch's first step, and only the last step of the run may be short.
    """

    def __init__(self, rows: int, batch_size: int, epochs: int, seed: int) -> None:
        assert min(rows, batch_size, epochs) > 0
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._total = rows * epochs
        self.steps = math.ceil(self._total / batch_size)
        self._epoch = -1
        self._permutation: Int64 = np.empty(0, np.int64)

    def rows_of(self, step: int) -> Int64:
        """[batch_size] row numbers of step `step`, counted from 0; fewer only in the last."""
        assert 0 <= step < self.steps
        position, end = step * self._batch_size, self._end(step)
        pieces = []
        while position < end:
            epoch, offset = divmod(position, self._rows)
            pieces.append(self._order(epoch)[offset : offset + end - position])
            position += len(pieces[-1])
        return np.concatenate(pieces)

    def epoch_of(self, step: int) -> float:
        """Epochs completed once step `step` is done."""
        return self._end(step) / self._rows

    def _end(self, step: int) -> int:
        return min((step + 1) * self._batch_size, self._total)

    def _order(self, epoch: int) -> Int64:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
            self._epoch = epoch
        return self._permutation


def micro_batches(rows: Rows, chosen: Int64, size: int, pad_id: int) -> list[Batch]:
    """The chosen rows, sorted by target and then input length, in batches of at most `size` rows of similar length."""
    by_length = np.lexsort((rows.input_lengths[chosen], rows.target_lengths[chosen]))
    ordered = np.asarray(chosen, np.int64)[by_length]
    return [_batch(rows, ordered[start : start + size], pad_id) for start in range(0, len(ordered), size)]


def _batch(rows: Rows, chosen: Int64, pad_id: int) -> Batch:
    input_lengths, target_lengths = rows.input_lengths[chosen], rows.target_lengths[chosen]
    width = _rounded(int(input_lengths.max()))
    mask = np.arange(width) < input_lengths[:, None]
    return Batch(
        input_ids=torch.from_numpy(rows.gather("input", chosen, width, pad_id)),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        labels=torch.from_numpy(rows.gather("target", chosen, _rounded(int(target_lengths.max())), IGNORED)),
        target_tokens=int(target_lengths.sum()),
        rows=chosen,
    )


def _rounded(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE
