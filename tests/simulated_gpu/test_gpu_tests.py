"""What is ready for a real GPU: tests of tests/gpu that no figure decides, and the benchmark of throughput."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.local import ROOT

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]


def test_those_without_numbers_pass_here() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu and no_numbers", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert " 10 passed" in done.stdout, done.stdout[-5000:]


def test_the_benchmark_measures_every_configuration(tmp_path: Path) -> None:
    """Compiled by Inductor are the layers of `test_compiled` and `test_peaks`."""
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, np.array([[8, 16, 30], [24, 40, 30]]))
    options = f"--shape tiny --rounds 1 --micro-batches 1 --largest 8 --rows 16 --backend eager --lengths {lengths}"
    command = [sys.executable, "-m", "benchmarks.gpu_throughput", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["complete"] and not result["broken"] and done.returncode == 0, done.stdout[-5000:]
