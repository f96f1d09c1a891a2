"""The learning rate of each step."""

from __future__ import annotations

import math

from jobs.spec import LrScheduler


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, lr_scheduler: LrScheduler) -> float:
    """Rate of step 1 … `steps`: rises as step / warmup, then decays so that it would be 0 one step after the last."""
    if step < warmup:
        return peak * step / warmup
    start = max(1, warmup)
    share = (step - start) / (steps + 1 - start)  # 0 at the peak, 1 one step after the last
    if lr_scheduler == "linear":
        return peak * (1 - share)
    if lr_scheduler == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * share))
    return peak
