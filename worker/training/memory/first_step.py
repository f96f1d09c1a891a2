"""The peak of an attempt's first step on a GPU, beside what was predicted for that very step: `memory.measured`.

Compiled layers keep less than the prediction, which is made of eager ones, unless they are recomputed; libraries may
take more. What was measured
of one step corrects what is predicted for the largest that can come.

On a CPU there is nothing to measure: its allocator counts neither what is in use nor the highest it has been.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jobs.memory_plan import MemoryPlan
from jobs.trainer_facts import MemoryMeasured
from worker.training.dataset.data import Int64, Rows
from worker.training.journal import Journal
from worker.training.planning.alternatives import Alternatives
from worker.training.planning.ladder import Setting
from worker.training.steps.result import StepResult
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.task import Limit

STATIC = ("weights", "gradients", "optimizer", "context")
"""Categories that do not depend on the micro-batch."""


def predict(
    device: torch.device,
    memory: MemoryPlan | None,
    rows: Rows,
    groups: Sequence[Int64],
    limit: Limit,
    alternatives: Alternatives,
) -> None:
    """Predict the peak of the first step before it begins, so that the time this takes is not counted as the step's.

    `report` asks for the same prediction; it makes another only if memory ran out and the step was cut otherwise.
    """
    if device.type == "cuda" and memory is not None:
        largest = max(limit.shapes(rows, groups), key=lambda shape: shape.tokens)
        alternatives.parts(largest, Setting(memory.activation_checkpointing, memory.optimizer))


def begin(device: torch.device) -> None:
    """The first step begins."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def report(
    journal: Journal, device: torch.device, memory: MemoryPlan | None, result: StepResult, alternatives: Alternatives
) -> None:
    """Note the event of the first step, `result`; nothing on a CPU, and where no memory was planned."""
    if device.type == "cuda" and memory is not None:
        allocated = torch.cuda.max_memory_allocated(device)
        journal.note(compare(memory, result.step, result.largest, allocated, alternatives))


def compare(
    memory: MemoryPlan, step: int, largest: MicroBatchShape, allocated: int, alternatives: Alternatives
) -> MemoryMeasured:
    """The event for a step with this largest micro-batch and so many bytes of torch's allocator in use at once."""
    whole = allocated + memory.parts.get("context", 0)
    predicted = sum(alternatives.parts(largest, Setting(memory.activation_checkpointing, memory.optimizer)).values())
    static = sum(memory.parts.get(name, 0) for name in STATIC)
    return MemoryMeasured(
        step=step,
        measured_bytes=whole,
        predicted_bytes=predicted,
        peak_bytes=correct(whole, predicted, memory.peak_bytes, static),
        budget_bytes=memory.budget_bytes,
    )


def correct(measured: int, predicted: int, worst: int, static: int) -> int:
    """The largest peak that can come, predicted as `worst`: what does not grow with the batch stays, the rest scales.

    All in bytes; `static` is what does not grow.
    """
    assert predicted > static, "a step has activations"
    ratio = max(0, measured - static) / (predicted - static)
    return static + round(ratio * (worst - static))
