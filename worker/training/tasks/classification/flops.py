"""FLOPs of a classifier for rows of given lengths: of its matrix products, a multiplication and an addition each one.

Backward is twice forward. Every token attends to all of its row, also in layers of ModernBERT that look at a window:
with a mask the kernel multiplies all. DeBERTa's scores by position come on top of those by content. Embedding, softmax,
norms, activations, optimizer and padding are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.training.steps.shape import Lengths
from worker.training.tasks.classification.layout import layers_of, layout_of
from worker.training.tasks.flops import TokenFlops, of_matrices, width_of
from worker.training.tasks.layout import within


@dataclass(frozen=True)
class ClassFlops(TokenFlops):
    """`input` are the tokens of a row; of its labels only that they are asked for, once a row."""

    per_row: float = 0.0

    def forward(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """One forward pass over these rows."""
        return super().forward(input_lengths, np.zeros_like(input_lengths)) + self.per_row * len(input_lengths)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ClassFlops:
        """Of a whole model. Raises Rejected (`bad_config`)."""
        layout = layout_of(config)
        of_head = (shape for name, shape in layout.shapes.items() if within(name, layout.head_modules))
        head = sum(2.0 * shape[0] * shape[1] for shape in of_head if len(shape) == 2)
        return cls._of_layers(config, 1, float(head))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> ClassFlops:
        """Of the layers whose activations are recomputed: every n-th; 0: none."""
        return cls._of_layers(config, every, 0.0) if every else cls(0.0, 0.0)

    @classmethod
    def _of_layers(cls, config: Mapping[str, Any], every: int, head: float) -> ClassFlops:
        """Of the matrices in every n-th layer."""
        width, layers = width_of(config), -(-layers_of(config) // every)
        per_input = of_matrices(layout_of(config).shapes, every) + layers * 2 * width * _positions(config)
        return cls(per_input, 0.0, input_pairs=4.0 * width * layers, per_row=head)


def _positions(config: Mapping[str, Any]) -> int:
    """Relative positions by which a token of DeBERTa is scored, in all of its ways."""
    ways = config.get("pos_att_type") if config.get("relative_attention") else None
    if not ways:
        return 0
    buckets = int(config.get("position_buckets") or 0)
    farthest = int(config.get("max_relative_positions") or 0)
    span = buckets if buckets > 0 else farthest if farthest > 0 else int(config.get("max_position_embeddings") or 0)
    named = ways.split("|") if isinstance(ways, str) else ways
    return 2 * span * len({"c2p", "p2c"} & set(named))
