"""The micro-batches of an epoch over given rows, as a configuration makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.gpu_ladder import LadderConfiguration
from worker.training.dataset.data import Int64, Rows
from worker.training.steps.order import StepOrder, rounded
from worker.training.tasks.limits import cut
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.flops import PairFlops
from worker.training.tasks.seq2seq.limits import PairLimit
from worker.training.tasks.widths import PairWidths


class Epoch:
    """Pieces are row numbers [B] that go through the model together."""

    def __init__(self, rows: Rows, flops: PairFlops) -> None:
        self.rows, self.flops = rows, flops
        self.mean_flops = flops.rows(rows.input_lengths, rows.target_lengths) / len(rows)
        self._pieces: dict[tuple[bool, int, int], list[Int64]] = {}

    def pieces(self, chosen: LadderConfiguration, micro_batch: int) -> list[Int64]:
        """Row numbers of every micro-batch of an epoch."""
        key = chosen.ordered, chosen.step_rows, micro_batch
        if key not in self._pieces:
            self._pieces[key] = self._ordered(chosen, micro_batch) if chosen.ordered else self._random(micro_batch)
        return self._pieces[key]

    def _random(self, micro_batch: int) -> list[Int64]:
        shuffled = np.random.default_rng(0).permutation(len(self.rows))
        return list(shuffled[: len(shuffled) // micro_batch * micro_batch].reshape(-1, micro_batch))

    def _ordered(self, chosen: LadderConfiguration, micro_batch: int) -> list[Int64]:
        order = StepOrder(PairWidths(self.rows), min(chosen.step_rows, len(self.rows)), 1, seed=0)
        limit = PairLimit.of(self.rows, micro_batch)
        steps = range(max(1, len(self.rows) // chosen.step_rows))  # the last may be short, and is left out
        return [piece for step in steps for piece in cut(self.rows, order.groups_of(step), limit)]

    def widths(self, chosen: LadderConfiguration, piece: Int64) -> tuple[int, int]:
        """To which inputs and targets are padded."""
        lengths = self.rows.input_lengths[piece], self.rows.target_lengths[piece]
        # The seed pads to the longest; the kernels of sdpa want multiples of 8, which its peers get like we do.
        inputs, targets = lengths if chosen.attention == "eager" else map(rounded, lengths)
        return int(inputs.max()), int(targets.max())

    def size(self, chosen: LadderConfiguration, piece: Int64) -> int:
        """Positions, padded."""
        return len(piece) * sum(self.widths(chosen, piece))

    def largest(self, chosen: LadderConfiguration, micro_batch: int) -> Int64:
        """The piece with the most positions."""
        return max(self.pieces(chosen, micro_batch), key=lambda piece: self.size(chosen, piece))

    def padded_flops(self, chosen: LadderConfiguration, piece: Int64) -> float:
        """Forward and backward, padding included."""
        inputs, targets = self.widths(chosen, piece)
        return self.flops.rows(np.full(len(piece), inputs), np.full(len(piece), targets))

    def batch(self, chosen: LadderConfiguration, piece: Int64) -> PairBatch:
        """What goes into the model, on the host."""
        everything = PairLimit(len(piece), 1 << 20, 1 << 20)
        (batch,) = everything.batches(self.rows, [piece], pad_id=0)
        inputs, targets = self.widths(chosen, piece)
        return replace(
            batch,
            input_ids=batch.input_ids[:, :inputs].contiguous(),
            attention_mask=batch.attention_mask[:, :inputs].contiguous(),
            labels=batch.labels[:, :targets].contiguous(),
        )


def evenly(pieces: Sequence[Int64], cost: Sequence[float], count: int) -> list[Int64]:
    """So many of the pieces, at even distances in the order of their cost, shuffled."""
    chosen = np.argsort(cost, kind="stable")[((np.arange(count) + 0.5) * len(pieces) / count).astype(int)]
    if count > 4:
        chosen = np.random.default_rng(0).permutation(chosen)
    return [pieces[number] for number in chosen]
