"""Which GPU a train worker takes, by nvidia-smi, NVML and CUDA as they answer together."""

from __future__ import annotations

import pytest

from worker.gpu import NoGpu, usable_gpu

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(120)]
SLICE = "MIG-51a00000-0000-4000-8000-00000000000f"


def test_a_slice_is_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_UUID", SLICE)
    monkeypatch.setenv("SIMGPU_NAME", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    gpu = usable_gpu(SLICE)
    assert (gpu.uuid, gpu.name) == (SLICE, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert (gpu.memory_bytes, gpu.driver) == (32607 * 2**20, "580.95.05")
    with pytest.raises(NoGpu, match="NVML knows no such slice"):
        usable_gpu("MIG-other")


def test_a_gpu_whose_memory_is_not_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMGPU_FAIL", "nvmlDeviceGetMemoryInfo_v2=3")
    with pytest.raises(NoGpu, match=r"does not say how much memory .* has \(memory.total is '\[N/A\]'\)"):
        usable_gpu("")
