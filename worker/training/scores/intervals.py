"""How sure a figure is: a share of rows by Wilson's score interval (1927), any other figure by the bootstrap over rows
(Efron 1979), and a difference by that over the same rows (Koehn 2004).

The bootstrap: rows are drawn with replacement, as many as there are; a metric is computed of each such sample, and 95 %
of what comes out lies in the interval. The draws depend on the number of rows alone, so the same rows always have the
same interval.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jobs.verdict import LEAST_ROWS, BaseDifference, ConfidenceInterval
from worker.training.scores.statistics import Floats, Statistics

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
