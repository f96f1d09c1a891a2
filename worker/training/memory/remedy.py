"""What would have fitted when not even one row did, by the plan's predictions."""

from __future__ import annotations

import logging
import resource

import torch

from jobs.memory_plan import Candidate, MemoryPlan
from jobs.plan import Plan
from jobs.spec import JobSpec
from jobs.text.units import bytes_alike, format_bytes
from worker.training.machine.out_of_memory import MemoryShortage, figures
from worker.training.planning.alternatives import LIGHTER, Alternatives
from worker.training.planning.prediction import Setting
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.registry import task_of

log = logging.getLogger("longhaul.trainer")


def less(spec: JobSpec, plan: Plan) -> str:
    """What helps in any case, for people."""
    return f"lower {' and '.join(task_of(spec, plan.task).limit_keys)}, or take a smaller model"


def what_would_fit(spec: JobSpec, plan: Plan, shortage: MemoryShortage) -> str:
    """What to do, for people, once the memory of the failed pass is free. May take seconds: the attempt is over anyway.

    What was available is, on a GPU, what the process held when it was refused more; on a CPU, what it can still get.
    """
    try:
        hints = [_hint(spec, plan, shortage)]
    except Exception as error:  # a prediction that fails must not take the place of the error that it is to explain
        log.warning("what would have fitted cannot be predicted: %r", error)
        hints = [f"set memory.activation_checkpointing: 1, {less(spec, plan)}"]
    if shortage.other_processes is not None and shortage.other_processes.bytes and not shortage.limited:
        hints.append(f"or give it the whole GPU: others hold {shortage.other_processes.text}")
    return "; ".join(hints)


def _hint(spec: JobSpec, plan: Plan, shortage: MemoryShortage) -> str:
    memory, got = plan.memory, _got(plan.memory, shortage)
    if memory is None or got is None:
        return f"set memory.activation_checkpointing: 1, {less(spec, plan)}"
    # In order of score: the first is the fastest.
    fitting = [
        each
        for each in memory.candidates
        if each.peak_bytes < got
        and (each.optimizer, each.activation_checkpointing)
        != (plan.resolved.optimizer, plan.resolved.activation_checkpointing)
    ]
    if fitting:
        settings, size = _settings(plan, fitting[0]), fitting[0].peak_bytes
    elif (found := _one_row(spec, plan, memory, got)) is not None:
        settings, size = found
    else:
        return f"the process got {format_bytes(got)}, and no setting is predicted to need less: {less(spec, plan)}"
    needs, instead_of, there = bytes_alike(size, memory.peak_bytes, got)
    return f"set {settings} (predicted {needs} instead of {instead_of}; the process got {there})"


def _one_row(spec: JobSpec, plan: Plan, memory: MemoryPlan, got: int) -> tuple[str, int] | None:
    """Settings that were not tried, with which a micro-batch of one row fits, and their peak; None: there are none."""
    if plan.model.folder is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # a budget is for training, which is over
    try:
        alternatives = Alternatives(spec, plan, torch.device(memory.device))
        shape, now = MicroBatchShape(1, memory.input_tokens, memory.target_tokens), plan.resolved
        for optimizer in (now.optimizer, *LIGHTER):
            for every in (0, 2, 1):
                found = Candidate(
                    optimizer=optimizer,
                    activation_checkpointing=every,
                    micro_batch=1,
                    peak_bytes=sum(alternatives.parts(shape, Setting(every, optimizer)).values()),
                    slowdown=1.0,
                    score=0.0,
                )
                if found.peak_bytes < got and (optimizer, every) != (now.optimizer, now.activation_checkpointing):
                    return _settings(plan, found), found.peak_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return None


def _got(memory: MemoryPlan | None, shortage: MemoryShortage) -> int | None:
    """Bytes that the process had at least, in the terms of the plan: on a GPU with its CUDA context."""
    if shortage.device != "cuda":
        # Of tensors, weights and states are left.
        free = figures(torch.device("cpu")).free
        return None if memory is None or free is None else free + memory.parts["weights"] + memory.parts["optimizer"]
    if shortage.figures.reserved is None:
        return None
    return shortage.figures.reserved + (memory.parts.get("context", 0) if memory is not None else 0)


def _settings(plan: Plan, candidate: Candidate) -> str:
    settings = []
    if candidate.optimizer != plan.resolved.optimizer:
        settings.append(f"memory.optimizer: {candidate.optimizer}")
    if candidate.activation_checkpointing != plan.resolved.activation_checkpointing:
        settings.append(f"memory.activation_checkpointing: {candidate.activation_checkpointing}")
    return ", ".join([*settings, f"memory.micro_batch: {max(1, candidate.micro_batch)}"])
