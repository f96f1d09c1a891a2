"""A memory plan, and alternatives to it, by figures instead of predictions."""

from __future__ import annotations

from typing import Any

from jobs.memory_plan import MemoryPlan
from jobs.text.units import GIB
from tests.support.samples import memory_plan
from worker.training.planning.alternatives import Alternatives
from worker.training.planning.budget import Budget
from worker.training.planning.ladder import Setting
from worker.training.steps.shape import MicroBatchShape

CONTEXT = GIB


def planned(**more: Any) -> MemoryPlan:
    """26 GiB of 31: FLAN-T5-XL on a GPU of 32 GB, about."""
    parts = {
        "weights": 5 * GIB, "gradients": 5 * GIB, "optimizer": 6 * GIB, "activations": 7 * GIB, "temporaries": 2 * GIB,
        "context": CONTEXT,
    }  # fmt: skip
    figures = {"budget_source": "assumed", "parts": parts, "peak_bytes": sum(parts.values()), "candidates": []}
    return memory_plan(**figures | more)


class FakeAlternatives(Alternatives):
    """In place of predictions: a row takes a GiB, and recomputing every n-th layer n/4 of that."""

    def __init__(self) -> None:
        self.asked: list[Budget] = []

    def parts(self, shape: MicroBatchShape, setting: Setting) -> dict[str, int]:
        """10 GiB and what the rows take."""
        states = {"adamw_8bit": 6, "adafactor": 1}[setting.optimizer]
        each = setting.activation_checkpointing / 4 if setting.activation_checkpointing else 1.0
        return {"weights": 10 * GIB, "optimizer": states * GIB, "activations": int(shape.rows * each * GIB)}

    def uncompiled(self, activation_checkpointing: int) -> None:
        """They can be compiled, however many are recomputed."""

    def replan(self, budget: Budget) -> MemoryPlan:
        """What the smaller GPU allows."""
        self.asked.append(budget)
        return planned(
            budget_bytes=budget.bytes, budget_source="gpu", micro_batch=4, activation_checkpointing=2, peak_bytes=1
        )
