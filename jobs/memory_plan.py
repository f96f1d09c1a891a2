"""The memory part of plan.json: what a job needs at its peak, what it may use, and what was tried (ADR 0003)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Optimizer = Literal["adamw", "adamw_8bit", "adafactor"]
GIB = 2**30


class MemoryPart(BaseModel):
    """Frozen and closed. Sizes are bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Candidate(MemoryPart):
    """One way to train, with the largest micro-batch that fits."""

    optimizer: Optimizer
    recompute_layers: int
    micro_batch: int
    """Rows of the longest shape; 0: not even one fits."""
    peak_bytes: int
    """At that micro-batch; of one row where none fits."""
    slowdown: float
    """Expected time a row, in that of the fastest candidate of all, fitting or not: 1 or more."""
    score: float
    """Speed x worth of the optimizer, 0 to 1; the highest that fits is chosen."""
    parts: dict[str, int] = {}
    """Of `peak_bytes`, as in `MemoryPlan.parts`; empty where weights, gradients and states alone are too much."""

    @property
    def fits(self) -> bool:
        """Whether it can be chosen."""
        return self.micro_batch > 0


class HostPlan(MemoryPart):
    """Memory of the machine, or container, where the trainer runs."""

    copy_bytes: int
    """A pinned copy of weights and optimizer states, from which a checkpoint is written in the background."""
    available_bytes: int
    fits: bool
    """Else checkpoints are streamed from the device."""


class DiskPlan(MemoryPart):
    """Room in the runs directory."""

    checkpoint_bytes: int
    """Of one."""
    checkpoints: int
    """At most at once: those kept, the best one, and the one being written."""
    model_bytes: int
    """Of the final model."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """For everything."""
        return self.checkpoint_bytes * self.checkpoints + self.model_bytes


class MemoryPlan(MemoryPart):
    """What the chosen setting (`resolved` in plan.json) needs, and what else was tried."""

    device: Literal["cpu", "cuda"]
    card: str | None = None
    """As its driver names it; null on a CPU."""
    budget_bytes: int
    """What the job may use, CUDA context included."""
    budget_source: Literal["job", "card", "assumed", "host"]
    """`memory.budget`; what the worker reported; the reference card; what the host has free."""
    margin_bytes: int
    """Of the budget, kept free for fragmentation: `peak_bytes` is at most budget - margin."""
    input_tokens: int
    """Of the longest shape, padded; what the peak was predicted for, times `micro_batch`."""
    target_tokens: int
    micro_batch: int
    recompute_layers: int
    optimizer: Optimizer
    parts: dict[str, int]
    """At the peak: weights, gradients, optimizer, activations, temporaries, context."""
    peak_bytes: int
    """Their sum."""
    candidates: list[Candidate]
    """In order of score; the first that fits and agrees with what the job sets was chosen."""
    why: str
    """For people: why this one."""
    host: HostPlan | None = None
    disk: DiskPlan | None = None
    seconds: float
    """What making this took."""

    @property
    def text(self) -> str:
        """For people, in one line."""
        free = self.budget_bytes - self.peak_bytes
        recompute = {0: "no recomputation", 1: "every layer recomputed"}.get(
            self.recompute_layers, f"every {self.recompute_layers}. layer recomputed"
        )
        source = {"job": "memory.budget", "card": self.card, "assumed": f"{self.card}, assumed", "host": "host memory"}
        return (
            f"{self.peak_bytes / GIB:.1f} GiB at the peak of {self.budget_bytes / GIB:.1f} GiB "
            f"({source[self.budget_source]}; {free / GIB:.1f} free): {self.optimizer}, {recompute}, "
            f"micro-batch {self.micro_batch} of {self.input_tokens}/{self.target_tokens} tokens"
        )

    def told(self) -> dict[str, Any]:
        """For events: every figure, and the text."""
        return self.model_dump() | {"text": self.text}
