"""The plan for FLAN-T5-XL against torch's real allocator."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.local import ROOT

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(300)]


def test_what_is_planned_is_what_is_allocated() -> None:
    command = [sys.executable, "-m", "benchmarks.simulated_gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["measured"]) == 18  # of adamw_8bit and adafactor; XL does not fit with adamw
    assert result["over_plan_mib"] <= 4
