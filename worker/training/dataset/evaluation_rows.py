"""Which of the rows that are held out an evaluation looks at, where it does not look at all."""

from __future__ import annotations

import numpy as np

from jobs.plan import RowChoice
from worker.training.dataset.data import Int64

_SEED = 22


def evaluation_rows(rows: int, most: int, choice: RowChoice) -> Int64:
    """At most so many of these rows: in order where all are, else `random` ones in random order, or the `first`.

    Always the same ones: neither the job nor its seed matters, so that jobs are compared over the same rows. Fewer of
    them are the first of these; and most stay where rows are added at the end.
    """
    if most >= rows or choice == "first":
        return np.arange(min(most, rows))
    return np.argsort(np.random.default_rng(_SEED).random(rows), kind="stable")[:most]
