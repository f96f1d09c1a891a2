"""Checkpoints: complete and verified, or absent (architecture.md: Checkpoints).

    checkpoints/step-00000500/  model.safetensors  optimizer.safetensors  state.json  manifest.json

`model.safetensors` holds the weights that are trained: all, or the adapters.

What is called `step-…` was complete once (saving.py); that it still is, is verified before it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open

from jobs.disk.rundir import RunDir
from jobs.errors import NoValidCheckpoint, Rejected
from jobs.evaluation_metrics import cost_of, is_better
from jobs.spec import EarlyStoppingSpec
from jobs.trainer_facts import CheckpointRejected
from jobs.verdict import Verdict
from worker.training.journal import Journal
from worker.training.models.model_files import SINGLE
from worker.training.optimizers.optimizer import Optimizer
from worker.training.steps import order
from worker.training.steps.learning_rate import Correction
from worker.training.steps.randomness import restore_rng
from worker.training.steps.shape import SafeSize
from worker.training.store import fingerprint
from worker.training.window import Window

WEIGHTS = SINGLE
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FILES = (WEIGHTS, OPTIMIZER, STATE)


class TrainState(BaseModel):
    """state.json: where the run stands, apart from the tensors. Losses in nats per target token."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0
    """Steps done."""
    spec_sha256: str
    order: int = 1
    """Version of the order of rows that the run has followed so far."""
    micro_batch: int
    """As planned, in rows of the longest shape."""
    safe: dict[str, SafeSize] = {}
    """What memory has taught, by length bucket."""
    first_loss: float | None = None
    """Validation loss before the first step."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    validation_loss: float | None = None
    """Of exactly these weights; null if they were not evaluated."""
    metrics: dict[str, float] = {}
    """Other metrics of exactly these weights; empty where the loss is null."""
    evaluations: list[EvaluationRecord] = []
    """All so far, in order."""
    verdict: Verdict | None = None
    """Of the same evaluation: whether they are better than the weights before step 1."""
    evaluated: bool = False
    """Whether the evaluation that was due at this step is made."""
    unsaved_s: float = 0.0
    """Seconds of training since the last checkpoint that was due."""
    correction: Correction | None = None
    """The number of steps, where it is no longer the planned one."""
    window: Window = Window()
    """Steps since the last row of metrics."""
    rng: dict[str, Any] = {}


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A verified checkpoint on disk."""

    folder: Path
    state: TrainState


def newest(
    run: RunDir, spec_sha256: str, journal: Journal, *, expected: str | None = None
) -> VerifiedCheckpoint | None:
    """The newest checkpoint that verifies; CheckpointRejected is noted for each newer one, which is renamed.

    None if there is no checkpoint. If none verifies, or the `expected` one is gone and there is no other, raises
    NoValidCheckpoint and leaves them as they are: a person may repair them. Refuses `other_spec`: a checkpoint of
    another specification is no place to resume from.
    """
    defects: dict[Path, ValueError] = {}
    for folder in newest_first(run):
        journal.progress()
        try:
            state = verify(folder, progress=journal.progress)
        except ValueError as error:
            defects[folder] = error
            continue
        if state.spec_sha256 != spec_sha256:
            raise Rejected(
                f"{folder.name} was made for another specification than spec.json now is",
                code="other_spec",
                hint=f"put spec.json back as it was; or train what it says now: longhaul clone {run.id} --resume",
            )
        for damaged, defect in defects.items():
            _reject(run, damaged, defect, journal)
        return VerifiedCheckpoint(folder, state)
    if defects or expected is not None:
        raise _none_valid(run, defects, expected)
    return None


def _none_valid(run: RunDir, defects: Mapping[Path, ValueError], expected: str | None) -> NoValidCheckpoint:
    found = [f"{folder.relative_to(run.path)}: {error}" for folder, error in defects.items()]
    if expected is not None and run.path / expected not in defects:
        found.append(f"{expected} is gone")
    source = run.spec().resume_from
    again = "" if source is None else f"; or begin with the checkpoint of {source} once more: longhaul clone {run.id}"
    return NoValidCheckpoint(
        f"there is no valid checkpoint to resume from: {'; '.join(found)}",
        hint=f"bring a checkpoint back from a backup, into {run.id}/checkpoints in the runs directory, then: longhaul "
        f"resume {run.id}; or give up what was trained and begin again at step 0: longhaul resume {run.id} "
        f"--from-scratch{again}",
    )


def best(
    run: RunDir, metric: str, journal: Journal, *, verified: VerifiedCheckpoint | None = None
) -> VerifiedCheckpoint | None:
    """The best evaluated checkpoint by this metric that verifies; of equals the earliest. Each better one is renamed,
    and CheckpointRejected noted. `verified`: one that need not be read again."""
    for folder in best_first(newest_first(run), metric):
        if verified is not None and folder == verified.folder:
            return verified
        try:
            return VerifiedCheckpoint(folder, verify(folder, progress=journal.progress))
        except ValueError as error:
            _reject(run, folder, error, journal)
    return None


def verify(folder: Path, *, thorough: bool = True, progress: Callable[[], object] = lambda: None) -> TrainState:
    """The state in a checkpoint. Raises ValueError, saying what is wrong, unless every file is there and whole.

    `thorough`: every byte is read (`progress` is called meanwhile); otherwise only sizes are compared.
    """
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{MANIFEST} is missing or damaged") from None
    for name in FILES:
        if name not in files:
            raise ValueError(f"{name} is not in {MANIFEST}")
        try:
            size = (folder / name).stat().st_size
            if size != files[name]["bytes"]:
                raise ValueError(f"{name} has {size} bytes, not {files[name]['bytes']}")
            if thorough and fingerprint(folder / name, progress) != files[name]["sha256"]:
                raise ValueError(f"{name} is damaged: its sha256 is another")
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    try:
        return TrainState.model_validate_json((folder / STATE).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{STATE} does not fit this version: {error.errors()[0]['msg']}") from None


def check_order(state: TrainState) -> None:
    """Rows would be seen twice, and others never, if the rest of a run followed another order than its beginning."""
    if state.order != order.VERSION:
        raise Rejected(
            f"this run began with rows in order {state.order}, and this version of Longhaul orders them as "
            f"{order.VERSION}",
            code="other_order",
            hint="submit the job again, or continue with the version that began it; its checkpoints are kept",
        )


def restore(checkpoint: VerifiedCheckpoint, weights: Mapping[str, torch.Tensor], optimizer: Optimizer) -> None:
    """Copy weights, optimizer states and RNG states in. The tensors of the model, `weights`, stay where they are."""
    restore_weights(checkpoint.folder / WEIGHTS, weights)
    with safe_open(checkpoint.folder / OPTIMIZER, framework="pt") as file:
        optimizer.load_state_dict(_Lazy(file))
    restore_rng(checkpoint.state.rng)


@torch.no_grad()
def restore_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of a file in. Raises Rejected (`checkpoint_weights`) unless they are exactly these."""
    with safe_open(path, framework="pt") as file:
        wrong = sorted(weights.keys() ^ set(file.keys()))
        wrong = wrong or [name for name in weights if list(weights[name].shape) != file.get_slice(name).get_shape()]
        if wrong:
            raise Rejected(
                f"{len(wrong)} weights of {path.parent.name} do not belong to the model: {', '.join(wrong[:5])}",
                code="checkpoint_weights",
                hint="the model folder was changed after the job began",
            )
        for name, tensor in weights.items():
            tensor.copy_(file.get_tensor(name))


class _Lazy(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is asked for: states of a large model are tens of GiB."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = sorted(file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# -- folders -------------------------------------------------------------------------------------------------


def folder_of(run: RunDir, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def newest_first(run: RunDir) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*"), reverse=True)


def best_first(folders: list[Path], metric: str) -> dict[Path, float]:
    """Those that were evaluated by this metric, with their costs (lower is better), of equals the earliest first;
    `folders` are the newest first."""
    costs = {folder: cost for folder in reversed(folders) if (cost := cost_in(folder, metric)) is not None}
    return dict(sorted(costs.items(), key=itemgetter(1)))  # equals stay in their order


def cost_in(folder: Path, metric: str) -> float | None:
    """By this metric, lower is better; None where the weights were not evaluated by it."""
    try:
        state = json.loads((folder / STATE).read_bytes())
        cost = cost_of(metric, state["validation_loss"], state.get("metrics", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: it will be rejected if it is ever asked for
    return cost if isinstance(cost, float) else None


def _reject(run: RunDir, folder: Path, error: ValueError, journal: Journal) -> None:
    journal.note(CheckpointRejected(path=str(folder.relative_to(run.path)), message=str(error)))
    # Renamed, so that it is neither counted among the kept ones nor read again.
    renamed = folder.with_name(f"rejected-{folder.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(folder, renamed)


# -- the evaluations so far ----------------------------------------------------------------------------------


class EvaluationRecord(BaseModel):
    """What one evaluation measured. Checkpoints hold it: a run that was killed decides as one that was not."""

    model_config = ConfigDict(extra="forbid")

    step: int
    loss: float
    metrics: dict[str, float] = {}

    def cost(self, metric: str) -> float | None:
        """By this metric, lower is better; None where it was not computed."""
        return cost_of(metric, self.loss, self.metrics)


def newest_is_best(evaluations: Sequence[EvaluationRecord], metric: str) -> bool:
    """Whether the newest one is better than every other."""
    *before, newest = (each.cost(metric) for each in evaluations)
    return is_better(newest, min((each for each in before if each is not None), default=None))


def better_step(evaluations: Sequence[EvaluationRecord], metric: str, than: float) -> int | None:
    """The step whose evaluation is the best, where that is better than this cost; None: there is none. There is no
    checkpoint of step 0, so it does not count."""
    found = None
    for each in evaluations:
        if each.step and (cost := each.cost(metric)) is not None and is_better(cost, than):
            found, than = each.step, cost
    return found


def stops(evaluations: Sequence[EvaluationRecord], rule: EarlyStoppingSpec, metric: str) -> bool:
    """Whether so many evaluations in a row were not better, by more than `min_delta`, than the best before them."""
    best, waited = None, 0
    for each in evaluations:
        if (cost := each.cost(metric)) is None:  # of a version that did not compute it
            continue
        better = best is None or cost < best - rule.min_delta
        best, waited = (cost, 0) if better else (best, waited + 1)
    return waited >= rule.patience
