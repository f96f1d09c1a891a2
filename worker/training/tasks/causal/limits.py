"""How many rows of a causal model go through it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.training.dataset.data import Int64, Rows
from worker.training.tasks.limits import MicroBatchLimit

if TYPE_CHECKING:
    from worker.training.tasks.causal.batches import CausalBatch


@dataclass(frozen=True)
class CausalLimit(MicroBatchLimit["CausalBatch"]):
    """`input` are the tokens of a row, padded; `target` those of them that are learned, which are not."""

    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> CausalBatch:
        """These rows, padded to this width."""
        from worker.training.tasks.causal.batches import causal_batch  # torch, which who plans limits does not need

        return causal_batch(rows, chosen, pad_id, input_width, target_width)
