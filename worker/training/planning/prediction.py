"""The types of a prediction: a micro-batch's shape and a setting give the peak memory of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from jobs.memory_plan import OptimizerName


@dataclass(frozen=True)
class Setting:
    """What can be chosen besides the micro-batch."""

    activation_checkpointing: int
    """Every n-th layer is recomputed in the backward pass; 0: none."""
    optimizer: OptimizerName


@dataclass(frozen=True)
class ModelSize:
    """Weights of a model; shared ones count once."""

    parameter_bytes: int
    trained: int
    """Numbers that are trained."""
    trained_bytes: int
    """Theirs; as many again for their gradients."""
    master_bytes: int
    """Of an fp32 copy of those that are trained and have fewer bits."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """`requires_grad` says what is trained."""
        every = list(model.parameters())
        trained = [each for each in every if each.requires_grad]
        return cls(
            parameter_bytes=sum(each.nbytes for each in every),
            trained=sum(each.numel() for each in trained),
            trained_bytes=sum(each.nbytes for each in trained),
            master_bytes=sum(4 * each.numel() for each in trained if each.dtype.itemsize < 4),
        )


@dataclass(frozen=True)
class Prediction:
    """Bytes on the device."""

    parts: dict[str, int]
    """At the peak: `weights`, `gradients`, `optimizer`, `activations` (batch included), `temporaries`."""
    peak: int
    """Highest in the whole step and in an evaluation: the sum of the parts."""
    pass_peak: int
    """Highest during forward and backward pass."""
    evaluation_peak: int
    """Highest while a micro-batch of the same shape is evaluated, between two steps."""
    update_peak: int
    """Highest during the optimizer's step."""
    activations_after_forward: int
    """What the forward pass leaves for the backward pass, batch included."""
