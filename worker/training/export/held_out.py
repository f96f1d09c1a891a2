"""Held-out rows, and the log-probability of each of their target tokens: by what an export is compared to its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from worker.training.dataset.data import PreparedDataset

ROWS = 16
MOST_TOKENS = 64
"""Target tokens of a row that are compared: the first ones."""
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeldOutRow:
    """One row, as tokens."""

    input: tuple[int, ...]
    """What the model reads."""
    target: tuple[int, ...]
    """Tokens whose log-probabilities are compared; of a classifier, the number of its label."""
    places: tuple[int, ...] | None
    """Of a causal model, the positions of the target's tokens in `input`; else None: the target is apart."""


def held_out(task: str, data: PreparedDataset) -> list[HeldOutRow]:
    """The first rows that were held out; where none were, of those that were trained on."""
    rows = data.validation if len(data.validation) else data.train
    found = []
    for number in range(min(ROWS, len(rows))):
        tokens, target = rows.input(number).tolist(), rows.target(number).tolist()[:MOST_TOKENS]
        if task == "causal":
            tokens = tokens[: target[-1] + 1]
            found.append(HeldOutRow(tuple(tokens), tuple(tokens[place] for place in target), tuple(target)))
        else:
            found.append(HeldOutRow(tuple(tokens), tuple(target), None))
    return found


@torch.inference_mode()
def log_probabilities(
    model: nn.Module, task: str, rows: Sequence[HeldOutRow], progress: Callable[[], None]
) -> list[Float64]:
    """[rows] of [tokens]: of each target token, by transformers' own forward pass of each row alone."""
    model.eval()
    found = []
    for row in rows:
        ids, target = torch.tensor([row.input]), torch.tensor(row.target)
        if task == "seq2seq":
            logits = model(input_ids=ids, labels=target[None]).logits[0]
        elif row.places is not None:
            logits = model(input_ids=ids).logits[0, torch.tensor(row.places) - 1]
        else:
            logits = model(input_ids=ids).logits
        chosen = logits.double().log_softmax(-1).gather(1, target[:, None])
        found.append(chosen[:, 0].numpy())
        progress()
    return found


def absolute_differences(one: Sequence[Float64], other: Sequence[Float64]) -> Float64:
    """[tokens of all rows]."""
    return np.abs(np.concatenate(one) - np.concatenate(other))
