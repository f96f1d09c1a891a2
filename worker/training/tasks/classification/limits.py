"""How many texts go through a classifier at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from worker.training.dataset.data import Int64, Rows
from worker.training.steps.order import rounded
from worker.training.tasks.classification.loss import ClassLoss
from worker.training.tasks.limits import MicroBatchLimit

if TYPE_CHECKING:
    from worker.training.tasks.classification.batches import ClassBatch


@dataclass(frozen=True)
class ClassLimit(MicroBatchLimit["ClassBatch"]):
    """Texts are padded; labels, however many, count as one token."""

    least_positions: ClassVar[int] = 4096
    """Encoders are small: what a micro-batch costs besides its positions, launches on a GPU and gradients that are
    cleared and added up on a CPU, is more of its time."""
    loss: ClassLoss = field(default_factory=lambda: ClassLoss(1))

    def with_loss(self, loss: ClassLoss) -> ClassLimit:
        """With which its micro-batches are learned."""
        return replace(self, loss=loss)

    @classmethod
    def longest_of(cls, rows: Rows) -> tuple[int, int]:
        """See `MicroBatchLimit`."""
        return int(rounded(rows.input_lengths).max()), 1

    def widths(self, rows: Rows, chosen: Int64) -> tuple[int, int]:
        """See `MicroBatchLimit`."""
        return int(rounded(rows.input_lengths[chosen]).max()), 1

    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> ClassBatch:
        """These rows, padded to this width."""
        from worker.training.tasks.classification.batches import class_batch  # torch, which who plans does not need

        return class_batch(rows, chosen, pad_id, input_width, self.loss)
