"""The plan against torch's real allocator, for layers as wide as FLAN-T5-XL's (a quarter of them)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.local import ROOT

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]


def test_what_is_planned_is_what_is_allocated() -> None:
    command = [sys.executable, "-m", "benchmarks.simulated_gpu", "--model", "xl-width"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # With each of 4 optimizers: 10 kinds of micro-batches, eager and compiled, evaluation, update, checkpoint; of
    # `adamw_offload`, whose states are on the host, no copies for a checkpoint.
    assert len(result["measured"]) == 4 * (2 * 10 + 3) - 1
    assert result["over_plan_mib"] <= 4
    assert result["graphs"] == 14, "compiled before the first step"
