"""Accuracy and F1 by their definitions, counted row by row, as scikit-learn has them; and the picture."""

from __future__ import annotations

import numpy as np
import pytest

from worker.training.dataset.data import Int64
from worker.training.tasks.classification import confusion
from worker.training.tasks.classification.metrics import of_one_label, of_several_labels


def f1(truth: list[bool], guessed: list[bool]) -> float:
    right = sum(one and other for one, other in zip(truth, guessed, strict=True))
    both = sum(truth) + sum(guessed)
    return 2 * right / both if both else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_of_one_label(seed: int) -> None:
    draw = np.random.default_rng(seed)
    classes, rows = int(draw.integers(2, 12)), int(draw.integers(1, 60))
    truth, guessed = (draw.integers(0, classes, rows) for _ in range(2))
    guessed = np.where(draw.random(rows) < 0.5, truth, guessed)
    seen = sorted({*truth.tolist(), *guessed.tolist()})
    each = [f1([one == label for one in truth], [one == label for one in guessed]) for label in seen]
    found = of_one_label(truth, guessed, classes)
    assert found["accuracy"] == pytest.approx(sum(truth == guessed) / rows)
    assert found["macro_f1"] == pytest.approx(sum(each) / len(each))


@pytest.mark.parametrize("seed", range(20))
def test_of_several_labels(seed: int) -> None:
    draw = np.random.default_rng(seed)
    classes, rows = int(draw.integers(1, 8)), int(draw.integers(1, 40))
    truth: Int64 = (draw.random((rows, classes)) < 0.3).astype(np.int64)
    guessed: Int64 = np.where(draw.random((rows, classes)) < 0.7, truth, 1 - truth)
    flat = [[bool(one) for row in table.tolist() for one in row] for table in (truth, guessed)]
    columns = [f1([bool(one) for one in truth[:, n]], [bool(one) for one in guessed[:, n]]) for n in range(classes)]
    found = of_several_labels(truth, guessed)
    assert found["micro_f1"] == pytest.approx(f1(*flat))
    assert found["macro_f1"] == pytest.approx(sum(columns) / classes)
    exact = [one == other for one, other in zip(truth.tolist(), guessed.tolist(), strict=True)]
    assert found["subset_accuracy"] == pytest.approx(sum(exact) / rows)


def test_known_figures() -> None:
    """Those of scikit-learn's documentation of f1_score: macro 0.27, and 0.33 of several labels."""
    found = of_one_label(np.array([0, 1, 2, 0, 1, 2]), np.array([0, 2, 1, 0, 0, 1]), 3)
    assert found["macro_f1"] == pytest.approx(0.2666666, abs=1e-6) and found["accuracy"] == pytest.approx(1 / 3)
    nothing = of_several_labels(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int64))
    assert nothing == {"subset_accuracy": 1.0, "micro_f1": 0.0, "macro_f1": 0.0}


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
