"""The doctor on a GPU that counts and computes nothing: bytes, dispatch, graphs and waits are right."""

from __future__ import annotations

import gc
import math
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jobs.gpus import GpuFacts
from worker.training.doctor import speed
from worker.training.doctor.finding import GROUPS, Examination, Finding, run_group
from worker.training.tasks.seq2seq import compiled

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


def examine(group: str, folder: Path) -> dict[str, Finding]:
    gc.collect()  # a group has a process of its own, in which no other test has left anything on the GPU
    torch.cuda.empty_cache()
    found: dict[str, Finding] = {}
    gpu = GpuFacts("NVIDIA GeForce RTX 5090", 32_607 * 2**20)
    examination = Examination("cuda", folder, "tiny", math.inf, gpu)  # on a slow machine, too, nothing is left out
    run_group(group, examination, lambda finding: found.update({finding.check: finding}))
    for finding in found.values():
        print(finding.line)
    assert found.keys() == set(GROUPS[group])
    return found


def test_memory_is_what_the_driver_counts(tmp_path: Path) -> None:
    found = examine("memory", tmp_path)
    assert {finding.status for finding in found.values()} <= {"PASS", "WARN"}  # other tests have a context here
    assert abs(found["hard_limit"].values["off_bytes"]) < 64 * 2**20


def test_a_gpu_faster_than_its_data_sheet_is_not_believed_and_a_host_that_updates_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "LONG_S", 0.1)
    monkeypatch.setattr(speed, "UPDATED", 2**20)
    # Seconds of this thread: what else runs here takes none of them.
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=time.thread_time))
    found = examine("speed", tmp_path)
    assert found["gemm"].status == "FAIL" and found["gemm"].values["flops"] > 1.5 * 209.5e12
    for check in ("memory_bandwidth", "host_to_device", "device_to_host"):
        assert found[check].status == "FAIL" and "the GPU did not copy" in found[check].line
    assert found["host_update"].status in ("PASS", "WARN") and found["host_update"].values["numbers_per_s"] > 0


def test_attention_is_fused_and_gradients_of_zero_are_not_called_exact(tmp_path: Path) -> None:
    found = examine("exactness", tmp_path)
    assert found["attention_kernels"].status == "PASS"
    assert "efficient_attention_backward" in found["attention_kernels"].figure
    gradients = found["eager_gradients"]
    assert gradients.status == "FAIL" and "the device computes nothing" in gradients.figure


def test_a_job_is_within_its_plan_compiles_nothing_later_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton would take minutes; which graphs there are does not depend on what compiles them.
    monkeypatch.setattr(compiled, "compile_blocks", partial(compiled.compile_blocks, backend="aot_eager"))
    found = examine("training", tmp_path)
    for check in ("load", "compile_cold", "graphs", "waits", "update", "weights_in_place"):
        assert found[check].status == "PASS", found[check].line
    peak = found["peak"]
    assert peak.status in ("PASS", "WARN"), peak.line  # compiled by aot_eager, layers keep other tensors
    # Memory ran out and the step was done again; all gradients are zero, so that they are equal cannot be said.
    assert found["oversized_batch"].status == "FAIL" and " rows became " in found["oversized_batch"].figure
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
