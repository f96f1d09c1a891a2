"""Adafactor: of the second moment only the means of each row and column, no first moment; stochastic rounding to bf16.

Shazeer and Stern, https://arxiv.org/abs/1804.04235, with the learning rate of the schedule as it is: neither scaled by
the size of the weights nor by the step, as is usual for fine-tuning T5. The update is computed in fp32, one parameter
at a time, so what it needs besides the states is one fp32 copy of the largest gradient.

The host waits for the device once a step, to see whether loss and norm are finite: a few milliseconds in a step of
seconds, and no update has to be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from worker.training.journal import Journal
from worker.training.optimizers.gradients import decays, finite_clipping, gradient_norm, update_dtype
from worker.training.optimizers.rounding import round_stochastically
from worker.training.optimizers.states import load_states
from worker.training.steps.randomness import update_seed

PIECE = 2**24  # weights rounded at once: 64 MiB for their fp32 copy, and as much for the random bits
DECAY_RATE = 0.8  # the second moment of step t is a mean over about t^0.8 steps
EPS = 1e-30  # added to squares of gradients
UPDATE_LIMIT = 1.0  # root mean square of an update, in learning rates


@dataclass(frozen=True)
class _FactoredState:
    """One parameter with its states: mean squares by `row` and `column` of a matrix, or every `square` of a vector."""

    name: str
    parameter: nn.Parameter
    decay: float
    moments: dict[str, torch.Tensor]


class Adafactor:
    """`Optimizer` with next to no state: (rows + columns) fp32 numbers a matrix."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float,
        max_grad_norm: float | None,
        seed: int,
    ) -> None:
        self._slots = [
            _FactoredState(name, parameter, weight_decay if decays(name, parameter) else 0.0, _moments(parameter))
            for name, parameter in parameters
        ]
        self._max_grad_norm = max_grad_norm
        self._seed = seed
        self._steps = torch.zeros((), dtype=torch.int64)  # on the host, where reading is free
        # An evaluation trains nothing.
        self._generator = torch.Generator(self._slots[0].parameter.device if self._slots else "cpu")

    def compile(self, journal: Journal) -> None:
        """Nothing: its operations are torch's own."""

    @torch.no_grad()
    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer.step`. NonFinite comes at once."""
        norm = gradient_norm(slot.parameter for slot in self._slots)
        scale = finite_clipping(number, norm, loss, self._max_grad_norm)
        self._generator.manual_seed(update_seed(self._seed, number))
        self._steps += 1
        new_share = int(self._steps) ** -DECAY_RATE
        for slot in self._slots:
            if slot.parameter.grad is not None:
                update = _update(slot, slot.parameter.grad, scale, new_share)
                self._apply(slot, update, learning_rate)
        return norm

    def raise_if_nonfinite(self) -> None:
        """Nothing: `step` has raised."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Flat: `row.NAME` and `column.NAME` of matrices, `square.NAME` of vectors, and `steps`."""
        moments = {f"{kind}.{slot.name}": moment for slot in self._slots for kind, moment in slot.moments.items()}
        return moments | {"steps": self._steps}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy saved states in, or refuse."""
        load_states(self.state_dict(), saved)

    def _apply(self, slot: _FactoredState, update: torch.Tensor, learning_rate: float) -> None:
        weights = slot.parameter.detach().view(-1)
        for old, change in zip(weights.split(PIECE), update.view(-1).split(PIECE), strict=True):
            new = old.to(change.dtype)  # the weights themselves where they are fp32 or float64
            new.mul_(1 - learning_rate * slot.decay).add_(change, alpha=-learning_rate)
            if old.dtype == torch.bfloat16:
                round_stochastically(new, self._generator)
            if old.dtype != new.dtype:
                old.copy_(new)


def _moments(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    dtype, device, shape = update_dtype(parameter.dtype), parameter.device, parameter.shape
    if parameter.ndim < 2:
        return {"square": torch.zeros(shape, dtype=dtype, device=device)}
    return {
        "row": torch.zeros(shape[:-1], dtype=dtype, device=device),
        "column": torch.zeros((*shape[:-2], shape[-1]), dtype=dtype, device=device),
    }


def _update(slot: _FactoredState, gradient: torch.Tensor, scale: float, new_share: float) -> torch.Tensor:
    """Gradient over the root of its second moment, of root mean square UPDATE_LIMIT at most. Moves the moments."""
    update = gradient.to(update_dtype(gradient.dtype), copy=True).mul_(scale)
    if "square" in slot.moments:
        square = slot.moments["square"].lerp_(update.square().add_(EPS), new_share)
        update.mul_(square.rsqrt())
    else:
        row = slot.moments["row"].lerp_(_mean_square(update, -1), new_share)
        column = slot.moments["column"].lerp_(_mean_square(update, -2), new_share)
        update.mul_((row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)).mul_(column.rsqrt().unsqueeze(-2))
    size = torch.linalg.vector_norm(update) / update.numel() ** 0.5
    return update.div_((size / UPDATE_LIMIT).clamp_(min=1.0))


def _mean_square(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Means of the squares over one dimension, without the squares themselves in memory."""
    norms: torch.Tensor = torch.linalg.vector_norm(matrix, dim=dim)
    return norms.square_().div_(matrix.shape[dim]).add_(EPS)
