"""Stochastic rounding to bf16: what one step loses, another gains.

Rounding to the nearest loses an update smaller than half the distance between two bf16 numbers, every time. Rounded
away from zero with the probability of the part cut off, the mean is exact, and small updates add up.
"""

from __future__ import annotations

import torch


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Finite fp32 `values`, rounded in place to numbers that bf16 holds exactly; returns them.

    One of the two bf16 neighbours, each with the probability 1 - distance / (distance between the neighbours).
    """
    # The upper 16 bits of an fp32 number are a bf16 number. Adding 16 random bits to the lower ones carries into the
    # upper ones with the probability of lower bits / 2^16; sign and magnitude are apart, so negatives behave alike.
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    values.view(torch.int32).add_(noise).bitwise_and_(-(2**16))
    return values
