"""The memory part of plan.json: what a job needs at its peak, what it may use, and what was tried (ADR 0003)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Optimizer = Literal["adamw", "adamw_8bit", "adafactor"]
GIB = 2**30
TEST_LIMIT = "LONGHAUL_TEST_MEMORY_LIMIT"
"""Environment variable of a train worker, for tests alone: bytes that attempts really get, whatever was planned."""
PICTURE = "memory.png"
"""In the run directory: the plan at a glance."""


class MemoryPart(BaseModel):
    """Frozen and closed. Sizes are bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Candidate(MemoryPart):
    """One way to train, with the largest micro-batch that fits."""

    optimizer: Optimizer
    """Which one."""
    recompute_layers: int
    """Activations of every n-th layer are recomputed; 0: none."""
    micro_batch: int
    """Rows of the longest shape; 0: not even one fits."""
    peak_bytes: int
    """At that micro-batch; where none fits, of one row, or of the micro-batch that the job sets."""
    slowdown: float
    """Expected time a row, in that of the fastest candidate of all, fitting or not: 1 or more."""
    score: float
    """Speed x worth of the optimizer, 0 to 1; the highest that fits is chosen."""
    parts: dict[str, int] = {}
    """Of `peak_bytes`, as in `MemoryPlan.parts`; empty where it was not traced, since weights, gradients and states
    alone are too much: then `peak_bytes` is their sum, context included."""

    @property
    def fits(self) -> bool:
        """Whether it can be chosen."""
        return self.micro_batch > 0


class HostPlan(MemoryPart):
    """Memory of the machine, or container, where the trainer runs."""

    copy_bytes: int
    """A pinned copy of weights and optimizer states, from which a checkpoint is written in the background."""
    available_bytes: int
    """What there is for it."""
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
    """Room there."""

    @property
    def needed_bytes(self) -> int:
        """For everything."""
        return self.checkpoint_bytes * self.checkpoints + self.model_bytes

    @property
    def text(self) -> str | None:
        """For people: what will be missing; None where there is room for everything."""
        if self.needed_bytes <= self.free_bytes:
            return None
        room = (self.free_bytes - self.model_bytes) // self.checkpoint_bytes
        return (
            f"the disk has room for {room} of {self.checkpoints} checkpoints ({self.free_bytes / GIB:.1f} GiB free, "
            f"{self.needed_bytes / GIB:.1f} needed): saves that do not fit are skipped"
        )


class MemoryPlan(MemoryPart):
    """What the chosen setting (`resolved` in plan.json) needs, and what else was tried."""

    device: Literal["cpu", "cuda"]
    """What the job trains on."""
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
    """Of the same shape."""
    micro_batch: int
    """Rows of it, as chosen."""
    recompute_layers: int
    """Activations of every n-th layer are recomputed; 0: none."""
    optimizer: Optimizer
    """As chosen."""
    parts: dict[str, int]
    """At the peak: weights, gradients, optimizer, activations, temporaries, context."""
    peak_bytes: int
    """Their sum."""
    candidates: list[Candidate]
    """In order of score; the first that fits and agrees with what the job sets was chosen."""
    why: str
    """For people: why this one."""
    host: HostPlan | None = None
    """Null on a CPU."""
    disk: DiskPlan | None = None
    """Null where it was not looked at."""
    seconds: float
    """What making this took."""

    @property
    def text(self) -> str:
        """For people, in one line."""
        source = {"job": "memory.budget", "card": self.card, "assumed": f"{self.card}, assumed", "host": "host memory"}
        setting = describe(self.optimizer, self.recompute_layers, self.micro_batch)
        return (
            f"{gibibytes(self.peak_bytes)} at the peak of {gibibytes(self.budget_bytes)} "
            f"({source[self.budget_source]}; {gibibytes(self.budget_bytes - self.peak_bytes)} free): "
            f"{setting} of {self.input_tokens}/{self.target_tokens} tokens"
            + (f"; {self.disk.text}" if self.disk and self.disk.text else "")
        )

    def chose(self, candidate: Candidate) -> bool:
        """Whether this is the way that was chosen."""
        return (candidate.optimizer, candidate.recompute_layers, candidate.micro_batch) == (
            self.optimizer, self.recompute_layers, self.micro_batch,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """For events: every figure but the parts of those not chosen, and the text."""
        return self.model_dump(exclude={"candidates": {"__all__": {"parts"}}}) | {"text": self.text}


def describe(optimizer: Optimizer, recompute_layers: int, micro_batch: int) -> str:
    """`adamw_8bit, no recomputation, micro-batch 8`."""
    return f"{optimizer}, {layers(recompute_layers)}, micro-batch {micro_batch}"


def layers(recompute_layers: int) -> str:
    """`no recomputation`, `every layer recomputed`, `every 4th layer recomputed`."""
    match recompute_layers:
        case 0:
            return "no recomputation"
        case 1:
            return "every layer recomputed"
        case 2:
            return "every 2nd layer recomputed"
        case 3:
            return "every 3rd layer recomputed"
        case every:
            return f"every {every}th layer recomputed"


def gibibytes(size: int) -> str:
    """`27.1 GiB`; of small models `35 MiB`."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:.0f} MiB"
