"""Which trials of a sweep are stopped early: by the evaluations that their jobs have written."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jobs.sweeps.spec import SweepSpec

MEDIAN_FROM = 5
"""Trials that must have come as far before one is compared with their median."""
REDUCTION = 3
"""Of successive halving: one in so many continues; the levels are the 1st, 3rd, 9th … evaluation."""


class StepCost(NamedTuple):
    """Of one trial: the mean over its jobs."""

    step: int
    cost: float
    """Lower is better."""


class Pruned(NamedTuple):
    """A trial that is stopped."""

    step: int
    cost: float
    why: str


def prune(spec: SweepSpec, trial: int, evaluations: Mapping[int, Sequence[StepCost]]) -> Pruned | None:
    """Whether this trial is stopped, by the evaluations after step 0 of all trials, in order. None: it continues."""
    own = evaluations.get(trial, ())
    others = [found for number, found in evaluations.items() if number != trial]
    if spec.pruning == "median":
        return _worse_than_median(own, others)
    return _below_level(own, others) if spec.pruning == "asha" else None


def _worse_than_median(own: Sequence[StepCost], others: Sequence[Sequence[StepCost]]) -> Pruned | None:
    if not own:
        return None
    last = own[-1]
    reached = [found[len(own) - 1].cost for found in others if len(found) >= len(own)]
    if len(reached) < MEDIAN_FROM:
        return None
    best, median = min(each.cost for each in own), statistics.median(reached)
    if best <= median:
        return None
    return Pruned(last.step, last.cost, f"worse than the median of {len(reached)} others at evaluation {len(own)}")


def _below_level(own: Sequence[StepCost], others: Sequence[Sequence[StepCost]]) -> Pruned | None:
    level = 1
    while level * REDUCTION <= len(own):
        level *= REDUCTION
    if len(own) < level:
        return None
    at = own[level - 1]
    reached = sorted([found[level - 1].cost for found in others if len(found) >= level] + [at.cost])
    if len(reached) < REDUCTION or at.cost <= reached[len(reached) // REDUCTION - 1]:
        return None
    share = f"the best {len(reached) // REDUCTION} of {len(reached)}"
    return Pruned(at.step, at.cost, f"not among {share} at evaluation {level}")
