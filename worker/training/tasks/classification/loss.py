"""The loss of a classifier: a row is its unit, whatever the number of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.labels import LabelPlan
from worker.training.dataset.data import Int64, Rows
from worker.training.tasks.classification.metrics import truth_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ClassLoss:
    """Cross entropy over the classes; where a row has several labels, binary, the mean over the classes."""

    classes: int
    several: bool = False
    weights: tuple[float, ...] | None = None
    """Of classes: what the loss of a row of that class, or of having that label, is multiplied by."""

    def labels(self, rows: Rows, chosen: Int64) -> torch.Tensor:
        """[B] the number of each row's label; of `several` [B, K], 1 where a row has a label, else 0. int64."""
        import torch

        return torch.from_numpy(truth_of(rows, chosen, self.classes, several=self.several))

    def empty_labels(self, rows: int, device: torch.device) -> torch.Tensor:
        """Without values."""
        import torch

        size = (rows, self.classes) if self.several else (rows,)
        return torch.empty(size, dtype=torch.int64, device=device)

    def sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, K] and labels on the same device -> the loss summed over rows (0-dim, nats), in fp32 or better."""
        return self._loss(logits, labels, "sum")

    def of_rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The same -> [B] that of each row."""
        losses = self._loss(logits, labels, "none")
        return losses.sum(1) if self.several else losses

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        wide = logits if logits.dtype == torch.float64 else logits.float()
        weights = None if self.weights is None else wide.new_tensor(self.weights)
        if not self.several:
            return F.cross_entropy(wide, labels, weight=weights, reduction=reduction)
        of_all = F.binary_cross_entropy_with_logits(
            wide, labels.to(wide.dtype), pos_weight=weights, reduction=reduction
        )
        return of_all / self.classes


def balanced(labels: Sequence[LabelPlan], rows: int, *, several: bool) -> tuple[float, ...]:
    """Weights with which every class counts the same, by how many of `rows` have it; their mean over rows is 1.

    Of several labels a row: having a label counts in all as much as not having it. A class of no row has weight 1.
    """
    present = sum(label.rows > 0 for label in labels)
    return tuple(
        1.0 if not label.rows else max(1, rows - label.rows) / label.rows if several else rows / (present * label.rows)
        for label in labels
    )
