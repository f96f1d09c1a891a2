"""What a classifier says of rows, against the labels that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jobs.evaluation_metrics import EvaluationMetric
from worker.training.dataset.data import Int64, Rows
from worker.training.scores.statistics import Floats, LabelF1, Statistics, Sums
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
        right, metric, others = (truth == told).all(1), _M.SUBSET_ACCURACY, [_M.MICRO_F1, _M.MACRO_F1]
    else:
        pairs = [tuple([each] for each in side.tolist()) for side in (truth, told)]
        right, metric, others = truth == told, _M.ACCURACY, [_M.MACRO_F1]
    return {
        metric: Sums.ratio(metric, right, 1),
        **{each: LabelF1(each, pairs[0], pairs[1], classes, several) for each in others},
    }
