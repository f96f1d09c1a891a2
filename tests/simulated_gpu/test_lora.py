"""The plan of LoRA against torch's real allocator, for layers as wide as those of Qwen2.5-7B and FLAN-T5-XL."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.local import ROOT

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
LAYERS = "2"


def test_what_is_planned_is_what_is_allocated_and_the_host_never_waits() -> None:
    command = [sys.executable, "-m", "benchmarks.simulated_lora", "--layers", LAYERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["measured"]) == 3 * (5 + 3), "everything fits"
    assert result["host_syncs"] == 0


@pytest.mark.parametrize("model", ["qwen", "t5"])
def test_a_job_is_loaded_stepped_recovered_evaluated_saved_and_merged_within_its_plan(model: str) -> None:
    """Exactly one copy of the weights, nothing waits, attention is fused, a checkpoint's copies are pinned."""
    command = [sys.executable, "-m", "benchmarks.simulated_attempt", model, "--layers", LAYERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and result["broken"] == [], result
    assert result["recovered"] and result["attention_calls"] > 0
