"""The models of a job, each loaded once, with the guards of training: what it delivered, a checkpoint, and its base."""

from __future__ import annotations

from pathlib import Path

import torch

from jobs.disk.rundir import RunDir
from jobs.errors import NotPrepared, Rejected
from jobs.plan import Plan
from worker.training.adapters.lora import ADAPTER, ADAPTER_CONFIG, method_of
from worker.training.adapters.method import Full, Method
from worker.training.checkpoints.checkpoint import WEIGHTS, restore_weights, verify
from worker.training.models.manifest import delivered
from worker.training.network.model import LoadedModel, load
from worker.training.tasks.task import Task

ADAPTER_FOLDER = "adapter"
"""Within `model/`: the adapters that are merged into what is there."""


def load_trained(run: RunDir, task: Task, checkpoint: str | None, device: torch.device) -> LoadedModel:
    """The delivered model, or the weights of a checkpoint such as `step-00000500`; every byte of them is checked.

    Raises Rejected (`no_model`, `model_damaged`, `no_checkpoint`, `checkpoint_damaged`, or a guard's), NotPrepared.
    """
    if checkpoint is None:
        delivered(run)
        return load_delivered(run, task, device)
    folder = run.checkpoints / checkpoint
    if not folder.is_dir():
        raise Rejected(
            f"job {run.id} has no checkpoint {checkpoint}",
            code="no_checkpoint",
            hint=f"`longhaul checkpoints {run.id}` lists those that it has",
        )
    try:
        verify(folder)
    except ValueError as error:
        raise Rejected(
            f"checkpoint {checkpoint} is damaged: {error}", code="checkpoint_damaged", hint="take another one"
        ) from error
    return _with_weights(run, task, folder / WEIGHTS, device)


def load_delivered(run: RunDir, task: Task, device: torch.device, *, unmerged: bool = False) -> LoadedModel:
    """What is in `model/`, once `delivered` has checked it. `unmerged`: adapters beside the base model, where there are
    any. Raises Rejected (a guard's), NotPrepared."""
    adapters = adapters_of(run)
    if adapters is not None and (unmerged or adapters == run.model):
        return _with_weights(run, task, adapters / ADAPTER, device)
    return _load(run.model, task, Full(method_of(run.spec(), run.plan().resolved.dtype).dtype), device)


def adapters_of(run: RunDir) -> Path | None:
    """The folder of the adapters that a job has delivered; None: it trained every weight."""
    folders = (run.model, run.model / ADAPTER_FOLDER)
    return next((folder for folder in folders if (folder / ADAPTER_CONFIG).exists()), None)


def load_base(run: RunDir, task: Task, device: torch.device) -> LoadedModel:
    """The model before training, as *prepare* stored it. Raises NotPrepared, Rejected."""
    plan = run.plan()
    return _load(_stored(plan), task, Full(method_of(run.spec(), plan.resolved.dtype).dtype), device)


def _with_weights(run: RunDir, task: Task, weights: Path, device: torch.device) -> LoadedModel:
    plan = run.plan()
    loaded = _load(_stored(plan), task, method_of(run.spec(), plan.resolved.dtype), device)
    restore_weights(weights, loaded.weights)
    return loaded


def _stored(plan: Plan) -> Path:
    folder = plan.model.folder
    if folder is None or not Path(folder).is_dir():
        raise NotPrepared(
            f"the model before training is not in the model store: {plan.model.source}",
            hint="it must be the same folder, LONGHAUL_MODELS, for all workers; *prepare* fetches the model again "
            "for a clone of the job",
        )
    return Path(folder)


def _load(folder: Path, task: Task, method: Method, device: torch.device) -> LoadedModel:
    """As others open the folder, without the faster parts of training: `transformers` then writes the same."""
    loaded = load(folder, device, task=task, dropout=None, fused=False, activation_checkpointing=0, method=method)
    loaded.model.eval()
    return loaded
