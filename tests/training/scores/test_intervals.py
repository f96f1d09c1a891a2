"""Intervals: as wide as they should be, in the direction that they should have, and always the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.evaluation import coverage
from jobs.evaluation_metrics import EvaluationMetric
from jobs.verdict import LEAST_ROWS
from worker.training.scores import statistics
from worker.training.scores.statistics import SAMPLES, LabelCounts, Sums, difference, interval, score

M = EvaluationMetric


def told(right: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Sums:
    return Sums.ratio(M.ACCURACY, right, 1)


def test_the_interval_of_a_share_is_as_wide_as_theory_says() -> None:
    right = np.arange(1000) < 300
    found = interval(told(right))
    assert found is not None
    error = 1.96 * (0.3 * 0.7 / 1000) ** 0.5
    assert [found.low, found.high] == pytest.approx([0.3 - error, 0.3 + error], abs=0.004)
    assert interval(told(right)) == found


@pytest.mark.parametrize(
    ("successes", "rows", "low", "high"),
    [(125, 125, 0.9702, 1.0), (0, 125, 0.0, 0.0298), (18, 20, 0.6990, 0.9721), (450, 500, 0.8706, 0.9233)],
)
def test_a_share_of_all_rows_or_of_none_is_not_sure(successes: int, rows: int, low: float, high: float) -> None:
    found = interval(told(np.arange(rows) < successes))
    assert found is not None and [found.low, found.high] == pytest.approx([low, high], abs=5e-5)


@pytest.mark.parametrize(("rows", "share"), [(20, 0.5), (64, 0.7), (125, 0.9), (500, 0.98)])
def test_the_intervals_of_shares_cover(rows: int, share: float) -> None:
    # Exactly: over all numbers of successes, by how probable each is. Averaged over shares near by, for the coverage of
    # any interval of a whole number of rows jumps from share to share.
    near = np.linspace(share - 0.02, min(0.995, share + 0.02), 41)
    found = [interval(told(np.arange(rows) < successes)) for successes in range(rows + 1)]
    probable = np.array([math.comb(rows, k) * near**k * (1 - near) ** (rows - k) for k in range(rows + 1)])
    inside = np.array([each is not None and (each.low <= near) & (near <= each.high) for each in found])
    assert 0.94 <= (probable * inside).sum(0).mean() <= 0.96


def test_the_same_rows_are_compared_with_themselves() -> None:
    draw = np.random.default_rng(1)
    base = draw.random(200) < 0.5
    better = base | (draw.random(200) < 0.1)
    found = difference(told(better), told(base))
    assert found is not None and found.difference == pytest.approx(score(told(better)) - score(told(base)))
    apart, alone = found.high - found.low, interval(told(better))
    assert alone is not None and found.low > 0 and apart < alone.high - alone.low, "rows that agree cancel out"
    same = difference(told(base), told(base))
    assert same is not None and (same.difference, same.low, same.high) == (0, 0, 0)


def test_too_few_rows_or_others_have_none() -> None:
    few = told(np.ones(LEAST_ROWS - 1, bool))
    enough = told(np.ones(LEAST_ROWS, bool))
    assert interval(few) is None and difference(few, few) is None and difference(enough, few) is None
    assert interval(enough) is not None


def test_a_perplexity_beyond_all_numbers_has_none() -> None:
    assert interval(Sums.ratio(M.PERPLEXITY, np.full(30, 1e6), 1, lambda sums: np.inf * sums[:, 0])) is None


def test_a_figure_that_all_rows_have_alike_has_none() -> None:
    rows = ([0],) * 30
    assert interval(LabelCounts(rows, rows, classes=2, formula=lambda right, truth, told: right.mean())) is None
    assert interval(Sums.ratio(M.LOSS, np.full(30, 2.0), 1)) is None


def test_draws_in_pieces_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_NUMBERS", 7 * 30)
    drawn = np.concatenate(list(statistics._draws(30)))
    assert drawn.shape == (SAMPLES, 30) and (drawn.sum(1) == 30).all()


def test_intervals_cover() -> None:
    assert 0.92 <= coverage(rows=100, runs=600) <= 0.98
