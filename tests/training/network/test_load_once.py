"""benchmarks.load_once on a small shape: the same check, the same control."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def figures(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load_once", "--size", "tiny", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_a_model_is_in_memory_once_and_the_check_would_notice_otherwise() -> None:
    found = figures()
    assert found["load_peak_ratio"] <= 1.05
    assert (found["loads"], found["copies"]) == (1, 0)
    assert found["parameter_bytes"] <= found["mapped_weight_bytes"] < 1.01 * found["parameter_bytes"]
    assert found["control_ratio"] >= 1.5
    assert len(found["control_refused"]) == 2


def test_converting_fp32_holds_a_piece_at_a_time() -> None:
    found = figures("--convert")
    assert found["shards"] > 1
    assert found["convert_host_growth_bytes"] < 200 * 2**20 < found["source_bytes"]
