"""The first steps of an attempt say how fast its model trains on this GPU, for the plans of later jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.disk.measured_file import keep_measured, measured_file, read_measured
from jobs.measured import MOST_OF_OTHERS, MeasuredGpu, TrainingRate
from worker.training.gpu_speed import STEPS, GpuSpeed

UUID, NAME, DRIVER = "GPU-51a00000-0000-4000-8000-000000000001", "NVIDIA GeForce RTX 5090", "580.95"
EXAMINED = MeasuredGpu(driver=DRIVER, examined_at=1, gemm_flops=2e14)


def speed(runs: Path, *, driver: str | None = DRIVER, parameters: int = 8) -> GpuSpeed:
    return GpuSpeed(runs, UUID, NAME, driver, parameters=parameters, compiled=True, recomputed=0.5)


def rate(flops_per_s: float, *, step_flops: float = 2e12, parameters: int = 8) -> TrainingRate:
    return TrainingRate(parameters=parameters, compiled=True, step_flops=step_flops, flops_per_s=flops_per_s)


def test_the_peak_is_the_measured_one_else_that_of_the_data_sheet(tmp_path: Path) -> None:
    assert speed(tmp_path).peak == 209.5e12
    keep_measured(tmp_path, UUID, EXAMINED)
    assert speed(tmp_path).peak == 2e14
    assert speed(tmp_path, driver="590.10").peak == 209.5e12


def test_200_steps_after_the_first_are_kept_with_recomputed_layers_as_work(tmp_path: Path) -> None:
    keep_measured(tmp_path, UUID, EXAMINED)
    measured = speed(tmp_path)
    measured.add(1e12, 60.0)  # the first step warms up
    for number in range(STEPS):
        assert read_measured(tmp_path, UUID, DRIVER) == EXAMINED
        measured.add(1e12, 0.01 + 0.02 * (number % 2))
    kept = read_measured(tmp_path, UUID, DRIVER)
    assert kept is not None
    [found] = kept.training
    assert found == rate(found.flops_per_s, step_flops=1e12) and found.flops_per_s == pytest.approx(1.5e12 / 0.02)
    assert kept.gemm_flops == EXAMINED.gemm_flops
    before = measured_file(tmp_path, UUID).stat().st_mtime_ns
    measured.add(1e15, 0.01)
    assert measured_file(tmp_path, UUID).stat().st_mtime_ns == before, "the first steps count, no later ones"


def test_a_step_that_stood_still_does_not_count(tmp_path: Path) -> None:
    measured = speed(tmp_path)
    for seconds in (60.0, *[5.0] * 150, 8 * 3600.0, *[5.0] * 48, 240.0):
        measured.add(5e12, seconds)
    kept = read_measured(tmp_path, UUID, DRIVER)
    assert kept is not None and kept.training == [rate(1.5e12, step_flops=5e12)]


def test_beside_another_job_no_rate_is_kept(tmp_path: Path) -> None:
    for other_bytes, rates in ((MOST_OF_OTHERS + 1, None), (MOST_OF_OTHERS, [rate(3e12)])):
        measured = speed(tmp_path)
        for _ in range(STEPS + 1):
            measured.beside(other_bytes)
            measured.add(2e12, 1.0)
            measured.beside(0)
        kept = read_measured(tmp_path, UUID, DRIVER)
        assert (kept and kept.training) == rates


def test_a_gpu_that_was_never_examined_has_the_rate_of_jobs_alone(tmp_path: Path) -> None:
    for parameters in (8, 9):
        measured = speed(tmp_path, parameters=parameters)
        for _ in range(STEPS + 1):
            measured.add(2e12, 1.0)
    kept = read_measured(tmp_path, UUID, DRIVER)
    assert kept == MeasuredGpu(driver=DRIVER, training=[rate(3e12), rate(3e12, parameters=9)])


@pytest.mark.parametrize("driver", [None, DRIVER])
def test_what_cannot_be_kept_stops_no_job(tmp_path: Path, driver: str | None, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".gpus").write_text("no folder")
    measured = speed(tmp_path, driver=driver)
    for _ in range(STEPS + 1):
        measured.add(2e12, 1.0)
    assert ("the training speed of NVIDIA GeForce RTX 5090 is not kept" in caplog.text) is (driver is not None)
