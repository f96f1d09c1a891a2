"""plan.json: what check and prepare found out, and what every `auto` of the job became."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from jobs.cards import REFERENCE, peak_flops, short_name
from jobs.memory_plan import MemoryPlan, Optimizer
from jobs.spec import JobSpec

EXPECTED_SHARE = 0.4
"""Share of a card's limit that a job is expected to reach while nothing was measured; recomputation counts as work.

Five sixths of what our roofline model gives XL on an RTX 5090 with T5 as shipped (48 %). Others report, of model FLOPs
alone: T5-base on an A100, compiled (nanoT5), 62 %; FLAN-T5-XL under ZeRO-3 on eight A100, 21 %.
"""


class PlanPart(BaseModel):
    """Frozen and closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelPlan(PlanPart):
    """Which weights exactly."""

    source: str
    """As in the job: hub id, folder, or builtin."""
    revision: str | None = None
    """Commit of a hub model; every attempt uses this one."""
    folder: str | None = None
    """Absolute path of the safetensors, config and tokenizer; known after prepare."""
    parameters: int
    """Counted from the config, without loading a weight."""


class DataPlan(PlanPart):
    """Which rows exactly."""

    train: str
    """Absolute path of the source file, or the hub data set as in the job."""
    train_revision: str | None = None
    """Commit of a hub data set; every attempt uses this one."""
    validation: str | None = None
    """Absolute path of the source file of validation rows (or hub data set), if they have one of their own."""
    validation_revision: str | None = None
    """Commit of theirs."""
    input: str
    """Template, as resolved."""
    target: str
    """Template, as resolved."""
    prepared: str | None = None
    """Absolute path of the prepared dataset; known after prepare."""
    rows: int
    """Training rows; before prepare, as estimated by check."""
    validation_rows: int = 0
    """Rows held out; before prepare, as estimated by check."""
    complete: bool = False
    """Whether all rows have been looked at."""


class Resolved(PlanPart):
    """Every `auto` of the job, decided."""

    micro_batch: int
    """Rows of the longest shape that go through the model at once."""
    recompute_layers: int
    """Activations of every n-th layer are recomputed; 0: none."""
    optimizer: Optimizer = "adamw"
    """Which one."""
    compile: bool = False
    """Whether layers run compiled."""


class TimePlan(PlanPart):
    """How long all steps of the job take, before the first is measured. Evaluations and checkpoints are not in it, nor
    the steps that another job did (`resume_from`)."""

    model_flops: float
    """Forward and backward over all rows of these steps, at their real lengths."""
    recomputed_flops: float
    """What `resolved.recompute_layers` adds: forward passes made a second time."""
    estimated: bool
    """Lengths were guessed from the characters of the first rows; false: the tokens of all rows were counted."""
    card: str | None
    """The best of those that train workers report, as its driver names it; null: the job trains on a CPU."""
    assumed: bool = False
    """No worker has reported a card yet: this is the reference card."""
    hours_at_limit: float | None
    """`model_flops` at the card's peak; null without a card whose peak is known. No job is faster on one card."""
    hours_expected: float | None
    """All FLOPs at `EXPECTED_SHARE` of the peak. An expectation: the measured pace replaces it."""

    @property
    def text(self) -> str | None:
        """For people, such as `≥ 131 h at the limit of an RTX 5090 (about 434 h expected)`; None on a CPU."""
        if self.card is None:
            return None
        if self.hours_at_limit is None or self.hours_expected is None:
            return f"time unknown: what this card can do at most is not in our table ({self.card})"
        name = short_name(self.card)
        article = "an" if name[0] in "AEFHILMNORSX" else "a"
        doubts = [
            *(["no card was reported yet"] if self.assumed else []),
            *(["guessed from the first rows"] if self.estimated else []),
        ]
        remarks = "; ".join([f"about {_hours(self.hours_expected)} expected", *doubts])
        # A guess is no bound.
        least = "about" if self.estimated else "≥"
        return f"{least} {_hours(self.hours_at_limit)} at the limit of {article} {name} ({remarks})"

    def told(self) -> dict[str, Any]:
        """For events: every figure, and the text."""
        return self.model_dump() | {"text": self.text}


def make_time_plan(
    *, model_flops: float, recomputed_flops: float, estimated: bool, device: str, card: str | None
) -> TimePlan:
    """The time on this card (None: the reference card is assumed); on `cpu` without a card no time is foretold."""
    assumed = card is None and device != "cpu"
    name = REFERENCE.name if assumed else card
    peak = None if name is None else peak_flops(name)
    return TimePlan(
        model_flops=model_flops,
        recomputed_flops=recomputed_flops,
        estimated=estimated,
        card=name,
        assumed=assumed,
        hours_at_limit=None if peak is None else model_flops / peak / 3600,
        hours_expected=None if peak is None else (model_flops + recomputed_flops) / (EXPECTED_SHARE * peak) / 3600,
    )


class Plan(PlanPart):
    """plan.json."""

    model: ModelPlan
    data: DataPlan
    resolved: Resolved
    time: TimePlan | None = None
    """Null in plans of earlier versions, as is `memory`."""
    memory: MemoryPlan | None = None
    """What the run needs at its peak, and what was tried; null in plans of earlier versions."""
    steps: int
    """Optimizer steps of the whole run (provisional until `data.complete`)."""
    warmup_steps: int
    """Steps over which the learning rate rises."""


def resolve(spec: JobSpec, memory: MemoryPlan | None, device: str = "cpu") -> Resolved:
    """Memory as planned; without a plan as the job says, and for `auto` the plainest. Compiled on CUDA."""
    said = spec.memory
    if memory is not None:
        chosen = memory.micro_batch, memory.recompute_layers, memory.optimizer
    else:
        rows, every = (8 if said.micro_batch == "auto" else said.micro_batch, said.recompute_layers)
        optimizer: Optimizer = "adamw" if said.optimizer == "auto" else said.optimizer
        chosen = min(spec.schedule.batch_size, rows), 0 if every == "auto" else every, optimizer
    return Resolved(
        micro_batch=chosen[0],
        recompute_layers=chosen[1],
        optimizer=chosen[2],
        # Measured on the CPU: compiled layers take longer than fused ones.
        compile=device == "cuda" and spec.speed.fused if spec.speed.compile == "auto" else spec.speed.compile,
    )


def make_plan(
    spec: JobSpec, model: ModelPlan, data: DataPlan, device: str = "cpu", memory: MemoryPlan | None = None
) -> Plan:
    """Plan for this model and so many rows, on `cpu` or `cuda`.

    Rows left at an epoch's end open the next: only the last step is short.
    """
    steps = math.ceil(data.rows * spec.schedule.epochs / spec.schedule.batch_size)
    return Plan(
        model=model,
        data=data,
        resolved=resolve(spec, memory, device),
        memory=memory,
        steps=steps,
        warmup_steps=math.ceil(steps * spec.schedule.warmup_fraction),
    )


def read_plan(file: Path) -> Plan:
    """The plan in a run directory."""
    return Plan.model_validate_json(file.read_bytes())


def _hours(hours: float) -> str:
    """`131 h`, `7.2 h`, `25 min`, `40 s`."""
    if hours >= 10:
        return f"{hours:,.0f} h"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.0f} min" if hours * 60 >= 1.5 else f"{hours * 3600:.0f} s"
