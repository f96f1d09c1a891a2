"""The GPU through NVML's C interface, with a stand-in for the driver's library compiled here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.text.units import GIB
from jobs.trainer_facts import GpuProcess
from tests.training.conftest import tiny_spec
from tests.training.gpu_stand_in import UUID, library
from tests.training.stepping import step_result
from worker.training.machine.nvml import GpuMemory, GpuUse, open_gpu
from worker.training.machine.usage import Cache
from worker.training.pace import Pace
from worker.training.window import Meter, Window


def test_what_the_gpu_says(tmp_path: Path) -> None:
    gpu = open_gpu(UUID, library(tmp_path))
    assert gpu is not None
    assert gpu.use() == GpuUse(utilization=0.97, memory_used=30 * 2**30, temperature_c=71, power_w=412.5)
    assert gpu.memory() == GpuMemory(total=34 * GIB, free=4 * GIB, used=int(29.5 * GIB)), "without the driver's own"
    assert gpu.processes() == [
        GpuProcess(pid=4711, name="python3", memory_bytes=28 * GIB),
        GpuProcess(pid=4712, name=None, memory_bytes=None),
    ]


def test_what_a_gpu_does_not_tell_is_none(tmp_path: Path) -> None:
    """A MIG slice has no utilization of its own; an old driver lacks the newer function."""
    gpu = open_gpu("MIG-1", library(tmp_path, mig=True))
    assert gpu is not None
    assert gpu.use() == GpuUse(utilization=None, memory_used=30 * 2**30, temperature_c=71, power_w=412.5)
    assert gpu.processes() is None
    assert gpu.memory() == GpuMemory(total=34 * GIB, free=4 * GIB, used=30 * GIB), "an old driver counts its own"


def test_no_driver_and_no_such_gpu_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_gpu(UUID, str(tmp_path / "libnvidia-ml.so.1")) is None
    assert open_gpu("other", library(tmp_path)) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "libnvidia-ml.so.1" in caplog.records[0].message
    assert "NVML knows no GPU GPU-other (error 6)" in caplog.records[1].message


def row_of(meter: Meter) -> dict[str, Any]:
    meter.pace.begin()
    meter.add(step_result(1))
    return meter.row(step_result(1), now=1.0).model_dump()


def a_meter() -> Meter:
    """On the CPU, for a run of 10 steps."""
    spec = tiny_spec()
    data = DataPlan(train="x", input="x", target="x", rows=80)
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), data)
    state = Window()
    return Meter(Cache(torch.device("cpu")), attempt=1, pace=Pace(spec, plan, state.asides), window=state)


def test_a_row_on_cpu_has_the_host_and_no_gpu() -> None:
    row = row_of(a_meter())
    assert {name: value for name, value in row.items() if name.startswith("gpu_")} == dict.fromkeys(
        (
            "gpu_utilization",
            "gpu_memory_used_bytes",
            "gpu_memory_other_processes_bytes",
            "gpu_temperature_c",
            "gpu_power_w",
        )
    )
    assert row["memory_fragmentation"] is None
    for name in ("host_memory_used_bytes", "host_memory_available_bytes", "trainer_rss_bytes"):
        assert isinstance(row[name], int)
        assert row[name] > 0


def test_a_row_has_the_gpu_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = library(tmp_path)
    meter = a_meter()
    monkeypatch.setattr(meter, "gpu", open_gpu(UUID, built))
    row = row_of(meter)
    assert (row["gpu_utilization"], row["gpu_memory_used_bytes"]) == (0.97, 30 * 2**30)
    assert (row["gpu_temperature_c"], row["gpu_power_w"]) == (71, 412.5)
