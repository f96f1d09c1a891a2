"""Which rows an evaluation looks at: all, or always the same ones of everywhere."""

from __future__ import annotations

import numpy as np

from worker.training.dataset.split import evaluation_rows


def test_all_rows_are_looked_at_in_order() -> None:
    assert evaluation_rows(5, 5, "random").tolist() == evaluation_rows(5, 9, "first").tolist() == [0, 1, 2, 3, 4]
    assert evaluation_rows(0, 9, "random").tolist() == evaluation_rows(3, 0, "random").tolist() == []


def test_some_are_of_everywhere_and_fewer_are_the_first_of_these() -> None:
    some = evaluation_rows(10_000, 2_000, "random")
    assert len(np.unique(some)) == 2_000 and abs(some.mean() - 5_000) < 200
    assert evaluation_rows(10_000, 64, "random").tolist() == some[:64].tolist()
    assert evaluation_rows(10_000, 3, "first").tolist() == [0, 1, 2]


def test_most_stay_where_rows_are_added() -> None:
    before, after = (evaluation_rows(rows, 2_000, "random") for rows in (10_000, 11_000))
    assert len(np.intersect1d(before, after)) > 1_700
