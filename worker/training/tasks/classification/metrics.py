"""How well labels are told: accuracy and F1, and which class is taken for which other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from worker.training.dataset.data import Int64, Rows
from worker.training.tasks.classification import confusion
from worker.training.tasks.task import Measured

if TYPE_CHECKING:
    import torch

SEPARATOR = "; "
"""Between the labels of a row, for people."""


def probable(logits: torch.Tensor, *, several: bool) -> torch.Tensor:
    """[B, K] -> [B] the most probable class; of `several` [B, K] whether a label is more probable than not."""
    return (logits > 0).long() if several else logits.argmax(-1)


def names(labels: torch.Tensor, known: Mapping[int, str]) -> str:
    """Of one row: the number of its label, or [K] a 1 for each that it has; as text."""
    numbers = labels.nonzero()[:, 0].tolist() if labels.ndim else [int(labels)]
    return SEPARATOR.join(known[number] for number in numbers)


def of_one_label(truth: Int64, guessed: Int64, classes: int) -> dict[str, float]:
    """[rows] each. F1 is the mean over the classes that occur in either, as scikit-learn has it."""
    right = np.bincount(truth[truth == guessed], minlength=classes)
    both = np.bincount(truth, minlength=classes) + np.bincount(guessed, minlength=classes)
    occurs = both > 0
    return {
        "accuracy": float(right.sum() / max(1, len(truth))),
        "macro_f1": float((2 * right[occurs] / both[occurs]).mean()) if occurs.any() else 0.0,
    }


def of_several_labels(truth: Int64, guessed: Int64) -> dict[str, float]:
    """[rows, K] of 0 and 1 each. A class that neither has counts as 0 in the mean over classes."""
    right = (truth & guessed).sum(0)
    both = truth.sum(0) + guessed.sum(0)
    return {
        "subset_accuracy": float((truth == guessed).all(1).mean()),
        "micro_f1": float(2 * right.sum() / max(1, both.sum())),
        "macro_f1": float((2 * right / np.maximum(both, 1)).mean()),
    }


def truth_of(rows: Rows, chosen: Int64, classes: int, *, several: bool) -> npt.NDArray[Any]:
    """[rows] number of the label; of `several` [rows, K] of 0 and 1."""
    if not several:
        return rows.gather("target", chosen, 1, 0)[:, 0]
    found = np.zeros((len(chosen), classes), np.int64)
    for place, row in enumerate(chosen.tolist()):
        found[place, rows.target(row).astype(np.int64)] = 1
    return found


def measured(rows: Rows, chosen: Int64, answers: Int64, labels: Sequence[str], *, several: bool) -> Measured:
    """What `probable` has said of the `chosen` rows, against what they have."""
    truth = truth_of(rows, chosen, len(labels), several=several)
    if several:
        return Measured(of_several_labels(truth, answers))
    picture = confusion.draw(*confusion.of_the_commonest(truth, answers, labels))
    return Measured(of_one_label(truth, answers, len(labels)), picture)
