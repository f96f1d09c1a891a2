"""Adafactor: of the second moment only the means of each row and column, no first moment; stochastic rounding to bf16.

Shazeer and Stern, https://arxiv.org/abs/1804.04235, with the learning rate of the schedule as it is: neither scaled by
the size of the weights nor by the step, as is usual for fine-tuning T5. The update is computed in fp32, one piece of a
matrix at a time, so what it needs besides the states is an fp32 copy of a piece. A matrix of several pieces (an
embedding) is gone through three times: for its moments, for the size of its update, and for the update.

The host waits for the device once a step, to see whether loss and norm are finite: a few milliseconds in a step of
seconds, and no update has to be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import nn

from worker.training.journal import Journal
from worker.training.optimizers.gradients import (
    decays,
    finite_clipping,
    gradient_norm,
    load_states,
    round_stochastically,
    update_dtype,
)
from worker.training.steps.randomness import update_seed

PIECE = 2**24  # weights updated at once: 64 MiB for each fp32 copy, and as much for the random bits of their rounding
DECAY_RATE = 0.8  # the second moment of step t is a mean over about t^0.8 steps
EPS = 1e-30  # added to squares of gradients
UPDATE_LIMIT = 1.0  # root mean square of an update, in learning rates


Place = slice | EllipsisType
"""Of a piece, among the rows of a matrix; or all of a parameter."""


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
                for weights, update in _updates(slot, slot.parameter.grad, scale, new_share):
                    self._apply(weights, update, learning_rate, slot.decay)
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

    def _apply(self, weights: torch.Tensor, update: torch.Tensor, learning_rate: float, decay: float) -> None:
        for old, change in zip(weights.view(-1).split(PIECE), update.view(-1).split(PIECE), strict=True):
            new = old.to(change.dtype)  # the weights themselves where they are fp32 or float64
            new.mul_(1 - learning_rate * decay).add_(change, alpha=-learning_rate)
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


def _updates(
    slot: _FactoredState, gradient: torch.Tensor, scale: float, new_share: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and their update, piece by piece; moves the moments.

    The update is the gradient over the root of its second moment, of root mean square UPDATE_LIMIT at most.
    """
    places = _places(slot.parameter)
    whole = _scaled(gradient, scale) if len(places) == 1 else None

    def scaled(place: Place) -> torch.Tensor:
        return _scaled(gradient[place], scale) if whole is None else whole

    if "square" in slot.moments:
        slot.moments["square"].lerp_(scaled(...).square().add_(EPS), new_share)
    else:
        row, column = slot.moments["row"], slot.moments["column"]
        columns = torch.zeros_like(column)
        for place in places:
            piece = scaled(place)
            row[place].lerp_(_squares(piece, -1).div_(piece.shape[-1]).add_(EPS), new_share)
            columns.add_(_squares(piece, -2))
            del piece
        column.lerp_(columns.div_(gradient.shape[-2]).add_(EPS), new_share)
    factors = _factors(slot)
    norms = []
    for place in places:
        update = _times(scaled(place), factors, place)
        norms.append(torch.linalg.vector_norm(update))
        del update  # before the next piece is made
    size = (norms[0] if whole is not None else torch.linalg.vector_norm(torch.stack(norms))) / gradient.numel() ** 0.5
    limit = (size / UPDATE_LIMIT).clamp_(min=1.0)
    for place in places:
        update = whole if whole is not None else _times(scaled(place), factors, place)
        yield slot.parameter.detach()[place], update.div_(limit)
        del update


def _places(parameter: nn.Parameter) -> list[Place]:
    """Rows of a matrix that make a piece, at least one, and so on to its end; of all else, everything."""
    if parameter.ndim != 2 or parameter.numel() <= PIECE:
        return [...]
    rows = max(1, PIECE // parameter.shape[1])
    return [slice(first, first + rows) for first in range(0, parameter.shape[0], rows)]


def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """A copy in the precision of the update."""
    return gradient.to(update_dtype(gradient.dtype), copy=True).mul_(scale)


def _squares(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums of the squares over one dimension, without the squares themselves in memory."""
    norms: torch.Tensor = torch.linalg.vector_norm(matrix, dim=dim)
    return norms.square_()


def _factors(slot: _FactoredState) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a gradient is multiplied by: each number of a vector; of a matrix, each row and then each column."""
    if "square" in slot.moments:
        return slot.moments["square"].rsqrt(), None
    row = slot.moments["row"]
    factor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return factor, slot.moments["column"].rsqrt().unsqueeze(-2)


def _times(gradient: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor | None], place: Place) -> torch.Tensor:
    """In place."""
    first, second = factors
    gradient.mul_(first[place])
    return gradient if second is None else gradient.mul_(second)
