"""What a loop or an evaluation works with, around a model that a test has made itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from jobs.disk.rundir import RunDir
from jobs.plan import DataPlan, ModelPlan, Plan, make_plan
from jobs.spec import JobSpec
from tests.training.attempts import StopAt
from worker.training.adapters.lora import method_of
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.context import TrainingContext
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.network.model import LoadedModel
from worker.training.optimizers.optimizer import Optimizer
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Task


def as_loaded(model: PreTrainedModel, spec: JobSpec, task: Task | None = None) -> LoadedModel:
    """A model that no file was loaded for; `task` None: a T5."""
    parameters = list(model.parameters())
    return LoadedModel(
        task=task or task_of(spec, "seq2seq"),
        model=model,
        tokenizer=None,  # type: ignore[arg-type]  # nothing is generated
        folder=Path(),
        config=model.config.to_dict(),
        pointers={},
        parameters=sum(each.numel() for each in parameters),
        parameter_bytes=sum(each.nbytes for each in parameters),
        seconds=0.0,
        peak_ratio=1.0,
        method=method_of(spec, "bfloat16"),
    )


def plan_of(spec: JobSpec, rows: int) -> Plan:
    """For so many training rows; without memory."""
    return make_plan(spec, ModelPlan(source="x", parameters=1), DataPlan(train="x", input="x", target="x", rows=rows))


def training_context(
    folder: Path,
    loaded: LoadedModel,
    data: PreparedDataset,
    spec: JobSpec,
    optimizer: Optimizer,
    journal: Journal,
    *,
    plan: Plan | None = None,
    **more: Any,
) -> TrainingContext:
    """Of a first attempt, before its first step. `folder` becomes its run directory."""
    plan = plan or plan_of(spec, len(data.train))
    others: dict[str, Any] = {
        "stop": StopAt(),
        "monitor": ProcessMonitor.of(torch.device("cpu")),
        "state": TrainState(spec_sha256=spec.sha256(), micro_batch=plan.resolved.micro_batch),
    }
    return TrainingContext.of(
        RunDir(folder), spec, plan, attempt=1, journal=journal, data=data, loaded=loaded, optimizer=optimizer,
        **others | more,
    )  # fmt: skip
