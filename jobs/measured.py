"""What `longhaul doctor` measured of a GPU: it replaces the figures of the data sheet (`jobs/gpus.py`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jobs.frozen import Frozen


class MeasuredGpu(Frozen, strict=True, extra="ignore", json_schema_extra={"additionalProperties": False}):
    """Of one GPU with one version of its driver."""

    driver: str
    """Version of the driver."""
    examined_at: int
    """Unix seconds."""
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
