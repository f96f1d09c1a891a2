"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int, *, peak: float, steps: int, warmup: int, decay: Literal["linear", "cosine", "constant"]
) -> float:
    """Rate of step 1 … `steps`: rises as step / warmup, then decays so that it would be 0 one step after the last."""
    if step < warmup:
        return peak * step / warmup
    start = max(1, warmup)
    share = (step - start) / (steps + 1 - start)  # 0 at the peak, 1 one step after the last
    if decay == "linear":
        return peak * (1 - share)
    if decay == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * share))
    return peak
