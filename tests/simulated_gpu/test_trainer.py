"""Attempts with torch's CUDA build: a budget, and what fails besides kernels."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.measured import MeasuredGpu
from jobs.reasons import Reason
from jobs.text.units import GIB, MIB
from jobs.trainer_facts import DeviceWaiting, ModelLoaded, OomRecovered
from tests.simulated_gpu.trainers import train
from tests.training.attempts import checkpoints, facts, finished
from tests.training.conftest import MakeRun, write_model
from worker.training.journal import Journal, StopSignal
from worker.training.machine.out_of_memory import MemoryShortage
from worker.training.memory.hard_limit import gpu_fraction, on_gpu
from worker.training.settings import TrainerSettings
from worker.training.train import train as train_here

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
JOB: dict[str, Any] = {
    "evaluation": {"every_steps": 1000, "samples": 0},  # a simulated GPU computes nothing: no text would ever end
    "speed": {"compile": False},
}


def test_a_budget_is_the_limit_of_torchs_allocator_for_as_long_as_the_attempt() -> None:
    total = torch.cuda.get_device_properties().total_memory
    with on_gpu(torch.device("cuda"), 8 * GIB):
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(gpu_fraction(8 * GIB, total))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
        shortage = MemoryShortage.of(caught.value, torch.device("cuda"))
        assert shortage is not None and shortage.limited
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_a_job_with_a_budget_trains_in_segments_that_expand(make_run: MakeRun) -> None:
    assert "expandable segments" not in train(make_run(memory={"budget": 8}, **JOB))


def test_no_room_for_the_context_of_cublas_is_out_of_memory(make_run: MakeRun) -> None:
    log = train(make_run(**JOB), until=Reason.OUT_OF_MEMORY, SIMGPU_FAIL="cublasCreate_v2=1")
    assert "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`" in log


def test_memory_that_runs_out_where_nvml_names_no_processes_is_out_of_memory(make_run: MakeRun) -> None:
    run = make_run(memory={"budget": 0.1}, **JOB)
    log = train(run, until=Reason.OUT_OF_MEMORY, SIMGPU_FAIL="nvmlDeviceGetComputeRunningProcesses=3")
    assert "NVML_SUCCESS == r INTERNAL ASSERT FAILED" in log


@pytest.mark.parametrize(
    ("function", "code"),
    [("nvmlInit_v2", 9), ("nvmlDeviceGetHandleByPciBusId_v2", 6), ("nvmlDeviceGetGpuFabricInfoV", 3)],
)
def test_a_job_trains_without_expandable_segments_where_nvml_cannot_tell_of_a_fabric(
    make_run: MakeRun, function: str, code: int
) -> None:
    log = train(make_run(**JOB), SIMGPU_FAIL=f"{function}={code}")
    assert (
        f"expandable segments are off, so free GPU memory may fragment: NVML's {function} fails with code {code}" in log
    )


def test_a_job_trains_without_nvml(make_run: MakeRun) -> None:
    folders = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)
    without = os.pathsep.join(folder for folder in folders if not (Path(folder) / "libnvidia-ml.so.1").exists())
    log = train(make_run(**JOB), LD_LIBRARY_PATH=without)
    assert "expandable segments are off" in log and "libnvidia-ml.so.1: cannot open shared object file" in log


def test_a_checkpoint_is_streamed_where_no_memory_can_be_pinned_for_its_copy(
    make_run: MakeRun, model_folder: Path
) -> None:
    """Batches still can: the driver limits what a process pins, as on WSL2."""
    write_model(model_folder, d_model=128, d_ff=1024)
    run = make_run(checkpoint={"every_steps": 5}, **JOB)
    log = train(run, SIMGPU_HOST_MIB="2")
    assert log.count("checkpoints are streamed: there is no memory for copies: CUDA error: out of memory") == 1
    assert checkpoints(run) == ["step-00000020", "step-00000021"]


def test_a_job_trains_on_a_slice(make_run: MakeRun) -> None:
    uuid = "MIG-51a00000-0000-4000-8000-00000000000f"
    train(make_run(**JOB), SIMGPU_UUID=uuid, CUDA_VISIBLE_DEVICES=uuid)


class Neighbour(StopSignal):
    """Takes all that is free of the GPU after some steps, and gives it back when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0
        self._simgpu: Any = importlib.import_module("simgpu")

    def asked(self) -> bool:
        self._looks += 1
        if self._looks in (8, 10):
            self._simgpu.foreign(32_000 * MIB if self._looks == 8 else 0)
        return super().asked()


def test_memory_that_another_process_takes_in_mid_run_is_waited_for(make_run: MakeRun, model_folder: Path) -> None:
    write_model(model_folder, d_model=512, d_ff=4096)  # large enough to ask for memory in every step
    run = make_run(memory={"empty_cache_steps": 1}, **JOB)
    settings = TrainerSettings(data=Path(), prepared=Path(), models=Path(), device="cuda", offline=True)
    train_here(run, settings, Journal(run.attempt_file(1)), Neighbour(), 1)
    assert finished(run).reason == Reason.DONE
    [waiting], [recovered] = facts(run, DeviceWaiting), facts(run, OomRecovered)
    assert "others hold 31.2 GiB by python3 (pid 4711)" in waiting.message
    assert recovered.cause == "other_processes" and recovered.micro_batch_after == recovered.micro_batch_before


def test_200_steps_are_kept_as_the_speed_of_the_model_on_this_gpu(make_run: MakeRun) -> None:
    run = make_run(training={"epochs": 41}, **JOB)
    train(run)
    [file] = (run.path.parent / ".gpus").iterdir()
    measured = MeasuredGpu.model_validate_json(file.read_bytes())
    [rate] = measured.training
    [loaded] = facts(run, ModelLoaded)
    assert (rate.parameters, rate.compiled) == (loaded.parameters, run.plan().resolved.compile)
    assert measured.examined_at is None
