"""Which GPU a train worker takes, by nvidia-smi, NVML and CUDA as they answer together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker.gpu import NoGpu, named_gpus, usable_gpu

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
SLICE = "MIG-51a00000-0000-4000-8000-00000000000f"


def test_a_slice_is_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_UUID", SLICE)
    monkeypatch.setenv("SIMGPU_NAME", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    gpu = usable_gpu(SLICE)
    assert (gpu.uuid, gpu.name) == (SLICE, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert (gpu.memory_bytes, gpu.driver) == (32607 * 2**20, "580.95.05")
    with pytest.raises(NoGpu, match="names no GPU here"):
        usable_gpu("MIG-other")


def test_a_gpu_whose_memory_is_not_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_FAIL", "nvmlDeviceGetMemoryInfo_v2=3")
    with pytest.raises(NoGpu, match=r"does not say how much memory .* has \(memory.total is '\[N/A\]'\)"):
        usable_gpu("")


def test_two_gpus_are_found_with_their_sizes_and_one_that_is_lost_hides_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("STATE", tmp_path / "gpus"), ("CARDS", 2), ("TOTAL_MIB_1", 24564), ("NAME_1", "small")):
        monkeypatch.setenv(f"SIMGPU_{name}", str(value))
    first, second = named_gpus("all")
    assert [usable_gpu(uuid).memory_bytes >> 20 for uuid in (first, second)] == [32607, 24564]
    assert named_gpus("1") == [second] and usable_gpu(second).name == "small"
    subprocess.run([sys.executable, "-m", "simgpu", "lose", "0"], check=True)
    assert (gpu := usable_gpu(second)).memory_bytes >> 20 == 24564 and gpu.driver == "580.95.05"
    with pytest.raises(NoGpu, match="GPU is lost"):
        usable_gpu(first)


def test_the_slices_of_a_gpu_stand_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_UUID", SLICE)
    assert named_gpus("all") == named_gpus("0") == [SLICE]
