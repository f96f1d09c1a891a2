"""plan.json: what check and prepare found out, and what every `auto` of the job became.

Until memory planning exists, `auto` follows the fixed rules written in `resolve`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from jobs.spec import JobSpec

LARGE = 10**9  # parameters


class PlanPart(BaseModel):
    """Frozen and closed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
    """Absolute path of the source file."""
    validation: str | None = None
    """Absolute path of the source file of validation rows, if they have one of their own."""
    input: str
    """Template, as resolved."""
    target: str
    prepared: str | None = None
    """Absolute path of the prepared dataset; known after prepare."""
    rows: int
    """Training rows; before prepare, as estimated by check."""
    validation_rows: int = 0
    complete: bool = False
    """Whether all rows have been looked at."""


class Resolved(PlanPart):
    """Every `auto` of the job, decided."""

    micro_batch: int
    recompute_layers: int
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    compile: bool = False


class Plan(PlanPart):
    """plan.json."""

    model: ModelPlan
    data: DataPlan
    resolved: Resolved
    steps: int
    """Optimizer steps of the whole run (provisional until `data.complete`)."""
    warmup_steps: int


def resolve(spec: JobSpec, parameters: int) -> Resolved:
    """Fixed rules for `auto`: micro-batches of 8 rows; eager; `adamw`, and no layer recomputed.

    From 1 B parameters on `adamw_8bit`, and every layer recomputed: what fits FLAN-T5-XL (2.85 B) on a card of 32 GB,
    where weights, gradients and states take 16 GiB with `adamw_8bit` and 42 GiB with `adamw`.
    """
    memory = spec.memory
    large = parameters >= LARGE
    return Resolved(
        micro_batch=min(spec.schedule.batch_size, 8 if memory.micro_batch == "auto" else memory.micro_batch),
        recompute_layers=int(large) if memory.recompute_layers == "auto" else memory.recompute_layers,
        optimizer=("adamw_8bit" if large else "adamw") if memory.optimizer == "auto" else memory.optimizer,
    )


def make_plan(spec: JobSpec, model: ModelPlan, data: DataPlan) -> Plan:
    """Plan for this model and so many rows. Rows left at an epoch's end open the next: only the last step is short."""
    steps = math.ceil(data.rows * spec.schedule.epochs / spec.schedule.batch_size)
    return Plan(
        model=model,
        data=data,
        resolved=resolve(spec, model.parameters),
        steps=steps,
        warmup_steps=math.ceil(steps * spec.schedule.warmup_fraction),
    )


def read_plan(file: Path) -> Plan:
    """The plan in a run directory."""
    return Plan.model_validate_json(file.read_bytes())
