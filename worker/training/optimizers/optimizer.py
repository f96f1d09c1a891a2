"""What the trainer asks of an optimizer, and the four there are (docs/bf16.md says why these).

    name           bytes a weight (bf16 weight and gradient 4 besides)         waits for the GPU
    adamw          12: fp32 master copy, two fp32 states                       no
    adamw_offload  0 on the GPU: the same 12 are in the host's memory          for the whole update
    adamw_8bit     2: two states of one byte; weights rounded stochastically   once a step
    adafactor      0: a row and a column of each matrix; rounded likewise      once a step

None of them rounds bf16 weights to the nearest: that loses 94 % of Adam's updates at a learning rate of 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from jobs.memory_plan import OptimizerName
from jobs.spec import TrainingSpec
from worker.training.journal import Journal


class Optimizer(Protocol):
    """Decoupled weight decay in fp32 (not on biases and norms), clipping by global norm, states allocated at once."""

    def compile(self, journal: Journal) -> None:
        """Compile what has to be compiled, announced as the phase `compile`; weights and states stay as they are."""

    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """Clip the gradients and update the weights; returns the global norm before clipping (0-dim, on the device).

        Step `number` with a `loss` (0-dim) or norm that is not finite changes neither weights nor states; raises
        NonFinite at once, or at the next `raise_if_nonfinite` where the host does not wait for the device.
        What is random follows from the seed of the job and `number` alone.
        """

    def raise_if_nonfinite(self) -> None:
        """Raise NonFinite if a step so far was not finite. May wait for the device."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat, `kind.parameter name` → plain tensor; the tensors themselves, not copies."""

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in. Refuses `optimizer_state` unless they are exactly those of `state_dict`."""


def make_optimizer(
    name: OptimizerName,
    parameters: Iterable[tuple[str, nn.Parameter]],
    training: TrainingSpec,
    *,
    fused: bool,
) -> Optimizer:
    """The optimizer of a job over the parameters that are to be trained. `fused` matters to the two `adamw` in fp32."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    decay, limit = training.weight_decay, training.max_grad_norm
    # Imported here: an attempt loads only what it uses, and torchao takes a second.
    match name:
        case "adamw":
            from worker.training.optimizers.adamw import AdamW

            return AdamW(trained, weight_decay=decay, max_grad_norm=limit, fused=fused)
        case "adamw_offload":
            from worker.training.optimizers.adamw_offload import AdamWOffload

            return AdamWOffload(trained, weight_decay=decay, max_grad_norm=limit, fused=fused)
        case "adamw_8bit":
            from worker.training.optimizers.adamw_8bit import AdamW8bit

            return AdamW8bit(trained, weight_decay=decay, max_grad_norm=limit, seed=training.seed)
        case "adafactor":
            from worker.training.optimizers.adafactor import Adafactor

            return Adafactor(trained, weight_decay=decay, max_grad_norm=limit, seed=training.seed)
