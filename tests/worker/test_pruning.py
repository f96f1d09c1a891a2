"""Which trials are stopped early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jobs.sweeps.spec import SweepSpec, parse_sweep
from worker.sweeps import MEDIAN_FROM, StepCost, prune


def spec(pruning: str) -> SweepSpec:
    job = {"data": {"train": "rows.jsonl"}}
    return parse_sweep({"job": job, "space": {"training.batch_size": [4]}, "pruning": pruning, "max_trials": 100})


def costs(*found: Sequence[float]) -> dict[int, list[StepCost]]:
    return {
        trial: [StepCost(10 * (place + 1), cost) for place, cost in enumerate(each)] for trial, each in enumerate(found)
    }


FIVE = [[1.0, 0.8], [2.0, 1.8], [3.0, 2.8], [4.0, 3.8], [5.0, 4.8]]


def test_worse_than_the_median_at_the_same_evaluation() -> None:
    found = prune(spec("median"), 5, costs(*FIVE, [3.5]))
    assert found is not None and (found.step, found.cost) == (10, 3.5) and "median of 5 others" in found.why
    assert prune(spec("median"), 5, costs(*FIVE, [3.0])) is None, "as good as the median is not worse"
    assert prune(spec("median"), 5, costs(*FIVE, [3.0, 2.9])) is not None


def test_its_best_so_far_counts() -> None:
    assert prune(spec("median"), 5, costs(*FIVE, [2.0, 9.0])) is None


def test_with_few_others_nobody_is_stopped() -> None:
    assert prune(spec("median"), MEDIAN_FROM - 1, costs(*FIVE[: MEDIAN_FROM - 1], [9.0])) is None
    assert prune(spec("median"), 5, costs(*[each[:1] for each in FIVE], [1.0, 9.0])) is None


@pytest.mark.parametrize("pruning", ["none", "median", "asha"])
def test_without_an_evaluation_nobody_is_stopped(pruning: str) -> None:
    assert prune(spec(pruning), 5, costs(*FIVE, [])) is None


def test_halving_keeps_the_best_third_at_each_rung() -> None:
    others = [[cost] for cost in (1.0, 2.0, 3.0, 4.0, 5.0)]
    asha = spec("asha")
    assert prune(asha, 5, costs(*others, [1.5])) is None
    found = prune(asha, 5, costs(*others, [2.5]))
    assert found is not None and (found.step, found.why) == (10, "not among the best 2 of 6 at evaluation 1")
    assert prune(asha, 2, costs([1.0], [2.0], [9.0])) is not None
    assert prune(asha, 1, costs([1.0], [2.0])) is None, "there are no thirds of two"


def test_between_rungs_the_rung_before_counts() -> None:
    others = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    assert prune(spec("asha"), 2, costs(*others, [0.5, 9.0])) is None
    assert prune(spec("asha"), 2, costs(*others, [0.5, 9.0, 9.0])) is not None
