"""The shape of a micro-batch, and its length bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

LEAST_BUCKET = 64
"""Tokens: shorter ones have no bucket of their own."""
Lengths = npt.NDArray[np.integer[Any]]
"""[rows] tokens of each."""


@dataclass(frozen=True)
class MicroBatchShape:
    """Rows that go through the model at once, and the tokens of each, padding included."""

    rows: int
    input_width: int
    target_width: int

    @property
    def bucket(self) -> str:
        """Its length bucket."""
        return bucket_of(self.input_width, self.target_width)

    @property
    def inputs(self) -> int:
        """Input tokens of all rows, padding included."""
        return self.rows * self.input_width

    @property
    def tokens(self) -> int:
        """Of all rows, padding included."""
        return self.rows * (self.input_width + self.target_width)


def bucket_of(input_width: int, target_width: int) -> str:
    """Lengths up to the same powers of two, such as `input ≤ 256, target ≤ 512`."""
    return f"input ≤ {_power(input_width)}, target ≤ {_power(target_width)}"


def _power(width: int) -> int:
    return max(LEAST_BUCKET, 1 << (width - 1).bit_length())


# -- safe size ---------------------------------------------------------------------------------------------------------
# What memory has taught about micro-batches of one length bucket; kept in checkpoints.


@dataclass(frozen=True)
class SafeSize:
    """What one bucket may have, in rows of the longest shape."""

    size: int
    """Now."""
    former: int | None = None
    """What it goes back to with the next epoch, where the cause has passed by then."""
    fallback: int | None = None
    """What is known to do, where it has gone back: the next error leads there at once."""


# -- result ------------------------------------------------------------------------------------------------------------
# What an optimizer step did, as the loop reports it.


@dataclass(frozen=True)
class ScaledStep:
    """What became of a step whose loss was scaled."""

    loss_scale: float
    """The one that it was done with."""
    skipped: bool
    """Its gradients overflowed: weights and optimizer states are as before."""
    next_scale: float
    skipped_updates: int
    """In the run so far, this one included."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was. `step` counts from 1."""

    step: int
    epoch: float
    loss: torch.Tensor
    """0-dim, on the device: mean negative log likelihood of a target token before the update, nats."""
    grad_norm: torch.Tensor
    """0-dim, on the device: global norm before clipping."""
    learning_rate: float
    rows: int
    input_tokens: int
    """That went through the model beside the target tokens."""
    target_tokens: int
    padded_tokens: int
    """Positions that went through the model, padding included."""
    flops: float
    """Of the model, forward and backward, at the real lengths of the rows; 0 where they cannot be counted. Of several
    ranks the mean."""
    data_wait_s: float
    micro_batch: int
    """Rows of the longest shape in a micro-batch: the least of the step's length buckets."""
    largest: MicroBatchShape
    """Of the largest micro-batch."""
    safe: Mapping[str, SafeSize] = field(default_factory=dict)
    """What memory has taught so far, by length bucket: from where the next step continues."""
    scaled: ScaledStep | None = None
    """What became of the scaled loss; None: it is not scaled."""
