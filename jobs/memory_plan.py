"""The memory part of plan.json: what a job needs at its peak, what it may use, and what was tried (ADR 0003)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from jobs.frozen import Frozen
from jobs.gpus import MARGIN
from jobs.text.units import bytes_alike, format_bytes

OptimizerName = Literal["adamw", "adamw_offload", "adamw_8bit", "adafactor"]
DType = Literal["bfloat16", "float16"]
"""Of a model in memory."""
Device = Literal["cpu", "cuda"]
BudgetSource = Literal["job", "gpu", "assumed", "host"]
TEST_LIMIT = "LONGHAUL_TEST_MEMORY_LIMIT"
"""Environment variable of a train worker, for tests alone: bytes that attempts really get, whatever was planned."""
PICTURE = "memory.png"
"""In the run directory: the plan at a glance."""


def prepare_memory(gigabytes: str | None) -> int:
    """Bytes that each process of *check* and *prepare* may have, from LONGHAUL_PREPARE_MEMORY_GB. Raises ValueError."""
    text = gigabytes or "16"
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size < 1e6:
        raise ValueError(f"LONGHAUL_PREPARE_MEMORY_GB is {text!r}; it is a number of gigabytes, 1 or more")
    return int(size * 10**9)


class CandidateSummary(Frozen):
    """One way to train, with the largest micro-batch that fits."""

    optimizer: OptimizerName
    """Which one."""
    activation_checkpointing: int
    """Activations of every n-th layer are recomputed; 0: none."""
    micro_batch: int
    """Rows of the longest shape; 0: not even one fits."""
    peak_bytes: int
    """At that micro-batch; where none fits, of one row, or of the micro-batch that the job sets."""
    slowdown: float
    """Expected time a row, in that of the fastest candidate of all, fitting or not: 1 or more."""
    score: float
    """Speed x worth of the optimizer, 0 to 1; the highest that fits is chosen."""


class Candidate(CandidateSummary):
    """With what its peak is made of."""

    parts: dict[str, int] = Field({})
    """Of `peak_bytes`, as in `MemoryPlan.parts`; empty where it was not traced, since weights, gradients and states
    alone are too much: then `peak_bytes` is their sum, context included."""

    @property
    def fits(self) -> bool:
        """Whether it can be chosen."""
        return self.micro_batch > 0


class HostPlan(Frozen):
    """Memory of the machine, or container, where the trainer runs."""

    optimizer_bytes: int = 0
    """Optimizer states that are there instead of on the GPU (`adamw_offload`), and buffers for gradients."""
    copy_bytes: int
    """A pinned copy of weights and optimizer states, from which a checkpoint is written in the background."""
    available_bytes: int
    """What is free there; with `optimizer_bytes`, all that the host has, as its train worker reports."""
    fits: bool
    """Whether there is room for the copy besides; else checkpoints are streamed from the device."""


class DiskPlan(Frozen):
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
        free, needed = bytes_alike(self.free_bytes, self.needed_bytes)
        return (
            f"the disk has room for {room} of {self.checkpoints} checkpoints ({free} free, {needed} needed): "
            "saves that do not fit are skipped"
        )


class MemoryFigures(Frozen):
    """What the chosen setting (`resolved` in plan.json) needs, and what else was tried. Sizes are bytes."""

    device: Device
    """What the job trains on."""
    gpu: str | None = None
    """As its driver names it; null on a CPU."""
    budget_bytes: int
    """What the job may use, CUDA context included."""
    budget_source: BudgetSource
    """`memory.budget`; what the worker reported; an assumed GPU; what the host has free."""
    margin_bytes: int
    """Of the budget, kept free for fragmentation: `peak_bytes` is at most budget - margin."""
    input_tokens: int
    """Of the longest shape, evaluated rows included, padded; what the peak was predicted for, times `micro_batch`."""
    target_tokens: int
    """Of the same shape."""
    micro_batch: int
    """Rows of it, as chosen."""
    activation_checkpointing: int
    """Activations of every n-th layer are recomputed; 0: none."""
    optimizer: OptimizerName
    """As chosen."""
    compile: bool = False
    """Whether layers run compiled: as the job says, where they can be (not those of every model, nor of a causal model
    that recomputes some)."""
    dtype: DType = "bfloat16"
    """Of the model: what `parts.weights` are, but for adapters."""
    parts: dict[str, int]
    """At the peak: weights, gradients, optimizer, activations, temporaries, context."""
    peak_bytes: int
    """Their sum."""
    gpus: int = 1
    """That train together; the other sizes are those of each."""
    trained_parameters: int = 0
    """Numbers that are trained; 0 in plans of earlier versions, which trained all."""
    evaluation: bool = False
    """Nothing is trained: this is what an evaluation needs."""
    least_bytes: int | None = None
    """Peak of the smallest setting with the same optimizer that the job allows: a GPU with room for less cannot take
    the job. Null on a CPU, and in plans of earlier versions."""
    candidates: Sequence[CandidateSummary]
    """In order of score; the first that fits and agrees with what the job sets was chosen."""
    why: str
    """For people: why this one."""
    host: HostPlan | None = None
    """Null on a CPU."""
    disk: DiskPlan | None = None
    """Null where it was not looked at."""
    seconds: float
    """What making this took."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, given: object) -> object:
        """They sharded weights among GPUs, and said how much of them."""
        if isinstance(given, Mapping):
            return {name: each for name, each in given.items() if name != "sharded_bytes"}
        return given

    @property
    def reserved_bytes(self) -> int | None:
        """What a trial has of a GPU, alone there or not (ADR 15): the budget with which the chosen setting just fits.

        None on a CPU.
        """
        return math.ceil(self.peak_bytes / (1 - MARGIN)) if self.device == "cuda" else None


class MemorySummary(MemoryFigures):
    """The plan of a job's memory for events and lists: settings that were not chosen come without their parts."""

    text: str
    """For people, in one line."""


class MemoryPlan(MemoryFigures):
    """The plan of a job's memory: what the chosen setting needs, and what else was tried. Sizes are bytes.

    Of a job that was refused because nothing fits: what the smallest setting that it allows would need.
    """

    least_parts: dict[str, int] = Field({})
    """Of `least_bytes`, as in `parts`; empty where that is null, and in plans of earlier versions."""
    candidates: list[Candidate]
    """In order of score; the first that fits and agrees with what the job sets was chosen."""

    @property
    def limit_bytes(self) -> int:
        """What the peak may reach."""
        return self.budget_bytes - self.margin_bytes

    @property
    def fits(self) -> bool:
        """Whether the job can be trained; else it was refused."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def text(self) -> str:
        """For people, in one line: a fact after the other."""
        source = {"job": "memory.budget", "gpu": self.gpu, "assumed": f"{self.gpu}, assumed", "host": "host memory"}
        peak, budget, free = bytes_alike(self.peak_bytes, self.budget_bytes, abs(self.budget_bytes - self.peak_bytes))
        left = "to spare" if self.peak_bytes <= self.budget_bytes else "missing"
        on_host = 0 if self.host is None else self.host.optimizer_bytes
        facts = [
            f"peak memory {peak}",
            f"budget {budget} ({source[self.budget_source]}), {free} {left}",
            "model in float16, adapters in float32" if self.dtype == "float16" else None,
            self.setting,
            f"planned for rows of at most {self.input_tokens:,}/{self.target_tokens:,} tokens",
            f"{format_bytes(on_host)} of optimizer states in the host's memory" if on_host else None,
            self.disk.text if self.disk else None,
        ]
        return "; ".join(fact for fact in facts if fact)

    @property
    def setting(self) -> str:
        """What was chosen, for people."""
        if self.evaluation:
            return f"evaluation, micro-batch {self.micro_batch}"
        return describe(self.optimizer, self.activation_checkpointing, self.micro_batch)

    def chose(self, candidate: Candidate) -> bool:
        """Whether this is the way that was chosen."""
        return (candidate.optimizer, candidate.activation_checkpointing, candidate.micro_batch) == (
            self.optimizer, self.activation_checkpointing, self.micro_batch,
        )  # fmt: skip

    def summary(self) -> MemorySummary:
        """Every figure but the parts of the candidates, and the text."""
        figures = self.model_dump(exclude={"least_parts": True, "candidates": {"__all__": {"parts"}}})
        return MemorySummary(**figures, text=self.text)


def describe(optimizer: str, activation_checkpointing: int, micro_batch: int) -> str:
    """`adamw_8bit, no recomputation, micro-batch 8`."""
    return f"{optimizer}, {layers(activation_checkpointing)}, micro-batch {micro_batch}"


def layers(activation_checkpointing: int) -> str:
    """`no recomputation`, `every layer recomputed`, `every 4th layer recomputed`."""
    match activation_checkpointing:
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
