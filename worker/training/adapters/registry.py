"""The method of a job."""

from __future__ import annotations

import torch

from jobs.memory_plan import DType
from jobs.spec import FullMethod, JobSpec
from worker.training.adapters.lora import Lora
from worker.training.adapters.method import Full, Method


def method_of(spec: JobSpec, dtype: DType) -> Method:
    """`method` of a job, as the trainer asks it; `dtype`: of its model, as planned."""
    planned: torch.dtype = getattr(torch, dtype)
    if isinstance(spec.method, FullMethod):
        return Full(planned, evaluated=spec.kind == "evaluate")
    return Lora(spec.method, planned)
