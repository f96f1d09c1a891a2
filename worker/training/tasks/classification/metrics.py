"""What a classifier says of rows, against the labels that they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jobs.evaluation_metrics import EvaluationMetric, metrics_of
from worker.training.dataset.data import Int64, Rows
from worker.training.scores.statistics import Floats, LabelCounts, Statistics, Sums
from worker.training.tasks.classification import confusion
from worker.training.tasks.classification.labels import SEPARATOR
from worker.training.tasks.task import Measured

_M = EvaluationMetric


def probable(logits: torch.Tensor, *, several: bool) -> torch.Tensor:
    """[B, K] -> [B] the most probable class; of `several` [B, K] whether a label is more probable than not."""
    return (logits > 0).long() if several else logits.argmax(-1)


def names(labels: torch.Tensor, known: Mapping[int, str]) -> str:
    """Of one row: the number of its label, or [K] a 1 for each that it has; as text."""
    numbers = labels.nonzero()[:, 0].tolist() if labels.ndim else [int(labels)]
    return SEPARATOR.join(known[number] for number in numbers)


def truth_of(rows: Rows, chosen: Int64, classes: int, *, several: bool) -> npt.NDArray[Any]:
    """[rows] number of the label; of `several` [rows, K] of 0 and 1."""
    if not several:
        return rows.gather("target", chosen, 1, 0)[:, 0]
    found = np.zeros((len(chosen), classes), np.int64)
    for place, row in enumerate(chosen.tolist()):
        found[place, rows.target(row).astype(np.int64)] = 1
    return found


def measured(
    rows: Rows, chosen: Int64, losses: Floats, answers: Int64, labels: Sequence[str], *, several: bool
) -> Measured:
    """What `probable` has said of the `chosen` rows, against what they have; and the loss of each."""
    truth = truth_of(rows, chosen, len(labels), several=several)
    counts = truth.sum(0) if several else np.bincount(truth, minlength=len(labels))
    commonest = np.arange(len(labels)) == counts.argmax() if several else counts.argmax()
    always = np.broadcast_to(commonest, truth.shape).astype(np.int64)
    return Measured(
        {_M.LOSS: Sums.ratio(_M.LOSS, losses, 1), **label_statistics(truth, answers, len(labels), several=several)},
        label_statistics(truth, always, len(labels), several=several),
        None if several else confusion.of_the_commonest(truth, answers, labels),
    )


def label_statistics(truth: Int64, told: Int64, classes: int, *, several: bool) -> dict[EvaluationMetric, Statistics]:
    """[rows] numbers of labels; of `several` [rows, K] of 0 and 1."""
    if several:
        pairs = [tuple(np.flatnonzero(each).tolist() for each in side) for side in (truth, told)]
        right = (truth == told).all(1)
    else:
        pairs = [tuple([each] for each in side.tolist()) for side in (truth, told)]
        right = truth == told
    return {
        metric: Sums.ratio(metric, right, 1)
        if metric.share_of_rows
        else LabelCounts(pairs[0], pairs[1], classes, partial(_OF_COUNTS[metric], several))
        for metric in metrics_of("classification", multi_label=several)
        if metric is not _M.LOSS
    }


def _micro_f1(several: bool, right: Floats, truth: Floats, told: Floats) -> float:
    return float(2 * right.sum() / max(1.0, (truth + told).sum()))


def _macro_f1(several: bool, right: Floats, truth: Floats, told: Floats) -> float:
    """Of `several` every class counts, and one that neither has counts as 0, as scikit-learn has it for indicators.
    Else those classes count that occur in either."""
    both = truth + told
    if several:
        return float((2 * right / np.maximum(both, 1)).mean())
    occurs = both > 0
    return float((2 * right[occurs] / both[occurs]).mean()) if occurs.any() else 0.0


_OF_COUNTS: Mapping[EvaluationMetric, Callable[[bool, Floats, Floats, Floats], float]] = {
    _M.MICRO_F1: _micro_f1, _M.MACRO_F1: _macro_f1,
}  # fmt: skip
"""Of whether rows may have several labels, and `LabelCounts.formula`."""
