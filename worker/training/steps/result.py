"""What an optimizer step did, as the loop reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from worker.training.steps.shape import MicroBatchShape, SafeSize


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
