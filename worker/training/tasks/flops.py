"""FLOPs by numbers of tokens: what rows of so many input and target tokens cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.training.steps.shape import Lengths

_LAYER = re.compile(r"\.(?:layers?|h|blocks)\.(\d+)\.")
CHUNK = 1 << 20
"""Rows counted at once: 6 million take 0.05 s and some MiB."""


def of_matrices(shapes: Mapping[str, tuple[int, ...]], every: int, experts: int = 0) -> float:
    """What a token costs in the matrices of every n-th layer of a stack. `experts`: how many of a layer's a token sees;
    each has a matrix of the tensors with three dimensions.
    """
    return sum(
        2.0 * shape[-2] * shape[-1] * (1 if len(shape) == 2 else experts)
        for name, shape in shapes.items()
        if (len(shape) == 2 or (len(shape) == 3 and ".experts." in name))
        and (found := _LAYER.search(name))
        and int(found[1]) % every == 0
    )


def width_of(config: Mapping[str, Any]) -> int:
    """Numbers of a position between layers, under the names that families give them."""
    return int(next(config[key] for key in ("hidden_size", "n_embd", "dim", "d_model") if key in config))


@dataclass(frozen=True)
class TokenFlops:
    """Of a forward pass of one row with S input and T target tokens: what to multiply S, T, S², S·T and T² by."""

    per_input: float
    per_target: float
    input_pairs: float = 0.0
    cross_pairs: float = 0.0
    target_pairs: float = 0.0

    def rows(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """Forward and backward over rows of so many tokens: [rows] each, end-of-sequence included."""
        return 3.0 * self.forward(input_lengths, target_lengths)

    def forward(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """One forward pass over these rows."""
        assert len(input_lengths) == len(target_lengths)
        total = 0.0
        for start in range(0, len(input_lengths), CHUNK):
            s = input_lengths[start : start + CHUNK].astype(np.float64)
            t = target_lengths[start : start + CHUNK].astype(np.float64)
            total += float(self.per_input * s.sum() + self.per_target * t.sum())
            total += float(self.input_pairs * (s @ s) + self.cross_pairs * (s @ t) + self.target_pairs * (t @ t))
        return total
