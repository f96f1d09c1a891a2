"""Whether merged weights are those of the model with its adapters: asked before they are delivered.

Held-out rows go through both, in fp32 (on a CPU float64), with no copy of the model: the mean log-probability of their
target tokens, or labels, must be the same. What rounding the merged weights changes, before they are written, is
measured with them: so much the result departs from what was trained and evaluated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jobs.errors import Rejected
from jobs.text.units import format_change, format_number
from worker.training.adapters.merging import computed_merged
from worker.training.adapters.wide import Widened
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.machine.usage import Cache
from worker.training.network.model import LoadedModel
from worker.training.tasks.task import Batch

LIMIT = 1e-6
"""Nats a token, or a row of labels, at most, between the model with adapters and the one with merged weights, before
these are rounded."""
ROWS = 16
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ADAPTERS_STAY = "model/ holds the adapters, which are as they were trained; the merged model was not written"
Float64 = npt.NDArray[np.float64]
log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class MergeCheck:
    """Differences of the mean log-probability of a held-out token, or of a label (nats)."""

    dtype: torch.dtype
    """Of the weights that are written."""
    unit: str
    """As in `Task`."""
    rows: int
    exact: float
    """Of weights merged in wide numbers."""
    rounded: float
    """Of the weights as they are written."""
    rounded_worst: float
    """The same of the row for which it is largest."""

    @property
    def text(self) -> str:
        """For people."""
        return (
            f"merged in {_SHORT[self.dtype]}: over {self.rows} rows the mean log-probability of a {self.unit} changes "
            f"by {format_change(self.rounded, 2)} nats (of one row by {format_number(self.rounded_worst, 2)} at "
            f"most), and by {format_number(self.exact, 1)} "
            "before the weights are rounded"
        )


def check_merged(loaded: LoadedModel, data: PreparedDataset, journal: Journal, cache: Cache) -> MergeCheck:
    """Compare the two, for the adapters that are in memory. Raises Rejected (`merge_differs`)."""
    rows = data.validation if len(data.validation) else data.train
    chosen = [np.array([row]) for row in range(min(ROWS, len(rows)))]
    batches = loaded.task.limit(rows, 1).batches(rows, chosen, loaded.pad_id)
    cache.clear()
    training = loaded.model.training
    loaded.model.eval()
    try:
        apart = likelihoods(loaded, batches, journal)
        with computed_merged(loaded.model, rounded=False):
            merged = likelihoods(loaded, batches, journal)
        with computed_merged(loaded.model, rounded=True):
            rounded = likelihoods(loaded, batches, journal)
    finally:
        loaded.model.train(training)
    tokens = np.array([batch.target_tokens for batch in batches])
    by_row = np.abs(rounded - apart) / tokens
    found = MergeCheck(
        dtype=loaded.method.dtype,
        unit=loaded.task.unit,
        rows=len(batches),
        exact=abs(float((merged - apart).sum() / tokens.sum())),
        rounded=float((rounded - apart).sum() / tokens.sum()),
        rounded_worst=float(by_row.max()),
    )
    log.info("%s", found.text)
    if not math.isfinite(found.rounded):
        raise Rejected(
            f"rounded to {_SHORT[found.dtype]}, the merged weights give no log-probability: they are out of its range",
            code="merge_differs",
            param="method.merge",
            hint=_ADAPTERS_STAY,
        )
    if not found.exact <= LIMIT:  # also where it is no number
        raise Rejected(
            f"with merged weights the mean log-probability of a {found.unit} is another by "
            f"{format_number(found.exact, 2)} nats, and "
            f"{LIMIT:g} is the most that is rounding",
            code="merge_differs",
            param="method.merge",
            hint=_ADAPTERS_STAY,
        )
    return found


@torch.no_grad()
def likelihoods(loaded: LoadedModel, batches: Sequence[Batch], journal: Journal) -> Float64:
    """[batches] log-likelihoods of the targets, in wide numbers."""
    found = []
    with Widened(wide_dtype(loaded)):
        for batch in batches:
            found.append(-batch.loss_sum(loaded.model).item())
            journal.progress()
    return np.array(found)


def wide_dtype(loaded: LoadedModel) -> torch.dtype:
    """The attention kernels of a GPU have no float64."""
    return torch.float64 if loaded.model.device.type == "cpu" else torch.float32
