"""What `longhaul doctor` and jobs measured of a GPU: it replaces the figures of the data sheet (`jobs/gpus.py`)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from jobs.frozen import Frozen
from jobs.text.units import GIB

MOST_OF_OTHERS = 4 * GIB
"""What other processes may hold of a GPU that is measured: a desktop takes less, another job more."""
MODELS = 16
"""The newest training rates that are kept."""
Flops = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasuredGpu(Frozen, strict=True, extra="ignore", json_schema_extra={"additionalProperties": False}):
    """Of one GPU with one version of its driver."""

    driver: str
    """Version of the driver."""
    examined_at: int | None = None
    """When `longhaul doctor` examined it, Unix seconds; null: only jobs have measured something."""
    gemm_flops: Annotated[float, Field(gt=1e9, lt=1e18)] | None = None
    """FLOP/s of bf16 matrix products of FLAN-T5-XL's shapes."""
    memory_bytes_per_s: float | None = None
    """Between the GPU's memory and its cores."""
    host_to_device_bytes_per_s: float | None = None
    """From pinned memory."""
    device_to_host_bytes_per_s: float | None = None
    """To pinned memory."""
    update_s: float | None = None
    """Of the optimizer, for the model below."""
    model: str | None = None
    """Size of the FLAN-T5 that was trained: `xl`, `large` or `base`."""
    rows_per_s: dict[str, float] = {}  # noqa: RUF012 - pydantic copies it
    """By tokens of input and target, such as `128/256`."""
    training_flops: dict[str, Flops] = {}  # noqa: RUF012
    """FLOP/s that training reached, recomputed layers included, by the number of the model's parameters. `doctor`
    measures a model of FLAN-T5's shape; each job, its own."""

    def with_training_flops(self, parameters: int, flops: float) -> Self:
        """The same with the rate that a model of so many parameters reached."""
        others = {count: rate for count, rate in self.training_flops.items() if count != str(parameters)}
        newest = dict([*others.items(), (str(parameters), flops)][-MODELS:])
        return self.model_copy(update={"training_flops": newest})
