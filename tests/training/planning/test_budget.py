"""What a job may use, from whom that is known, and what stays free."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.errors import Rejected
from jobs.gpus import GpuFacts
from jobs.spec import MemorySpec, ResourcesSpec
from jobs.text.units import GIB
from worker.training.machine.host import host_memory
from worker.training.planning.budget import find_budget

RTX_4090 = GpuFacts("NVIDIA GeForce RTX 4090", 24_564 * 2**20)


@pytest.mark.parametrize(
    ("budget", "gpu", "source", "gib", "name"),
    [
        ("auto", RTX_4090, "gpu", 23.49, "NVIDIA GeForce RTX 4090"),
        ("auto", None, "assumed", 31.34, "NVIDIA GeForce RTX 5090"),
        (20, RTX_4090, "job", 20.0, "NVIDIA GeForce RTX 4090"),
        (40, None, "job", 40.0, "NVIDIA GeForce RTX 5090"),
    ],
)
def test_on_a_gpu(budget: Any, gpu: GpuFacts | None, source: str, gib: float, name: str) -> None:
    found = find_budget(MemorySpec(budget=budget), "cuda", gpu)
    assert (found.source, found.gpu_name) == (source, name)
    assert found.bytes / GIB == pytest.approx(gib, abs=0.01)
    assert found.margin == int(0.03 * found.bytes)
    assert found.limit == found.bytes - found.margin


def test_on_a_cpu_it_is_what_the_host_has_free_unless_the_job_says() -> None:
    found = find_budget(MemorySpec(), "cpu", RTX_4090)
    assert (found.source, found.gpu, found.margin) == ("host", None, 0)
    assert 0.5 < found.bytes / host_memory().available < 2
    said = find_budget(MemorySpec(budget=1.5), "cpu", None)
    assert (said.source, said.bytes, said.limit) == ("job", int(1.5 * GIB), int(1.5 * GIB))


def test_more_than_the_gpu_has_is_refused_with_numbers() -> None:
    with pytest.raises(Rejected) as caught:
        find_budget(MemorySpec(budget=24), "cuda", RTX_4090)
    error = caught.value
    assert (error.detail_code, error.param) == ("budget_too_large", "memory.budget")
    assert "memory.budget is 24.0 GiB, but NVIDIA GeForce RTX 4090 has 23.5 GiB for jobs (24.0 GiB less" in str(error)
    assert error.hint == "set memory.budget to at most 23.4, or leave it at auto"
    find_budget(MemorySpec(budget=23.4), "cuda", RTX_4090)


@pytest.mark.parametrize(
    ("asked", "gib", "name"), [(32, 31.34, "NVIDIA GeForce RTX 5090"), (80, 79.5, "a GPU of 80.0 GiB")]
)
def test_a_job_that_asks_for_a_larger_gpu_than_is_known_is_planned_for_such_a_one(
    asked: float, gib: float, name: str
) -> None:
    found = find_budget(MemorySpec(), "cuda", None, ResourcesSpec(gpu_memory_gib=asked))
    assert (found.source, found.gpu_name) == ("assumed", name)
    assert found.bytes / GIB == pytest.approx(gib, abs=0.01)
    assert find_budget(MemorySpec(), "cuda", RTX_4090, ResourcesSpec(gpu_memory_gib=asked)).gpu == RTX_4090
