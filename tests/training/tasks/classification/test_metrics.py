"""Accuracy and F1 as scikit-learn has them, of all rows and of resamples; and the picture."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from jobs.evaluation_metrics import EvaluationMetric
from worker.training.dataset.data import Int64
from worker.training.scores.intervals import score
from worker.training.tasks.classification import confusion
from worker.training.tasks.classification.metrics import label_statistics

M = EvaluationMetric


@pytest.mark.parametrize("seed", range(20))
def test_of_one_label(seed: int) -> None:
    draw = np.random.default_rng(seed)
    classes, rows = int(draw.integers(2, 12)), int(draw.integers(1, 60))
    truth, told = (draw.integers(0, classes, rows) for _ in range(2))
    told = np.where(draw.random(rows) < 0.5, truth, told)
    found = label_statistics(truth, told, classes, several=False)
    assert score(found[M.ACCURACY]) == pytest.approx(accuracy_score(truth, told), abs=1e-12)
    assert score(found[M.MACRO_F1]) == pytest.approx(f1_score(truth, told, average="macro"), abs=1e-12)
    weights = draw.integers(0, 3, (5, rows)) + (np.arange(rows) == 0)
    again = [np.repeat(np.arange(rows), each) for each in weights]
    expected = [f1_score(truth[each], told[each], average="macro") for each in again]
    assert found[M.MACRO_F1].scores(weights.astype(np.float64)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_of_several_labels(seed: int) -> None:
    draw = np.random.default_rng(seed)
    classes, rows = int(draw.integers(2, 8)), int(draw.integers(1, 40))
    truth: Int64 = (draw.random((rows, classes)) < 0.3).astype(np.int64)
    told: Int64 = np.where(draw.random((rows, classes)) < 0.7, truth, 1 - truth)
    found = label_statistics(truth, told, classes, several=True)
    for metric, average in ((M.MICRO_F1, "micro"), (M.MACRO_F1, "macro")):
        expected = f1_score(truth, told, average=average, zero_division=0)
        assert score(found[metric]) == pytest.approx(expected, abs=1e-12)
    assert score(found[M.SUBSET_ACCURACY]) == pytest.approx(accuracy_score(truth, told), abs=1e-12)


def test_nothing_is_right_about_nothing() -> None:
    nothing = np.zeros((2, 3), np.int64)
    found = label_statistics(nothing, nothing, 3, several=True)
    assert {str(metric): score(each) for metric, each in found.items()} == {
        "subset_accuracy": 1.0, "micro_f1": 0.0, "macro_f1": 0.0,
    }  # fmt: skip


def test_the_picture_has_the_commonest_classes_and_the_others_together() -> None:
    truth = np.concatenate([np.repeat(np.arange(25), np.arange(25, 0, -1)), [24]])
    guessed = truth.copy()
    guessed[0] = 24
    cells, names = confusion.of_the_commonest(truth, guessed, [f"class {number}" for number in range(25)])
    assert len(names) == 21 and names[0] == "class 0" and names[-1] == "(others)"
    assert cells[0, 0] == 24 and cells[0, 20] == 1 and cells.sum() == len(truth)
    assert confusion.draw(cells, ["$x^2$ and _y", *names[1:]]).startswith(b"\x89PNG")
    few, named = confusion.of_the_commonest(np.array([0, 1]), np.array([0, 0]), ["a", "b"])
    assert named == ["a", "b"] and few.tolist() == [[1, 0], [1, 0]]
