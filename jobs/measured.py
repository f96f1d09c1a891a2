"""What `longhaul doctor` and jobs measured of a GPU: it replaces the figures of the data sheet (`jobs/gpus.py`)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from jobs.frozen import Frozen
from jobs.text.units import GIB

MOST_OF_OTHERS = 4 * GIB
"""What other processes may hold of a GPU that is measured: a desktop takes less, another job more."""
RATES = 16
"""The newest training rates that are kept."""
ALIKE = 4.0
"""Steps of up to so many times the FLOPs have the same rate: in others, update and padding take another share."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainingRate(Frozen, extra="ignore", json_schema_extra={"additionalProperties": False}):
    """How fast a model trained."""

    parameters: int
    """Of the model."""
    compiled: bool
    """Whether its layers were to run compiled."""
    step_flops: Positive
    """Mean FLOPs of an optimizer step at the real lengths of its rows, recomputed layers not included."""
    flops_per_s: Positive
    """FLOP/s that training reached, recomputed layers and the optimizer's updates included."""

    def holds_for(self, parameters: int, compiled: bool, step_flops: float) -> bool:
        """Whether a job with such a model and such steps can expect this rate."""
        alike = self.step_flops <= ALIKE * step_flops and step_flops <= ALIKE * self.step_flops
        return alike and (self.parameters, self.compiled) == (parameters, compiled)


class MeasuredGpu(Frozen, strict=True, extra="ignore", json_schema_extra={"additionalProperties": False}):
    """Of one GPU with one version of its driver."""

    driver: str
    """Version of the driver."""
    examined_at: int | None = None
    """When `longhaul doctor` examined it, Unix seconds; null: only jobs have measured something."""
    gemm_flops: Annotated[float, Field(gt=1e9, lt=1e18)] | None = None
    """FLOP/s of bf16 matrix products of FLAN-T5-XL's shapes."""
    memory_bytes_per_s: Positive | None = None
    """Between the GPU's memory and its cores."""
    host_to_device_bytes_per_s: Positive | None = None
    """From pinned memory."""
    device_to_host_bytes_per_s: Positive | None = None
    """To pinned memory."""
    host_update_per_s: Positive | None = None
    """Weights a second that the host updates (`adamw_offload`): they come, are updated and go back."""
    update_s: Positive | None = None
    """Of the optimizer, for the model below."""
    model: str | None = None
    """Size of the FLAN-T5 that was trained: `xl`, `large` or `base`."""
    rows_per_s: dict[str, Positive] = {}  # noqa: RUF012 - pydantic copies it
    """By tokens of input and target, such as `128/256`."""
    training: list[TrainingRate] = []  # noqa: RUF012
    """How fast models trained, the newest last. `doctor` measures a model of FLAN-T5's shape; each job, its own."""

    def with_training(self, new: TrainingRate) -> Self:
        """The same with this rate, in place of one of the same model and such steps."""
        others = [each for each in self.training if not each.holds_for(new.parameters, new.compiled, new.step_flops)]
        return self.model_copy(update={"training": [*others, new][-RATES:]})
