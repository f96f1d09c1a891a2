"""What would have fitted, when not even one row did: by the plan's predictions, and said as such."""

from __future__ import annotations

import logging
import resource

import torch

from jobs.memory_plan import Candidate, MemoryPlan, gibibytes
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training.machine.out_of_memory import Shortage, figures

log = logging.getLogger("longhaul.trainer")

LESS = "lower data.max_input_tokens and data.max_target_tokens, or take a smaller model"


def what_would_fit(spec: JobSpec, plan: Plan, shortage: Shortage) -> str:
    """The way out, for people, once what the failed pass held is given back. It may take some seconds: the end is near.

    What the process could have had is, on a card, what it held when it was refused more; on a CPU what it still gets.
    """
    try:
        ways = [_ways(spec, plan, shortage)]
    except Exception as error:  # a prediction that fails must not take the place of the error that it is to explain
        log.warning("what would have fitted cannot be predicted: %r", error)
        ways = [f"set memory.recompute_layers: 1, {LESS}"]
    if shortage.foreign is not None and shortage.foreign.bytes:
        ways.append(f"or give it the whole card: others hold {shortage.foreign.text}")
    return "; ".join(ways)


def _ways(spec: JobSpec, plan: Plan, shortage: Shortage) -> str:
    memory, got = plan.memory, _got(plan.memory, shortage)
    if memory is None or got is None:
        return f"set memory.recompute_layers: 1, {LESS}"
    # In order of score: the first is the fastest.
    fitting = [
        each
        for each in memory.candidates
        if each.peak_bytes < got
        and (each.optimizer, each.recompute_layers) != (plan.resolved.optimizer, plan.resolved.recompute_layers)
    ]
    if fitting:
        settings, size = _settings(plan, fitting[0]), fitting[0].peak_bytes
    elif (found := _one_row(spec, plan, memory, got)) is not None:
        settings, size = found
    else:
        return f"the process got {gibibytes(got)}, and no setting is predicted to need less: {LESS}"
    return (
        f"set {settings} (predicted {gibibytes(size)} instead of {gibibytes(memory.peak_bytes)}; "
        f"the process got {gibibytes(got)})"
    )


def _one_row(spec: JobSpec, plan: Plan, memory: MemoryPlan, got: int) -> tuple[str, int] | None:
    """Settings that were not tried, with which a micro-batch of one row fits, and their peak; None: there are none."""
    if plan.model.folder is None:
        return None
    # Imported here: predictions run the loop's own code, and this is called from there.
    from worker.training.planning.prediction import Setting, Shape
    from worker.training.planning.ways import LIGHTER, Ways

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # a budget is for training, which is over
    try:
        ways = Ways(spec, plan, torch.device(memory.device))
        shape, now = Shape(1, memory.input_tokens, memory.target_tokens), plan.resolved
        for optimizer in (now.optimizer, *LIGHTER):
            for every in (0, 2, 1):
                found = Candidate(
                    optimizer=optimizer,
                    recompute_layers=every,
                    micro_batch=1,
                    peak_bytes=sum(ways.parts(shape, Setting(every, optimizer)).values()),
                    slowdown=1.0,
                    score=0.0,
                )
                if found.peak_bytes < got and (optimizer, every) != (now.optimizer, now.recompute_layers):
                    return _settings(plan, found), found.peak_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return None


def _got(memory: MemoryPlan | None, shortage: Shortage) -> int | None:
    """Bytes that the process had at least, in the terms of the plan: on a card with its CUDA context."""
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
    if candidate.recompute_layers != plan.resolved.recompute_layers:
        settings.append(f"memory.recompute_layers: {candidate.recompute_layers}")
    return ", ".join([*settings, f"memory.micro_batch: {max(1, candidate.micro_batch)}"])
