"""How many rows of seq2seq go through the model at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.training.dataset.data import Int64, Rows
from worker.training.tasks.limits import MicroBatchLimit

if TYPE_CHECKING:
    from worker.training.tasks.seq2seq.batches import PairBatch


@dataclass(frozen=True)
class PairLimit(MicroBatchLimit["PairBatch"]):
    """Inputs and targets are padded apart."""

    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> PairBatch:
        """These rows, padded to these widths."""
        from worker.training.tasks.seq2seq.batches import pair_batch  # torch, which who plans limits does not need

        return pair_batch(rows, chosen, pad_id, input_width, target_width)
