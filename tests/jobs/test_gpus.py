"""The GPU as it travels from a worker's report to the stages that plan for it."""

from __future__ import annotations

import dataclasses

import pytest

from jobs.gpus import REFERENCE, GpuFacts, memory_bandwidth, peak_flops
from worker.training.settings import from_environment


def test_a_gpu_travels_through_the_environment() -> None:
    gpu = GpuFacts("NVIDIA H200", 143_771 * 2**20)
    assert GpuFacts.parse(gpu.encode()) == gpu
    turing = dataclasses.replace(gpu, native_bf16=False)
    assert GpuFacts.parse(turing.encode()) == turing
    group = dataclasses.replace(gpu, count=4)
    assert GpuFacts.parse(group.encode()) == group
    assert from_environment({"LONGHAUL_GPU": gpu.encode()}).gpu == gpu
    assert from_environment({"LONGHAUL_GPU": ""}).gpu is None


@pytest.mark.parametrize(
    "text", ["NVIDIA H200", "[]", '{"name": "NVIDIA H200"}', '{"name": "a", "memory_bytes": null}']
)
def test_what_is_no_gpu_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"LONGHAUL_GPU is .*; it is JSON such as"):
        GpuFacts.parse(text)


def test_the_reference_gpu_is_known_in_full() -> None:
    assert REFERENCE.memory_bytes / 2**30 == pytest.approx(31.84, abs=0.01)
    assert peak_flops(REFERENCE.name) == 209.5e12
    assert memory_bandwidth(REFERENCE.name) == 1.792e12
    assert memory_bandwidth("NVIDIA T4") is None
