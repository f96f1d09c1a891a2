"""What optimizers share: the norm of gradients, its limit, and NaN; rounding of weights; names of states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from jobs.errors import NonFinite, Rejected

PIECE = 2**18
"""Numbers that a CPU holds in its cache while it updates them: 1 MiB in fp32, of each of four kinds."""


def update_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which weights of `dtype` are updated: fp32, or float64 where they are that."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to layer norms and biases."""
    return parameter.ndim >= 2 and "bias" not in name


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Global norm (0-dim, on the device), in the precision of the update without a copy of a gradient in it.

    A CPU does make that copy, of a piece at a time.
    """
    norms: list[torch.Tensor] = [
        torch.linalg.vector_norm(piece, dtype=update_dtype(parameter.dtype))
        for parameter in parameters
        if parameter.grad is not None
        for piece in (parameter.grad.flatten().split(PIECE) if parameter.device.type == "cpu" else [parameter.grad])
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clipping(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor for the gradients (0-dim, on the device): 1, or less where `norm` is above its limit."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def finite_clipping(step: int, norm: torch.Tensor, loss: torch.Tensor, max_norm: float | None) -> float:
    """The same as a number on the host. Waits for the device. Raises NonFinite if loss or norm of `step` is not."""
    factor = torch.ones_like(norm) if max_norm is None else clipping(norm, max_norm)
    finite, number = torch.stack([torch.isfinite(norm + loss.to(norm.dtype)).to(norm.dtype), factor]).tolist()
    if not finite:
        raise nonfinite(step)
    return float(number)


def nonfinite(step: int) -> NonFinite:
    """Error of the first step that was not finite."""
    return NonFinite(
        f"loss or gradient norm of step {step} is NaN or infinite; the weights are those of step {step - 1}",
        hint="lower training.learning_rate, or look at the rows of that step; the checkpoints are intact",
    )


# -- rounding ----------------------------------------------------------------------------------------------------------
# Stochastic rounding to bf16: what one step loses, another gains.
#
# Rounding to the nearest loses an update smaller than half the distance between two bf16 numbers, every time. Rounded
# away from zero with the probability of the part cut off, the mean is exact, and small updates add up.


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Finite fp32 `values`, rounded in place to numbers that bf16 holds exactly; returns them.

    One of the two bf16 neighbours, each with the probability 1 - distance / (distance between the neighbours).
    """
    # The upper 16 bits of an fp32 number are a bf16 number. Adding 16 random bits to the lower ones carries into the
    # upper ones with the probability of lower bits / 2^16; sign and magnitude are apart, so negatives behave alike.
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    values.view(torch.int32).add_(noise).bitwise_and_(-(2**16))
    return values


# -- states ------------------------------------------------------------------------------------------------------------
# The states of an optimizer, as they come back from a checkpoint: all of them, or the checkpoint is rejected.


@torch.no_grad()
def load_states(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Copy `saved` into `own`, tensor by tensor. Refuses `optimizer_state` unless names, shapes and dtypes agree."""
    wrong = sorted(own.keys() ^ saved.keys())
    wrong = wrong or sorted(name for name, state in own.items() if not _alike(state, saved[name]))
    if wrong:
        raise Rejected(
            f"{len(wrong)} optimizer states are missing, unknown, of another shape or dtype: {', '.join(wrong[:5])}",
            code="optimizer_state",
            hint="the checkpoint belongs to another model, another optimizer or another version",
        )
    for name, state in own.items():
        state.copy_(saved[name])


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
