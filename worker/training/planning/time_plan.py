"""The time that a job needs, predicted from the lengths of its rows (jobs/plan.py turns FLOPs into time)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.gpus import REFERENCE, GpuFacts
from jobs.plan import EvaluationTime, Plan, make_time_plan, rows_of_steps, warmup_steps
from jobs.spec import DataSpec, JobSpec
from worker.training.adapters.lora import method_of
from worker.training.planning.budget import texts_together
from worker.training.settings import TrainerSettings
from worker.training.steps.shape import Lengths
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Task

DECODED_LAYER_S = 1e-3
"""Seconds that a token of `generate` takes for each layer of a decoder: Python ahead of the GPU. A typical figure,
not measured here."""


@dataclass(frozen=True)
class RowLengths:
    """[rows] tokens of inputs and targets: of all training rows, or of some that stand for them."""

    inputs: Lengths
    targets: Lengths
    estimated: bool = False

    @classmethod
    def guessed(cls, characters: Sequence[tuple[int, int]], data: DataSpec, task: Task) -> RowLengths:
        """Guessed from the numbers of characters while there is no tokenizer; truncated as the tokens will be."""
        return cls(*task.guessed_lengths(characters, data), estimated=True)


def with_time(
    plan: Plan,
    spec: JobSpec,
    config: Mapping[str, Any],
    lengths: RowLengths,
    settings: TrainerSettings,
    *,
    done: int = 0,
) -> Plan:
    """The plan with its time: steps over rows like these, on the GPU of the settings.

    `config`: the model's config.json. `done`: steps that another job did. Raises Rejected (`bad_config`).
    """
    if spec.kind == "evaluate":  # one pass without gradients: minutes
        return plan
    assert len(lengths.inputs), "a job has rows"
    left = max(0, plan.steps - done) / plan.steps
    scale = left * rows_of_steps(spec, plan.data, plan.steps) / len(lengths.inputs)
    task = task_of(spec, plan.task, plan.data)
    again = task.recomputed_flops(config, plan.resolved.activation_checkpointing)
    trained = plan.memory.trained_parameters if plan.memory else 0
    method = method_of(spec, plan.resolved.dtype)
    whole = method.flops(task.flops(config), trained, task.layout(config))
    flops = whole.rows(lengths.inputs, lengths.targets)
    time = make_time_plan(
        model_flops=scale * flops,
        recomputed_flops=scale * again.forward(lengths.inputs, lengths.targets),
        estimated=lengths.estimated,
        device=settings.device,
        gpu=settings.gpu,
        parameters=plan.model.parameters,
        compiled=plan.resolved.compile,
        step_flops=spec.training.batch_size * flops / len(lengths.inputs),
        updates_s=left * plan.steps * waits_s(plan, spec, settings),
        gpus=plan.resolved.gpus,
    )
    planned = within_hours(plan.model_copy(update={"time": time}), spec, done)
    return with_evaluations(planned, spec, config, lengths, task, settings, done)


def waits_s(plan: Plan, spec: JobSpec, settings: TrainerSettings) -> float:
    """Seconds that a GPU waits in each step: for the host, where that updates the weights; for other GPUs."""
    if plan.memory is None:
        return 0.0
    gpu, trained = settings.gpu or REFERENCE, plan.memory.trained_parameters
    offloads = plan.memory.host is not None and plan.memory.host.optimizer_bytes > 0
    update = gpu.offloaded_update_s(trained, 2) if offloads else 0.0
    return update + gpu.exchange_s(trained, plan.resolved.gpus)


def within_hours(plan: Plan, spec: JobSpec, done: int) -> Plan:
    """The plan with as many steps as `training.max_hours` leaves time for, by the pace that is expected on the GPU.

    Unchanged where no GPU's speed is known: the trainer then measures it.
    """
    hours, time = spec.training.max_hours, plan.time
    if hours is None or time is None or time.assumed or time.hours_expected is None or time.hours_expected <= hours:
        return plan
    left = plan.steps - done
    fitting = max(1, math.floor(left * hours / time.hours_expected))
    steps = done + fitting
    return plan.model_copy(
        update={
            "steps": steps,
            "limited_by": "max_hours",
            "warmup_steps": warmup_steps(spec, steps),
            "time": time.times(fitting / left),
        }
    )


def with_evaluations(
    plan: Plan,
    spec: JobSpec,
    config: Mapping[str, Any],
    lengths: RowLengths,
    task: Task,
    settings: TrainerSettings,
    done: int,
) -> Plan:
    """The plan with what its evaluations take; unchanged where there are none, or no time is expected."""
    time = plan.time
    if time is None or not time.hours_expected or plan.data.validation_rows == 0:
        return plan
    passes_s = 3600 * time.hours_expected - (plan.steps - done) * waits_s(plan, spec, settings)
    rate = (time.model_flops + time.recomputed_flops) / passes_s / time.gpus  # one GPU evaluates
    seconds = evaluation_s(plan, spec, config, lengths, task, rate, settings.gpu or REFERENCE)
    count = left_of(plan.steps, spec.evaluation.every_steps, done)
    spent = count * seconds
    expected = EvaluationTime(count=count, seconds=seconds, share=spent / (spent + 3600 * time.hours_expected))
    return plan.model_copy(update={"time": time.model_copy(update={"evaluations": expected})})


def left_of(steps: int, every: int, done: int) -> int:
    """Evaluations of a run that has done so many of its steps: at every n-th from there on, and at the last."""
    return steps // every - (done - 1) // every + (steps % every != 0)


def evaluation_s(
    plan: Plan, spec: JobSpec, config: Mapping[str, Any], lengths: RowLengths, task: Task, rate: float, gpu: GpuFacts
) -> float:
    """Seconds of an evaluation, at so many FLOP/s; validation rows are taken to be as long as the training rows."""
    asked, rows = spec.evaluation, min(spec.evaluation.max_rows, plan.data.validation_rows)
    once = rows * task.flops(config).forward(lengths.inputs, lengths.targets) / len(lengths.inputs) / rate
    if task.has_labels:
        return once
    scored = asked.scored_rows if any(metric.of_texts for metric in asked.measured(task.metrics)) else 0
    tokens = int(np.quantile(lengths.targets, 0.99)) if asked.sample_tokens == "auto" else asked.sample_tokens
    together = texts_together(plan.memory, task, config, tokens, plan.resolved.micro_batch)
    batches = math.ceil(min(rows, max(scored, asked.samples)) / together)
    layers = task.layers(config) / (2 if task.targets_apart else 1)
    reading = 2 * plan.model.parameters / (gpu.memory_bandwidth or REFERENCE.memory_bandwidth or math.inf)
    return once + batches * tokens * max(reading, layers * DECODED_LAYER_S)
