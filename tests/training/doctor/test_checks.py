"""Checks that run on a CPU: they pass where all is well, and fail for the reason that they are there for."""

from __future__ import annotations

import math
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.trainer_facts import CheckpointSaved
from worker.training.doctor import exactness, machine, training
from worker.training.doctor.exactness import GradientComparison, GradientError, compare
from worker.training.doctor.finding import Examination
from worker.training.doctor.measured_steps import Steps
from worker.training.machine.nvml import GpuMemory, GpuUse
from worker.training.tasks.seq2seq.fused import FusedT5LayerNorm


@pytest.fixture
def on_cpu(tmp_path: Path) -> Examination:
    return Examination("cpu", tmp_path, None, math.inf)


@pytest.fixture(scope="module")
def comparison() -> GradientComparison:
    return GradientComparison(torch.device("cpu"))


def test_gradients_of_the_fused_model_are_right(comparison: GradientComparison) -> None:
    found = comparison.check("eager_gradients", compiled=False)
    assert found.status == "PASS" and found.values["mean_error"] < 2 * found.values["mean_error_stock"]


def test_a_wrong_kernel_is_found(comparison: GradientComparison, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(norm: FusedT5LayerNorm, hidden: torch.Tensor) -> torch.Tensor:
        return (
            1.05 * hidden * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True)).to(hidden.dtype) * norm.weight
        )

    monkeypatch.setattr(FusedT5LayerNorm, "forward", forward)
    assert comparison.check("eager_gradients", compiled=False).status == "FAIL"


def test_layers_that_do_not_compile_are_an_error(
    comparison: GradientComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "/nowhere/g++")
    with pytest.raises(RuntimeError, match="layers do not compile"):
        comparison.check("compiled_gradients", compiled=True)


def test_a_device_that_computes_nothing_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exactness.gradients
    monkeypatch.setattr(exactness, "gradients", lambda model: {name: 0 * each for name, each in real(model).items()})
    with pytest.raises(ValueError, match="53 of 53 gradients are zero in float64: the device computes nothing"):
        GradientComparison(torch.device("cpu")).check("eager_gradients", compiled=False)


@pytest.mark.parametrize(
    ("ours", "status"),
    [
        (GradientError(0.019, 0.0), "PASS"),
        (GradientError(0.021, 0.0), "FAIL"),
        (GradientError(0.01, 0.009), "FAIL"),  # all of it in one direction
        (GradientError(float("nan"), 0.0), "FAIL"),
    ],
)
def test_twice_the_error_of_the_stock_model_is_too_much(ours: GradientError, status: str) -> None:
    assert compare("x", {"w": ours}, {"w": GradientError(0.01, 0.001)}).status == status


def test_what_rounding_explains_is_let_go() -> None:
    assert compare("x", {"w": GradientError(0.007, 0.007)}, {"w": GradientError(1e-6, 1e-6)}).status == "PASS"


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_75", "sm_80"], (8, 6), True),
        (["sm_90"], (12, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        (["sm_120"], (12, 0), True),
        (["sm_120a"], (12, 0), True),
        (["sm_89"], (8, 6), False),
    ],
)
def test_which_builds_of_torch_run_on_which_gpu(built: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert machine.runs(capability, built) is runs


def test_a_machine_without_a_compiler_is_warned_of(on_cpu: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = machine.checks(on_cpu)["compiler"]()
    assert found.status == "WARN" and "apt install g++" in str(found.hint)


def test_a_full_disk_fails(on_cpu: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    assert machine.checks(on_cpu)["disk"]().status == "FAIL"


def test_the_rate_of_the_disk_is_measured_and_its_file_is_gone(on_cpu: Examination) -> None:
    found = machine.checks(on_cpu)["disk"]()
    assert found.values["bytes_per_s"] > 0 and list(on_cpu.folder.iterdir()) == []


@pytest.mark.parametrize(("bits", "figure"), [(0, "synchronized"), (0x40, "not synchronized"), (None, "unknown")])
def test_a_clock_that_nothing_sets_is_warned_of(
    on_cpu: Examination, monkeypatch: pytest.MonkeyPatch, bits: int | None, figure: str
) -> None:
    monkeypatch.setattr(machine, "kernel_clock", lambda: bits)
    found = machine.checks(on_cpu)["clock"]()
    assert (found.figure, found.status) == (figure, "PASS" if bits == 0 else "WARN")


def test_the_kernel_tells_of_its_clock() -> None:
    bits = machine.kernel_clock()
    assert bits is not None and 0 <= bits < 2**16


@pytest.mark.parametrize(("uuid", "release", "partial"), [
    ("MIG-51a00000", "6.12.0", True), ("GPU-51a00000", "5.15.167.4-microsoft-standard-WSL2", True),
    ("GPU-51a00000", "6.12.0", False),
])  # fmt: skip
def test_where_nvml_reports_a_part_nothing_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, uuid: str, release: str, partial: bool
) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    assert machine.is_partial(uuid) is partial


class PartialGpu:
    """NVML of a GPU in a virtual machine or cut into slices: memory, and nothing else."""

    def memory(self) -> GpuMemory:
        return GpuMemory(total=2**35, free=2**35, used=0)

    def processes(self) -> None:
        return None

    def use(self) -> GpuUse:
        return GpuUse()


@pytest.mark.parametrize(
    ("gpu", "status", "hint"), [(PartialGpu(), "WARN", machine.PARTIAL), (None, "FAIL", "in a container")]
)
def test_nvml_that_is_missing_is_not_taken_for_one_that_reports_a_part(
    on_cpu: Examination, monkeypatch: pytest.MonkeyPatch, gpu: PartialGpu | None, status: str, hint: str
) -> None:
    monkeypatch.setattr(machine, "gpu_id", lambda _: "MIG-51a00000")
    monkeypatch.setattr(machine, "open_gpu", lambda _: gpu)
    found = machine.checks(on_cpu)["nvml"]()
    assert found.status == status and str(found.hint).startswith(hint)


def test_a_model_for_which_there_is_no_room_is_not_written(
    on_cpu: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    checks = training.checks(on_cpu)
    found = checks["load"]()
    assert found.status == "FAIL" and "1 MiB of disk are free" in found.line, found.line
    assert checks["graphs"]().figure == "the model was not loaded" and list(on_cpu.folder.iterdir()) == []


GOOD = Steps(
    count=training.MEASURED_STEPS, rows=128, flops=1.2e14, seconds=1.0, allocated=950,
    waits=training.MEASURED_STEPS, graphs=0,
    planned={"weights": 1000, "context": 77},
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "change", "status"),
    [
        ("peak", {}, "PASS"), ("peak", {"allocated": 1001}, "FAIL"), ("peak", {"allocated": 899}, "WARN"),
        ("waits", {}, "PASS"), ("waits", {"waits": training.MEASURED_STEPS + 1}, "FAIL"),
        ("mfu", {}, "PASS"), ("mfu", {"seconds": 1.55}, "WARN"), ("mfu", {"seconds": 2.1}, "FAIL"),
        ("mfu", {"seconds": 0.5}, "FAIL"),
    ],
)  # fmt: skip
def test_figures_of_steps_are_judged(on_cpu: Examination, check: str, change: dict[str, Any], status: str) -> None:
    examined = training.TrainingChecks(replace(on_cpu, gemm_flops=2e14))
    examined.steps = replace(GOOD, **change)
    found = getattr(examined, check)()
    assert found.status == status, found.line


@pytest.mark.parametrize(
    ("seconds", "cuda", "status"), [(0.29, True, "PASS"), (0.31, True, "FAIL"), (9.0, False, "PASS")]
)
def test_an_update_has_a_limit_on_a_gpu(seconds: float, cuda: bool, status: str) -> None:
    assert training.judge_update(seconds, "adamw_8bit", cuda=cuda).status == status


@pytest.mark.parametrize(
    ("stall_s", "same", "cuda", "status"),
    [
        (0.9, True, True, "PASS"),
        (1.1, True, True, "WARN"),
        (1.1, True, False, "PASS"),
        (0.1, False, True, "FAIL"),
        (1.1, False, False, "FAIL"),
    ],
)
def test_a_checkpoint_beside_a_step_is_the_same_and_costs_little(
    stall_s: float, same: bool, cuda: bool, status: str
) -> None:
    saved = CheckpointSaved(step=1, path="checkpoints/step-00000001", bytes=10**10, seconds=10.0)
    found = training.judge_checkpoint_copy(stall_s, saved, same=same, cuda=cuda)
    assert (found.status, found.values["bytes_per_s"]) == (status, 1e9)


@pytest.mark.parametrize("check", ["peak", "waits", "mfu", "update", "checkpoint_copy"])
def test_without_steps_nothing_is_judged(on_cpu: Examination, check: str) -> None:
    assert training.checks(on_cpu)[check]().line == f"SKIP  {check}: no steps were made"
