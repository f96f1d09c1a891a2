"""The memory plan of a job: what it needs at its peak, what it may use, and which setting it trains with (ADR 0003)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jobs.errors import DoesNotFit, Rejected
from jobs.gpus import HOST_ROOM
from jobs.memory_plan import Candidate, Device, DType, MemoryPlan, OptimizerName, describe
from jobs.spec import JobSpec
from jobs.text.units import GIB, bytes_alike, format_bytes, format_duration
from worker.training.adapters.lora import method_of
from worker.training.optimizers.adamw_offload import LOAD_BYTES, LOADS, STATE_BYTES
from worker.training.planning.budget import HOST_RESERVE, Budget, plan_disk, plan_host
from worker.training.planning.ladder import SMALLEST, WORTH, Fixed, Ladder, ModelSize, RowTime, choice
from worker.training.planning.predictor import Predictor
from worker.training.tasks.task import Task

CONTEXT_BYTES = int(0.8 * GIB)
"""Bytes that a CUDA process takes besides what torch allocates: the context, with the kernels of all libraries."""
EXCHANGE_BYTES = GIB // 2
"""Of each GPU, where several train a job together: what NCCL takes for its channels, and 32 MiB for gradients on their
way. Assumed, not measured."""
CPU_ROWS = 8
"""Larger micro-batches are no faster on a CPU (docs/measurements.md), except those of small models."""
CPU_FLOPS = 2.5e10
"""Forward and backward: a micro-batch with less work than this spends most of its time between the operations."""


def plan_memory(
    spec: JobSpec,
    task: Task,
    config: Mapping[str, Any],
    longest: tuple[int, int],
    *,
    device: Device,
    budget: Budget,
    run: Path | None = None,
    traces: Path | None = None,
    optimizer: OptimizerName | None = None,
    dtype: DType = "bfloat16",
    gpus: int | None = None,
    offload: bool = True,
    progress: Callable[[], object] = lambda: None,
) -> MemoryPlan:
    """The best setting that fits the budget. Takes some seconds for a large model, on the CPU, without weights.

    `config`: the model's config.json. `longest`: tokens of the longest input and target, rounded as `batches` does.
    `run`: where checkpoints will be written; None: the disk is not looked at. `traces`: as of `Predictor`.
    `optimizer`: one whose states the checkpoints of the run hold: it is kept, unless the job sets another that takes
    them. None: there is no run yet. `dtype`: of the model. `gpus`: that train together; None: as the job says.
    `offload`: states may be in the host's memory, where the job leaves that open. `progress` is called
    before each trace.

    Raises DoesNotFit (with the numbers and the nearest setting that fits), Rejected (`bad_config`) and DiskFull
    (`no_room`).
    """
    started = time.monotonic()
    inputs, targets = longest
    progress()
    method, training = method_of(spec, dtype), spec.training
    predictor = Predictor(
        config,
        task=task,
        device=device,
        fused=spec.speed.fused,
        dropout=training.dropout,
        training=training,
        method=method,
        flash=budget.gpu is None or budget.gpu.native_bf16,
        traces=traces,
    )
    size = predictor.size
    fixed = fixed_by(spec, optimizer)
    flops = method.flops(task.flops(config), size.trained, task.layout(config))
    most_on_cpu = max(CPU_ROWS, int(CPU_FLOPS / flops.rows(np.array([inputs]), np.array([targets]))))
    offloaded = offloaded_bytes(size) if device == "cuda" else 0
    host = None if budget.gpu is None else budget.gpu.host_memory_bytes
    if fixed.optimizer == "adamw_offload" and host is not None and offloaded + HOST_ROOM > host:
        raise no_host_memory(offloaded, host)
    count = gpus or spec.resources.gpus
    if fixed.optimizer == "adamw_offload" and count > 1:  # begun with it on one GPU
        raise Rejected(
            "the run began with adamw_offload, which goes with one GPU alone",
            code="offload_on_several_gpus",
            param="resources.gpus",
            hint="leave resources.gpus at 1",
        )

    share = math.ceil(spec.training.batch_size / count)
    pace = RowTime(task, config, flops, inputs, targets, size, budget.gpu, share)
    ladder = Ladder(
        predictor,
        pace,
        limit=budget.limit,
        context=(CONTEXT_BYTES + (EXCHANGE_BYTES if count > 1 else 0)) if device == "cuda" else 0,
        cap=share if device == "cuda" else min(share, most_on_cpu),
        offload=offload and count == 1 and offloaded > 0 and host is not None and offloaded + HOST_RESERVE <= host,
        progress=progress,
    )
    candidates = ladder.walk(fixed)
    fitting = choice(candidates)
    chosen = fitting or ladder.smallest(fixed)
    on_host = offloaded if chosen.optimizer == "adamw_offload" else 0
    states = 8 * size.trained + size.master_bytes if on_host else predictor.states(chosen.optimizer)
    kept = size.trained_bytes + states
    delivered = method.result_bytes(size.trained_bytes, size.parameter_bytes)
    least = None
    if device == "cuda":  # where a smaller GPU takes the job, its attempt walks the ladder again for that one
        smallest = ladder.smallest(replace(fixed, optimizer=chosen.optimizer))
        least = min(chosen, smallest, key=lambda each: each.peak_bytes)
    plan = MemoryPlan(
        device=device,
        gpu=budget.gpu_name,
        budget_bytes=budget.bytes,
        budget_source=budget.source,
        margin_bytes=budget.margin,
        input_tokens=inputs,
        target_tokens=targets,
        micro_batch=chosen.micro_batch,
        activation_checkpointing=chosen.activation_checkpointing,
        optimizer=chosen.optimizer,
        compile=spec.kind == "train"
        and spec.speed.compiled_on(device)
        and predictor.uncompiled(chosen.activation_checkpointing) is None,
        dtype=dtype,
        parts=chosen.parts,
        gpus=count,
        trained_parameters=size.trained,
        evaluation=spec.kind == "evaluate",
        peak_bytes=chosen.peak_bytes,
        least_bytes=None if least is None else least.peak_bytes,
        least_parts={} if least is None else least.parts,
        candidates=candidates,
        why=why(chosen, candidates, fixed, pace) if fitting else "nothing fits: this is the smallest setting",
        host=plan_host(kept, on_host, host if on_host else None),
        disk=None if run is None or not fitting else plan_disk(run, spec, kept, delivered),
        seconds=time.monotonic() - started,
    )
    predictor.keep()
    if not fitting:
        raise does_not_fit(plan, ladder, fixed, budget, task)
    return plan


def fixed_by(spec: JobSpec, begun: OptimizerName | None) -> Fixed:
    """The settings that the ladder may not change; `begun`: an optimizer with the states that the run has."""
    memory = spec.memory
    asked = None if memory.optimizer == "auto" else memory.optimizer
    rows = None if memory.micro_batch == "auto" else min(memory.micro_batch, spec.training.batch_size)
    if spec.kind == "evaluate":
        return Fixed(SMALLEST, 0, rows, evaluation=True)
    return Fixed(
        optimizer=asked or begun,
        begun=begun is not None,
        activation_checkpointing=None if memory.activation_checkpointing == "auto" else memory.activation_checkpointing,
        micro_batch=rows,
    )


def offloaded_bytes(size: ModelSize) -> int:
    """Of the host's memory, what `adamw_offload` takes: states, and buffers for gradients and weights."""
    return STATE_BYTES * size.trained + 2 * LOADS * min(LOAD_BYTES, size.trained_bytes)


def no_host_memory(needed: int, there: int) -> Rejected:
    """The error of a job whose optimizer states the host cannot hold."""
    states, has = bytes_alike(needed, there)
    return Rejected(
        f"the states of adamw_offload take {states} of the host's memory, and the host has {has} in all",
        code="host_memory",
        param="memory.optimizer",
        hint="set memory.optimizer: adamw_8bit or adafactor, or method: lora, which trains fewer weights",
    )


def why(chosen: Candidate, candidates: list[Candidate], fixed: Fixed, pace: RowTime) -> str:
    """In words: which better optimizers do not fit, what the job sets, and what the choice costs."""
    if fixed.evaluation:
        return f"micro-batch {chosen.micro_batch} is the largest that fits" if not fixed.keys else "as the job says"
    parts = []
    for optimizer, worth in WORTH.items():
        peaks = [each for each in candidates if each.optimizer == optimizer]
        if worth >= WORTH[chosen.optimizer] and peaks and not any(each.fits for each in peaks):
            least = min(peaks, key=lambda each: each.peak_bytes)
            parts.append(f"{optimizer} needs {'' if least.parts else 'more than '}{format_bytes(least.peak_bytes)}")
    if fixed.begun:
        parts.append(f"the run has states of {chosen.optimizer}")
    if fixed.keys:
        parts.append(f"the job sets {', '.join(f'memory.{key}' for key in fixed.keys)}")
    setting = describe(chosen.optimizer, chosen.activation_checkpointing, chosen.micro_batch)
    cost = (
        "no other setting is faster"
        if chosen.slowdown < 1.005
        else f"{chosen.slowdown:.2f} times the time of the fastest way"
    )
    update = pace.update_s(chosen.optimizer)
    if update:
        cost += f"; the host's update takes {format_duration(update)} of each step"
    return "; ".join([*parts, f"{setting}: {cost}"])


def does_not_fit(least: MemoryPlan, ladder: Ladder, fixed: Fixed, budget: Budget, task: Task) -> DoesNotFit:
    """The error: the least that the job needs as written, what it may use, and the nearest setting that fits."""
    setting = least.setting
    needed, most, margin = bytes_alike(least.peak_bytes, budget.bytes, budget.margin)
    free = f", of which {margin} stay free" if budget.margin else ""
    message = (
        f"the job needs {needed} at its least ({setting} of {least.input_tokens}/{least.target_tokens} tokens), "
        f"and the budget is {most} ({budget.origin}){free}"
    )
    if (found := ladder.nearest(fixed)) is not None:
        freed, fits = found
        changes = ", ".join(f"memory.{key}: {json.dumps(getattr(fits, key))}" for key in freed)
        return DoesNotFit(
            message,
            least,
            param=f"memory.{freed[0]}",
            hint=f"with {changes} it fits: {format_bytes(fits.peak_bytes)} "
            f"({describe(fits.optimizer, fits.activation_checkpointing, fits.micro_batch)})",
        )
    smallest = ladder.smallest(fixed.without(*fixed.keys))
    ways_out = [f"shorter texts ({', '.join(task.limit_keys)})", "a smaller model"]
    if budget.source == "job":
        ways_out.insert(0, "a larger memory.budget")
    elif budget.gpu is not None:
        ways_out.insert(0, "a GPU with more memory")
    return DoesNotFit(
        message,
        least,
        param="memory.budget" if budget.source == "job" else "model",
        hint=f"no setting fits: the smallest needs {format_bytes(smallest.peak_bytes)}; what helps is "
        + " or ".join(ways_out),
    )


def fallbacks(plan: MemoryPlan, spec: JobSpec) -> list[tuple[int, int]]:
    """(micro_batch, activation_checkpointing) below the plan's own, in order of falling peak; the optimizer stays.

    The micro-batch is halved down to one row; then every second layer is recomputed, then every layer. Recomputation
    that the job sets itself is not changed.
    """
    rows, every = plan.micro_batch, plan.activation_checkpointing
    below = []
    while rows > 1:
        rows //= 2
        below.append((rows, every))
    if spec.memory.activation_checkpointing == "auto":
        below += [(rows, more) for more in (2, 1) if every == 0 or more < every]
    return below
