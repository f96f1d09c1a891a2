"""FLOPs of training adapters beside a model that stays as it is.

Going back, no gradient of the model's own weights is computed: of the three products of a layer (forward, gradient of
its input, gradient of its weight) two are left. An adapter has all three. Its weights are taken to meet as many tokens
as the model's do on average. The second product in the backward pass of attention is not counted, a small part.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.training.steps.shape import Lengths
from worker.training.tasks.task import Flops


@dataclass(frozen=True)
class AdapterFlops:
    """`Flops` of a model with adapters that have `share` times as many weights as it."""

    model: Flops
    share: float

    def rows(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """Forward and backward."""
        return (2.0 + 3.0 * self.share) * self.model.forward(input_lengths, target_lengths)

    def forward(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """One forward pass."""
        return (1.0 + self.share) * self.model.forward(input_lengths, target_lengths)
