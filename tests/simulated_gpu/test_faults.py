"""A trainer with torch's CUDA build beside other users of the GPU, and under a driver that fails.

The simulated GPU is one for all processes of a test: the file SIMGPU_STATE.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jobs.attempt import Heartbeat
from jobs.disk.rundir import RunDir
from jobs.reasons import Reason
from jobs.trainer_facts import DeviceWaiting
from tests.simulated_gpu.trainers import WITHIN_S, train, training
from tests.support.local import until
from tests.training.attempts import checkpoints, facts, finished
from tests.training.conftest import MakeRun
from worker.gpu import NoGpu, usable_gpu

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
JOB: dict[str, Any] = {
    "evaluation": {"every_steps": 5, "samples": 0},  # a simulated GPU computes nothing: no text would ever end
    "checkpoint": {"every_steps": 5},
    "speed": {"compile": False},
}
Kind = TypeVar("Kind")


@pytest.fixture(autouse=True)
def _shared_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_STATE", str(tmp_path / "gpu"))


def noted(run: RunDir, kind: type[Kind]) -> list[Kind]:
    """Facts that the running attempt has noted so far."""
    return facts(run, kind) if run.attempt_file(1).exists() else []


def test_a_second_trainer_waits_for_the_gpu_and_has_it_then(make_run: MakeRun) -> None:
    first, second = make_run(**JOB | {"training": {"epochs": 10_000}}), make_run("second", **JOB)
    with training(first) as one:
        until(lambda: first.metrics_file.exists() and first.metrics(), lambda: "", WITHIN_S)
        with training(second) as other:
            until(lambda: noted(second, DeviceWaiting), lambda: "", WITHIN_S)
            assert "another trainer holds GPU" in noted(second, DeviceWaiting)[0].message
            one.process.terminate()
            one.end()
            assert finished(first).reason == Reason.INTERRUPTED
            log = other.end()
    assert finished(second).reason == Reason.DONE, log


@pytest.mark.parametrize(
    ("call", "figure"),
    [("nvmlDeviceGetUtilizationRates", "gpu_utilization"), ("nvmlDeviceGetMemoryInfo", "gpu_memory_used_bytes")],
)
def test_a_job_continues_when_nvml_fails_in_mid_run(make_run: MakeRun, call: str, figure: str) -> None:
    run = make_run(**JOB)
    train(run, SIMGPU_FAIL=f"{call}@2=15")
    first, *_, last = run.metrics()
    assert getattr(first, figure) is not None and getattr(last, figure) is None


def test_a_driver_that_is_too_old_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"SIMGPU_DRIVER": "570.86.10", "SIMGPU_DRIVER_CUDA": "12080"}
    for name, value in old.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoGpu, match="driver 580 or newer"):
        usable_gpu("")  # so no worker takes a job
    with training(make_run(**JOB)) as trainer:
        log = trainer.end()
    assert "driver on your system is too old" in log, "a trainer that is started by hand"


@pytest.mark.parametrize("calls", [30, 300, 3_000, 20_000])
def test_a_gpu_lost_in_any_phase_ends_the_attempt_without_another_reason(make_run: MakeRun, calls: int) -> None:
    """While loading, evaluating, training and saving; the next attempt begins at the newest checkpoint."""
    run = make_run(**JOB)
    with training(run, SIMGPU_LOST_AFTER=str(calls)) as trainer:
        log = trainer.end()
    phases = {line.phase for line in run.attempt_lines(1) if isinstance(line, Heartbeat)}
    assert trainer.process.exitcode in (1, -6), log
    assert all(line.kind != "finished" for line in run.attempt_lines(1)), phases
    with pytest.raises(NoGpu):
        usable_gpu("")  # which makes it `gpu_lost` for the supervisor
    subprocess.run([sys.executable, "-m", "simgpu", "restore"], check=True)
    kept = checkpoints(run) if run.checkpoints.exists() else []
    train(run, number=2)
    began = min(line.step for line in run.attempt_lines(2) if isinstance(line, Heartbeat) and line.phase == "step")
    assert began == (int(kept[-1].removeprefix("step-")) if kept else 0)
