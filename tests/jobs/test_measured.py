"""What was measured of a GPU is kept by GPU and driver, and replaces nominal figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.disk.measured_file import keep_measured, measured_file, read_measured
from jobs.gpus import GpuFacts
from jobs.heartbeat import Gpu
from jobs.measured import RATES, MeasuredGpu, TrainingRate

UUID = "GPU-51a00000-0000-4000-8000-000000000001"
MEASURED = MeasuredGpu(driver="580.95", examined_at=1, gemm_flops=2e14, rows_per_s={"128/256": 30.0})


def test_it_is_read_again_for_the_same_driver_alone(tmp_path: Path) -> None:
    assert read_measured(tmp_path, UUID, "580.95") is None
    keep_measured(tmp_path, UUID, MEASURED)
    assert read_measured(tmp_path, UUID, "580.95") == MEASURED
    assert read_measured(tmp_path, UUID.removeprefix("GPU-"), "580.95") == MEASURED
    assert read_measured(tmp_path, UUID, "590.10") is None and read_measured(tmp_path, UUID, None) is None


def test_a_damaged_file_is_as_none_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep_measured(tmp_path, UUID, MEASURED)
    measured_file(tmp_path, UUID).write_text("{")
    for _ in range(3):  # heartbeats
        assert read_measured(tmp_path, UUID, "580.95") is None
    assert caplog.text.count("cannot be read, so nominal figures are used") == 1
    measured_file(tmp_path, UUID).write_text('{"driver": "580.95", "memory_bytes_per_s": -1.0}')
    assert read_measured(tmp_path, UUID, "580.95") is None


def test_a_job_is_planned_with_it() -> None:
    gpu = Gpu(uuid=UUID, name="NVIDIA GeForce RTX 5090", memory_bytes=2**35, driver="580.95")
    assert gpu.facts.peak_flops == 209.5e12
    examined = gpu.model_copy(update={"measured": MEASURED})
    assert examined.facts.peak_flops == 2e14
    assert GpuFacts.parse(examined.facts.encode()) == examined.facts
    assert examined.facts.memory_bandwidth == 1.792e12, "as the data sheet says"


def rate(parameters: int, flops_per_s: float, *, step_flops: float = 4e14) -> TrainingRate:
    return TrainingRate(parameters=parameters, compiled=True, step_flops=step_flops, flops_per_s=flops_per_s)


def test_the_newest_training_rates_are_kept_a_rate_for_each_size_of_model_and_step() -> None:
    measured = MEASURED
    for parameters in [*range(RATES + 4), 10]:
        measured = measured.with_training(rate(parameters, 1e12 + parameters))
    kept = [each.parameters for each in measured.training]
    assert kept == [*(count for count in range(4, RATES + 4) if count != 10), 10]
    measured = measured.with_training(rate(10, 2e12, step_flops=9.9e13)).with_training(rate(10, 3e12, step_flops=9e13))
    assert [each.flops_per_s for each in measured.training][-2:] == [1e12 + 10, 3e12]
    assert measured.gemm_flops == MEASURED.gemm_flops
    again = MeasuredGpu.model_validate_json(measured.model_dump_json())
    assert again == measured
    facts = GpuFacts("a GPU", 2**35, measured)
    assert GpuFacts.parse(facts.encode()) == facts
    gpu = Gpu(uuid=UUID, name="a GPU", memory_bytes=2**35, driver="580.95", measured=measured)
    assert Gpu.model_validate(gpu.model_dump()) == Gpu.model_validate_json(gpu.model_dump_json()) == gpu
