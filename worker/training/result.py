"""What a job leaves in `model/`: the trained weights, what opens them, and a page about them."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from jobs.attempt import TrainResult
from jobs.errors import DiskFull, Rejected
from jobs.text.units import bytes_alike, format_change, format_number
from worker.training.adapters.lora import Widened
from worker.training.adapters.merging import computed_merged
from worker.training.adapters.method import Method
from worker.training.checkpoints.checkpoint import WEIGHTS, VerifiedCheckpoint, restore_weights
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.context import TrainingContext
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.machine.usage import Cache
from worker.training.models.manifest import SealedFile, read_manifest
from worker.training.network.model import LoadedModel, write_model
from worker.training.readme import base_model, generation_config, readme
from worker.training.tasks.task import Batch
from worker.training.trained import ADAPTER_FOLDER

Parts = Mapping[str, tuple[Method, Callable[[Path], SealedFile]]]


def write_result(context: TrainingContext, kept: VerifiedCheckpoint | None, result: TrainResult) -> None:
    """Write the weights of `kept`, or None: those in memory. `result` is what is known of them.

    Raises BaseChanged where weights have changed that are not trained, and DiskFull.
    """
    run, loaded = context.run, context.loaded
    loaded.check_untrained()
    free, needed = shutil.disk_usage(run.path).free, int(1.1 * loaded.result_bytes)
    if free < needed:
        model, room = bytes_alike(needed, free)
        raise DiskFull(
            f"the final model needs {model}, and {room} are free",
            hint="make room in the runs directory",
        )
    method, merged = loaded.method, loaded.method.merged
    named = loaded.delivered(method)

    def write_trained(file: Path) -> SealedFile:
        if kept is not None and named.keys() == loaded.weights.keys():
            shutil.copyfile(kept.folder / WEIGHTS, file)
            return read_manifest(kept.folder)[WEIGHTS]
        if kept is not None:  # files hold experts one by one
            restore_weights(kept.folder / WEIGHTS, loaded.weights)
        return write_tensors(file, named, context.journal)

    def write(parts: Parts, delivered: Method, remark: str | None = None) -> None:
        write_model(
            loaded,
            run.model,
            parts,
            fence=context.journal.fence,
            base=base_model(context.plan),
            generation=generation_config(context),
            readme=readme(context, delivered, result, remark),
        )

    write({".": (method, write_trained)}, method)
    if merged is not None:  # only now: where the check refuses them, the adapters are there
        if kept is not None:
            restore_weights(kept.folder / WEIGHTS, loaded.weights)
        remark = check_merged(loaded, context.data, context.journal, context.cache).text

        def write_merged(file: Path) -> SealedFile:
            return write_tensors(file, loaded.delivered(merged), context.journal)

        write({".": (merged, write_merged), ADAPTER_FOLDER: (method, write_trained)}, merged, remark)


# -- merge check -------------------------------------------------------------------------------------------------------
# Whether merged weights are those of the model with its adapters: asked before they are delivered.
#
# Held-out rows go through both, in fp32 (on a CPU float64), with no copy of the model: the mean log-probability of
# their target tokens, or labels, must be the same (of scores the mean squared error). What rounding the merged weights
# changes, before they are written, is measured with them: so much the result departs from what was trained and
# evaluated.

LIMIT = 1e-6
"""Nats a token, or a row of labels, at most, between the model with adapters and the one with merged weights, before
these are rounded; of scores above 1, times the square of the largest."""
ROWS = 16
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ADAPTERS_STAY = "model/ holds the adapters, which are as they were trained; the merged model was not written"
Float64 = npt.NDArray[np.float64]
log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class MergeCheck:
    """Differences of the mean log-probability of a held-out token, or of a label (nats); of a regression, of the mean
    squared error."""

    dtype: torch.dtype
    """Of the weights that are written."""
    unit: str
    """As in `Task`."""
    squares: bool
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
            f"merged in {_SHORT[self.dtype]}: over {self.rows} rows the {self.figure} changes "
            f"by {format_change(self.rounded, 2)}{self.nats} (of one row by {format_number(self.rounded_worst, 2)} at "
            f"most), and by {format_number(self.exact, 1)} "
            "before the weights are rounded"
        )

    @property
    def figure(self) -> str:
        """What is compared."""
        return f"mean {'squared error' if self.squares else 'log-probability'} of a {self.unit}"

    @property
    def nats(self) -> str:
        """Behind a figure."""
        return "" if self.squares else " nats"


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
        squares=loaded.task.squares,
        rows=len(batches),
        exact=abs(float((merged - apart).sum() / tokens.sum())),
        rounded=float((rounded - apart).sum() / tokens.sum()),
        rounded_worst=float(by_row.max()),
    )
    log.info("%s", found.text)
    if not math.isfinite(found.rounded):
        raise Rejected(
            f"rounded to {_SHORT[found.dtype]}, the merged weights give no {found.figure}: they are out of its range",
            code="merge_differs",
            param="method.merge",
            hint=_ADAPTERS_STAY,
        )
    scores = data.manifest.report.scores
    limit = LIMIT * max(1.0, scores.low**2, scores.high**2) if scores else LIMIT
    if not found.exact <= limit:  # also where it is no number
        raise Rejected(
            f"with merged weights the {found.figure} is another by {format_number(found.exact, 2)}{found.nats}, and "
            f"{limit:g} is the most that is rounding",
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
