"""Other ways to train the model of a job than the one that was planned: what they would need, and which is best."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from jobs.memory_plan import MemoryPlan, OptimizerName
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training.adapters.lora import method_of
from worker.training.machine.device import has_native_bf16
from worker.training.models.model_files import read_config
from worker.training.planning.budget import Budget
from worker.training.planning.ladder import Setting
from worker.training.planning.memory_plan import plan_memory
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.registry import task_of

LIGHTER: tuple[OptimizerName, ...] = ("adamw_8bit", "adafactor")
"""Optimizers with fewer states than `adamw`, in order."""


class Alternatives:
    """Predictions and new plans for the model of a job. Each is made when it is first needed, and takes seconds."""

    def __init__(self, spec: JobSpec, plan: Plan, device: torch.device, traces: Path | None = None) -> None:
        """`traces`: as of `Predictor`."""
        self._traces = traces
        self._spec = spec
        self._plan = plan
        self._device = device
        self._task = task_of(spec, plan.task, plan.data)

    def parts(self, shape: MicroBatchShape, setting: Setting) -> dict[str, int]:
        """Bytes by category at the peak of a step with micro-batches of this shape, CUDA context included."""
        memory = self._plan.memory
        context = 0 if memory is None else memory.parts.get("context", 0)
        parts = self._predictor.predict(shape, setting).parts
        self._predictor.keep()
        return {**parts, "context": context}

    def uncompiled(self, activation_checkpointing: int) -> str | None:
        """As `Predictor.uncompiled`."""
        return self._predictor.uncompiled(activation_checkpointing)

    def replan(self, budget: Budget) -> MemoryPlan:
        """The best setting within another budget, for the rows there are. The optimizer stays. Raises Rejected."""
        memory = self._plan.memory
        assert memory is not None, "there is a plan to replace"
        longest = memory.input_tokens, memory.target_tokens
        return plan_memory(
            self._spec,
            self._task,
            self._config,
            longest,
            device="cuda",
            budget=budget,
            optimizer=self._plan.resolved.optimizer,
            dtype=self._plan.resolved.dtype,
            gpus=self._plan.resolved.gpus,
        )

    @functools.cached_property
    def _config(self) -> dict[str, object]:
        folder = Path(self._plan.model.folder or "")
        return read_config(folder, folder.name)

    @functools.cached_property
    def _predictor(self) -> Predictor:
        training = self._spec.training
        return Predictor(
            self._config,
            task=self._task,
            device="cuda" if self._device.type == "cuda" else "cpu",
            fused=self._spec.speed.fused,
            dropout=training.dropout,
            training=training,
            flash=has_native_bf16(self._device),
            traces=self._traces,
            method=method_of(self._spec, self._plan.resolved.dtype),
        )
