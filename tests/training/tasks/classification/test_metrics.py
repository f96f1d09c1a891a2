"""Accuracy and F1 as scikit-learn has them, of all rows and of resamples; and the picture."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jobs.evaluation_metrics import ConfusionMatrix, EvaluationMetric
from worker.training.scores.statistics import score
from worker.training.tasks.classification import confusion, metrics
from worker.training.tasks.classification.metrics import label_statistics

M = EvaluationMetric
# What scikit-learn 1.9.1 says of the rows that follow from the seed, which is the place in the table.
ONE_LABEL = [  # accuracy_score, f1_score(average="macro"), and the latter of three resamples
    (0.413043478261, 0.397808857809, 0.379603174603, 0.350454545455, 0.429135243841),
    (0.725490196078, 0.722093522094, 0.740079365079, 0.723860727087, 0.717105263158),
    (0.491228070175, 0.471578926124, 0.397435897436, 0.450967659791, 0.548219722861),
    (0.575757575758, 0.563888888889, 0.524610805861, 0.533333333333, 0.522946859903),
    (0.857142857143, 0.822222222222, 1.0, 0.722222222222, 0.636363636364),
    (0.577777777778, 0.596313980138, 0.550844921669, 0.636174242424, 0.594841269841),
    (0.58, 0.590161690162, 0.632222748012, 0.410277376944, 0.631722308193),
    (0.6, 0.493333333333, 0.466666666667, 0.4, 0.333333333333),
    (0.741379310345, 0.734568864386, 0.736283563723, 0.718243009472, 0.694028417819),
    (0.739130434783, 0.635052910053, 0.587301587302, 0.616346153846, 0.679230769231),
]
SEVERAL_LABELS = [  # accuracy_score, f1_score(average="micro", zero_division=0), and that with "macro"
    (0.129032258065, 0.522388059701, 0.507023886723), (0.529411764706, 0.62962962963, 0.630344827586),
    (0.0526315789474, 0.557894736842, 0.539098578051), (0.363636363636, 0.578947368421, 0.579365079365),
    (0.4, 0.666666666667, 0.655555555556), (0.166666666667, 0.613861386139, 0.578233815423),
    (0.0606060606061, 0.554744525547, 0.546947829343), (0.714285714286, 0.857142857143, 0.888888888889),
    (0.282051282051, 0.531914893617, 0.524644945698), (0.133333333333, 0.666666666667, 0.656787330317),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(len(ONE_LABEL)))
def test_of_one_label(seed: int) -> None:
    draw = random.Random(seed).random
    classes, rows = 2 + int(10 * draw()), 1 + int(60 * draw())
    truth = np.array([int(classes * draw()) for _ in range(rows)])
    told = np.array([right if draw() < 0.5 else int(classes * draw()) for right in truth])
    weights = np.array([[int(3 * draw()) + (row == 0) for row in range(rows)] for _ in range(3)], np.float64)
    found = label_statistics(truth, told, classes, several=False)
    scores = [score(found[M.ACCURACY]), score(found[M.MACRO_F1]), *found[M.MACRO_F1].scores(weights)]
    assert scores == pytest.approx(ONE_LABEL[seed], rel=1e-11)


@pytest.mark.parametrize("seed", range(len(SEVERAL_LABELS)))
def test_of_several_labels(seed: int) -> None:
    draw = random.Random(seed).random
    classes, rows = 2 + int(6 * draw()), 1 + int(40 * draw())
    truth = np.array([[int(draw() < 0.3) for _ in range(classes)] for _ in range(rows)])
    told = np.where(np.array([[draw() < 0.7 for _ in range(classes)] for _ in range(rows)]), truth, 1 - truth)
    found = label_statistics(truth, told, classes, several=True)
    scores = [score(found[metric]) for metric in (M.SUBSET_ACCURACY, M.MICRO_F1, M.MACRO_F1)]
    assert scores == pytest.approx(SEVERAL_LABELS[seed], rel=1e-11)


def test_nothing_is_right_about_nothing() -> None:
    nothing = np.zeros((2, 3), np.int64)
    found = label_statistics(nothing, nothing, 3, several=True)
    assert {str(metric): score(each) for metric, each in found.items()} == {
        "subset_accuracy": 1.0, "micro_f1": 0.0, "macro_f1": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("several", "truth", "expected"),
    [
        (False, [1, 1, 0, 1], {"accuracy": 0.75, "macro_f1": 3 / 7}),
        (True, [[0, 1], [1, 1], [0, 0], [0, 1]], {"subset_accuracy": 0.5, "micro_f1": 0.75, "macro_f1": 3 / 7}),
    ],
)
def test_the_commonest_class_alone_is_measured_as_a_model_is(
    several: bool, truth: list[Any], expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.array(truth)
    monkeypatch.setattr(metrics, "truth_of", lambda *_, **__: labels)
    rows: Any = None
    found = metrics.measured(rows, np.arange(4), np.ones(4), 0 * labels, ["a", "b"], several=several)
    assert {str(metric): score(each) for metric, each in found.commonest.items()} == pytest.approx(expected)


def test_the_confusion_matrix_has_the_commonest_classes_and_the_others_together() -> None:
    truth = np.concatenate([np.repeat(np.arange(25), np.arange(25, 0, -1)), [24]])
    guessed = truth.copy()
    guessed[0] = 24
    matrix = confusion.of_the_commonest(truth, guessed, [f"class {number}" for number in range(25)])
    cells, names = np.array(matrix.rows), matrix.labels
    assert len(names) == 21 and names[0] == "class 0" and names[-1] == "(others)"
    assert cells[0, 0] == 24 and cells[0, 20] == 1 and cells.sum() == len(truth)
    few = confusion.of_the_commonest(np.array([0, 1]), np.array([0, 0]), ["a", "b"])
    assert few == ConfusionMatrix(labels=("a", "b"), rows=((1, 0), (1, 0)))
