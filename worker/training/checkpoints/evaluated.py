"""The evaluations of a run so far, and what follows from them alone: which is the best, and whether to stop.

They go into checkpoints. So a run that was killed decides as one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from jobs.evaluation_metrics import cost_of, is_better
from jobs.spec import EarlyStoppingSpec


class EvaluationRecord(BaseModel):
    """What one evaluation measured."""

    model_config = ConfigDict(extra="forbid")

    step: int
    loss: float
    metrics: dict[str, float] = {}

    def cost(self, metric: str) -> float | None:
        """By this metric, lower is better; None where it was not computed."""
        return cost_of(metric, self.loss, self.metrics)


def newest_is_best(evaluations: Sequence[EvaluationRecord], metric: str) -> bool:
    """Whether the newest one is better than every other."""
    *before, newest = (each.cost(metric) for each in evaluations)
    return is_better(newest, min((each for each in before if each is not None), default=None))


def better_step(evaluations: Sequence[EvaluationRecord], metric: str, than: float) -> int | None:
    """The step whose evaluation is the best, where that is better than this cost; None: there is none. There is no
    checkpoint of step 0, so it does not count."""
    found = None
    for each in evaluations:
        if each.step and (cost := each.cost(metric)) is not None and is_better(cost, than):
            found, than = each.step, cost
    return found


def stops(evaluations: Sequence[EvaluationRecord], rule: EarlyStoppingSpec, metric: str) -> bool:
    """Whether so many evaluations in a row were not better, by more than `min_delta`, than the best before them."""
    best, waited = None, 0
    for each in evaluations:
        if (cost := each.cost(metric)) is None:  # of a version that did not compute it
            continue
        better = best is None or cost < best - rule.min_delta
        best, waited = (cost, 0) if better else (best, waited + 1)
    return waited >= rule.patience
