"""The learning rate of each step."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict

from jobs.spec import LrScheduler


class Correction(BaseModel):
    """The number of steps was corrected while the run trained (`training.max_hours`). It goes into checkpoints."""

    model_config = ConfigDict(extra="forbid")

    step: int
    """Steps done when it was: the learning rates up to there stay what they were."""
    steps: int
    """Of the whole run, for which the learning rate is scheduled from then on."""
    warmup_steps: int
    """Of a run of so many."""
    cut: int | None = None
    """The step after which the run ends, since its time is over; null: all `steps` are done."""
    before: Correction | None = None
    """The one before it, whose learning rates stay up to `step`. Null: up to there they are the planned ones."""

    @property
    def last(self) -> int:
        """The last step of the run."""
        return self.steps if self.cut is None else self.cut


def learning_rate(
    step: int,
    *,
    peak: float,
    steps: int,
    warmup: int,
    lr_scheduler: LrScheduler,
    correction: Correction | None = None,
) -> float:
    """Rate of step 1 … `steps`: rises as step / warmup, then decays so that it would be 0 one step after the last.

    After a correction it continues from the rate reached, without a jump: it rises with the slope of the new warm-up,
    if it was still rising, and the rest of the decay is spread over the steps left.
    """
    while correction is not None and step <= correction.step:
        correction = correction.before
    if correction is None and step < warmup:
        return peak * step / warmup
    risen, decayed = _shares(step, correction, steps, warmup)
    return peak * (risen if risen < 1.0 else _decayed(decayed, lr_scheduler))


def _shares(step: int, correction: Correction | None, steps: int, warmup: int) -> tuple[float, float]:
    """How much of the warm-up is done at this step, and how much of the decay; `correction`: the one in force."""
    if correction is None:
        start = max(1, warmup)
        return (step / warmup, 0.0) if step < warmup else (1.0, (step - start) / (steps + 1 - start))
    since, end = correction.step, correction.steps + 1
    before = correction.before
    while before is not None and since <= before.step:
        before = before.before
    risen, decayed = _shares(since, before, steps, warmup)
    if risen < 1.0:
        rise = min(math.ceil((1 - risen) * max(1, correction.warmup_steps)), correction.steps - since)
        if step < since + rise:
            return risen + (1 - risen) * (step - since) / rise, 0.0
        since += rise
    return 1.0, decayed + (1 - decayed) * (step - since) / (end - since)


def _decayed(share: float, lr_scheduler: LrScheduler) -> float:
    """What is left of the peak. `share`: 0 at the peak, 1 one step after the last."""
    if lr_scheduler == "linear":
        return 1 - share
    if lr_scheduler == "cosine":
        return 0.5 * (1 + math.cos(math.pi * share))
    return 1.0
