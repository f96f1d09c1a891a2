"""The types of a prediction: a micro-batch's shape and a setting give the peak memory of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.memory_plan import OptimizerName


@dataclass(frozen=True)
class Setting:
    """What can be chosen besides the micro-batch."""

    activation_checkpointing: int
    """Every n-th layer is recomputed in the backward pass; 0: none."""
    optimizer: OptimizerName


@dataclass(frozen=True)
class Prediction:
    """Bytes on the device."""

    parts: dict[str, int]
    """At the peak: `weights`, `gradients`, `optimizer`, `activations` (batch included), `temporaries`."""
    peak: int
    """Highest in the whole step: the sum of the parts."""
    pass_peak: int
    """Highest during forward and backward pass."""
    update_peak: int
    """Highest during the optimizer's step."""
    activations_after_forward: int
    """What the forward pass leaves for the backward pass, batch included."""
