"""The method of a job."""

from __future__ import annotations

from jobs.spec import FullMethod, JobSpec
from worker.training.adapters.full import Full
from worker.training.adapters.lora import Lora
from worker.training.adapters.method import Method


def method_of(spec: JobSpec) -> Method:
    """`method` of a job, as the trainer asks it."""
    return Full() if isinstance(spec.method, FullMethod) else Lora(spec.method)
