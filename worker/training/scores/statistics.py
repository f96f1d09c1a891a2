"""What a metric needs of each row, so that it can be computed of any choice of rows: of all, or of a resample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from jobs.evaluation_metrics import EvaluationMetric
from jobs.verdict import LEAST_ROWS, BaseDifference, ConfidenceInterval

Floats = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Statistics(Protocol):
    """Of one metric and some rows."""

    def __len__(self) -> int:
        """Rows."""

    def scores(self, weights: Floats) -> Floats:
        """[m, rows] how often each row counts -> [m] the metric."""

    @property
    def successes(self) -> int | None:
        """Rows that count as 1, of a metric that is the share of these; None: it is something else."""

    @property
    def of_rows(self) -> list[Any]:
        """[rows] what is needed of each, as JSON."""

    def like(self, of_rows: Sequence[Any]) -> Self:
        """Of the same metric and other answers. Raises ValueError, TypeError where these are no such numbers."""


def quotient(sums: Floats) -> Floats:
    """[m, 2] -> [m] the first by the second. Raises ValueError where there are not two."""
    above, below = sums.T
    result: Floats = above / below
    return result


@dataclass(frozen=True)
class Sums:
    """Numbers that are summed over rows; the metric follows from the sums."""

    metric: EvaluationMetric
    numbers: Floats
    """[rows, k]"""
    formula: Callable[[Floats], Floats] = quotient
    """[m, k] sums -> [m] the metric."""

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def ratio(
        cls,
        metric: EvaluationMetric,
        above: npt.ArrayLike,
        below: npt.ArrayLike,
        formula: Callable[[Floats], Floats] = quotient,
    ) -> Sums:
        """[rows] each, or one number for all: the sum of the one by the sum of the other, or what `formula` makes of
        both sums."""
        return cls(metric, np.stack(np.broadcast_arrays(above, below), 1).astype(np.float64), formula)

    def scores(self, weights: Floats) -> Floats:
        return self.formula(weights @ self.numbers)

    @property
    def successes(self) -> int | None:
        return int(self.numbers[:, 0].sum()) if self.metric.share_of_rows else None

    @property
    def of_rows(self) -> list[Any]:
        return [[int(each) if each.is_integer() else each for each in row] for row in self.numbers.tolist()]

    def like(self, of_rows: Sequence[Any]) -> Self:
        numbers = np.array(of_rows, np.float64).reshape(-1, self.numbers.shape[1])
        return replace(self, numbers=numbers)


@dataclass(frozen=True)
class LabelCounts:
    """Labels that are counted over rows; the metric follows from the counts of each class."""

    truth: tuple[list[int], ...]
    """[rows] numbers of the labels that each has."""
    told: tuple[list[int], ...]
    """[rows] those that the model tells."""
    classes: int
    formula: Callable[[Floats, Floats, Floats], float]
    """[classes] how often each label is told rightly, is there, and is told -> the metric."""

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def successes(self) -> int | None:
        return None

    def scores(self, weights: Floats) -> Floats:
        counts = [self._counts(each) for each in (self._right, self.truth, self.told)]
        return np.array([self.formula(*(count(row) for count in counts)) for row in weights])

    @property
    def _right(self) -> tuple[list[int], ...]:
        return tuple(sorted({*one} & {*other}) for one, other in zip(self.truth, self.told, strict=True))

    def _counts(self, labels: Sequence[list[int]]) -> Callable[[Floats], Floats]:
        """[rows] how often each counts -> [classes] how many have each label."""
        rows = np.repeat(np.arange(len(labels)), [len(each) for each in labels])
        flat = np.array([label for each in labels for label in each], np.int64)
        return lambda weights: np.bincount(flat, weights[rows], self.classes).astype(np.float64)

    @property
    def of_rows(self) -> list[Any]:
        return [[truth, told] for truth, told in zip(self.truth, self.told, strict=True)]

    def like(self, of_rows: Sequence[Any]) -> Self:
        truth, told = zip(*of_rows, strict=True) if of_rows else ((), ())
        return replace(self, truth=truth, told=told)


@dataclass(frozen=True)
class RankCorrelation:
    """Two numbers a row, of which only the order counts: Spearman's rank correlation, equal numbers sharing the mean of
    their ranks (as scipy)."""

    truth: Floats
    """[rows]"""
    told: Floats
    """[rows]"""

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def successes(self) -> int | None:
        return None

    def scores(self, weights: Floats) -> Floats:
        first, second = (_ranks(each, weights) for each in (self.truth, self.told))
        below = weights.sum(1, keepdims=True)
        first, second = (each - (weights * each).sum(1, keepdims=True) / below for each in (first, second))
        products = (
            (weights * one * other).sum(1) for one, other in ((first, second), (first, first), (second, second))
        )
        return correlation(*products)

    @property
    def of_rows(self) -> list[Any]:
        return [list(pair) for pair in zip(self.truth.tolist(), self.told.tolist(), strict=True)]

    def like(self, of_rows: Sequence[Any]) -> Self:
        truth, told = np.array(of_rows, np.float64).reshape(-1, 2).T
        return replace(self, truth=truth, told=told)


def _ranks(values: Floats, weights: Floats) -> Floats:
    """[rows], [m, rows] how often each row counts -> [m, rows] the mean rank of each among as many."""
    different, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(different)))
    often = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks: Floats = (np.cumsum(often, axis=1) - (often - 1) / 2)[:, group]
    return ranks


def correlation(products: Floats, first: Floats, second: Floats) -> Floats:
    """[m] the sums of products of two centred numbers, and of the squares of each -> [m]; NaN where one is constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = np.where((first > 0) & (second > 0), products / np.sqrt(first * second), np.nan)
    return np.clip(found, -1.0, 1.0)


# -- intervals ---------------------------------------------------------------------------------------------------------
# How sure a figure is: a share of rows by Wilson's score interval (1927), any other figure by the bootstrap over rows
# (Efron 1979), and a difference by that over the same rows (Koehn 2004).
#
# The bootstrap: rows are drawn with replacement, as many as there are; a metric is computed of each such sample, and
# 95 % of what comes out lies in the interval. The draws depend on the number of rows alone, so the same rows always
# have the same interval.

SAMPLES = 1000
_LEVELS = (0.025, 0.975)
_Z = 1.959963984540054
"""Standard deviations of a normal distribution within which 95 % of it lies."""
_SEED = 20
_NUMBERS = 2**22
"""Weights that are drawn at once."""


def score(statistics: Statistics) -> float:
    """Of all rows."""
    return float(statistics.scores(np.ones((1, len(statistics))))[0])


def interval(statistics: Statistics) -> ConfidenceInterval | None:
    """Of a metric; None: there are too few rows, it is no number, or all rows are alike, which says
    nothing of others.
    """
    if len(statistics) < LEAST_ROWS:
        return None
    if (successes := statistics.successes) is not None:
        return wilson(successes, len(statistics))
    found = _between(np.concatenate([statistics.scores(weights) for weights in _draws(len(statistics))]))
    return None if found is None or found.low == found.high else found


def wilson(successes: int, rows: int) -> ConfidenceInterval:
    """Of a share: of so many rows, so many. Unlike the bootstrap's it has a width where the share is 0 or 1."""
    share, squared = successes / rows, _Z**2 / rows
    middle = share + squared / 2
    reach = _Z * (share * (1 - share) / rows + squared / (4 * rows)) ** 0.5
    low, high = ((middle + side * reach) / (1 + squared) for side in (-1, 1))
    return ConfidenceInterval(low=low if successes else 0.0, high=high if successes < rows else 1.0)


def difference(statistics: Statistics, base: Statistics) -> BaseDifference | None:
    """Of a metric of two models, of the same rows in the same order; None as above, or if the rows are not the same."""
    rows = len(statistics)
    if rows < LEAST_ROWS or len(base) != rows:
        return None
    found = _between(np.concatenate([statistics.scores(each) - base.scores(each) for each in _draws(rows)]))
    value = score(statistics) - score(base)
    return None if found is None else BaseDifference(difference=value, low=found.low, high=found.high)


def _between(values: Floats) -> ConfidenceInterval | None:
    if not np.isfinite(values).all():
        return None
    low, high = np.quantile(values, _LEVELS).tolist()
    return ConfidenceInterval(low=low, high=high)


def _draws(rows: int) -> Iterator[Floats]:
    """[m, rows] how often each row is drawn; `SAMPLES` in all."""
    draw = np.random.default_rng(_SEED)
    at_once = max(1, min(SAMPLES, _NUMBERS // rows))
    for begin in range(0, SAMPLES, at_once):
        samples = min(at_once, SAMPLES - begin)
        drawn = draw.integers(0, rows, (samples, rows)) + rows * np.arange(samples)[:, None]
        yield np.bincount(drawn.ravel(), minlength=samples * rows).reshape(samples, rows).astype(np.float64)
