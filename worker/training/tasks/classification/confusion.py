"""Which class is taken for which other, of the commonest classes; the others together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobs.evaluation_metrics import ConfusionMatrix
from worker.training.dataset.data import Int64

MOST = 20
OTHERS = "(others)"


def of_the_commonest(truth: Int64, guessed: Int64, labels: Sequence[str]) -> ConfusionMatrix:
    """The commonest first. `truth`, `guessed`: [rows] numbers of labels."""
    counts = np.bincount(truth, minlength=len(labels))
    shown = np.argsort(-counts, kind="stable")[:MOST]
    place = np.full(len(labels), len(shown), np.int64)
    place[shown] = np.arange(len(shown))
    size = len(shown) + (len(shown) < len(labels))
    cells = np.bincount(place[truth] * size + place[guessed], minlength=size * size).reshape(size, size)
    names = [*(labels[number] for number in shown), *([OTHERS] if size > len(shown) else [])]
    return ConfusionMatrix(labels=tuple(names), rows=tuple(tuple(row) for row in cells.tolist()))
