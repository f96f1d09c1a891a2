"""A trainer with torch's CUDA build beside other users of the GPU, and under a driver that fails.

The simulated GPU is one for all processes of a test: the file SIMGPU_STATE.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jobs.attempt import Heartbeat
from jobs.disk.rundir import RunDir
from jobs.events import DeviceWaiting
from jobs.reasons import Reason
from tests.local import ROOT, until
from tests.training.attempts import checkpoints, facts, finished
from tests.training.conftest import MakeRun
from worker.gpu import NoGpu, usable_gpu

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(600)]
JOB: dict[str, Any] = {
    "evaluation": {"every_steps": 5, "samples": 0},  # a simulated GPU computes nothing: no text would ever end
    "checkpoint": {"every_steps": 5},
    "speed": {"compile": False},
}
LIMIT_S = 120.0
Start = Callable[..., "subprocess.Popen[str]"]
Kind = TypeVar("Kind")


@pytest.fixture(autouse=True)
def _shared_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_STATE", str(tmp_path / "gpu"))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an attempt in a process of its own, which does not outlive the test."""
    started = []

    def begin(run: RunDir, number: int = 1, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "worker.training", "train", str(run.path), "--attempt", str(number)]
        variables = os.environ | {"LONGHAUL_DEVICE": "cuda"} | environment
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def gpu(*words: str) -> None:
    """Change the GPU from outside."""
    subprocess.run([sys.executable, "-m", "simgpu", *words], check=True)


def end(process: subprocess.Popen[str]) -> str:
    """Wait for a trainer; returns its log."""
    return process.communicate(timeout=LIMIT_S)[1]


def noted(run: RunDir, kind: type[Kind]) -> list[Kind]:
    """Facts that the running attempt has noted so far."""
    return facts(run, kind) if run.attempt_file(1).exists() else []


def test_a_second_trainer_waits_for_the_gpu_and_has_it_then(make_run: MakeRun, start: Start) -> None:
    first = make_run(**JOB | {"training": {"epochs": 10_000}})
    one = start(first)
    until(lambda: first.metrics_file.exists() and len(first.metrics()) > 2, lambda: "", LIMIT_S)
    second = make_run("second", **JOB)
    other = start(second)
    until(lambda: noted(second, DeviceWaiting), lambda: "", LIMIT_S)
    assert "another trainer holds GPU" in noted(second, DeviceWaiting)[0].message
    one.terminate()
    end(one)
    assert finished(first).reason == Reason.INTERRUPTED
    log = end(other)
    assert finished(second).reason == Reason.DONE, log


@pytest.mark.parametrize(
    ("call", "figure"),
    [("nvmlDeviceGetUtilizationRates", "gpu_utilization"), ("nvmlDeviceGetMemoryInfo", "gpu_memory_used_bytes")],
)
def test_a_job_continues_when_nvml_fails_in_mid_run(make_run: MakeRun, start: Start, call: str, figure: str) -> None:
    run = make_run(**JOB)
    log = end(start(run, SIMGPU_FAIL=f"{call}@2=15"))
    assert finished(run).reason == Reason.DONE, log
    first, *_, last = run.metrics()
    assert getattr(first, figure) is not None and getattr(last, figure) is None


def test_a_driver_that_is_too_old_is_named(make_run: MakeRun, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"SIMGPU_DRIVER": "570.86.10", "SIMGPU_DRIVER_CUDA": "12080"}
    for name, value in old.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoGpu, match="driver 580 or newer"):
        usable_gpu("")  # so no worker takes a job
    run = make_run(**JOB)
    log = end(start(run))
    assert "driver on your system is too old" in log, "a trainer that is started by hand"


@pytest.mark.parametrize("calls", [30, 300, 3_000, 20_000])
def test_a_gpu_lost_in_any_phase_ends_the_attempt_without_another_reason(
    make_run: MakeRun, start: Start, calls: int
) -> None:
    """While loading, evaluating, training and saving; the next attempt begins at the newest checkpoint."""
    run = make_run(**JOB)
    process = start(run, SIMGPU_LOST_AFTER=str(calls))
    log = end(process)
    phases = {line.phase for line in run.attempt_lines(1) if isinstance(line, Heartbeat)}
    assert process.returncode in (1, -6), log
    assert all(line.kind != "finished" for line in run.attempt_lines(1)), phases
    with pytest.raises(NoGpu):
        usable_gpu("")  # which makes it `gpu_lost` for the supervisor
    gpu("restore")
    kept = checkpoints(run) if run.checkpoints.exists() else []
    log = end(start(run, number=2))
    assert finished(run, 2).reason == Reason.DONE, log
    began = min(line.step for line in run.attempt_lines(2) if isinstance(line, Heartbeat) and line.phase == "step")
    assert began == (int(kept[-1].removeprefix("step-")) if kept else 0)
