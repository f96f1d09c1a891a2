"""What one forward pass says of the rows of a micro-batch, of which metrics are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.training.dataset.data import Int64

Floats = npt.NDArray[np.float64]
Answers = npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""What a model says of rows: whole numbers, or scores."""


@dataclass(frozen=True)
class Evaluated:
    """On the model's device. A unit is a target token; of a classifier a row."""

    loss_sum: torch.Tensor
    """Negative log likelihood summed over units (0-dim, nats), of a regression squared errors, in fp32 or better."""
    losses: torch.Tensor
    """[N] that of each unit; 0 for padding."""
    answers: torch.Tensor
    """[N] whether the target token is the most probable one; of a classifier [B] the class that is most probable, of
    several labels a row [B, K] 1 for each that is more probable than not; of a regression [B] the score."""


def sums(units: torch.Tensor, lengths: Int64) -> Floats:
    """[N], [B] units of each row, which stand one after another -> [B] their sums, on the CPU: always the same."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(rows, units.cpu().double().numpy(), len(lengths)).astype(np.float64)
