"""`longhaul doctor` on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.training.doctor.finding import GROUPS

pytestmark = pytest.mark.timeout(900)


def test_the_command_examines_this_machine(tmp_path: Path) -> None:
    """Three groups of it, as a user would; a small job is killed and resumed."""
    groups = ("machine", "speed", "resume")
    words = [word for group in groups for word in ("--only", group)]
    longhaul = Path(sys.executable).with_name("longhaul")
    done = subprocess.run(
        [longhaul, "doctor", "--json", "--report", "page.md", "--seconds", "800", *words],
        cwd=tmp_path, env=os.environ | {"LONGHAUL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = done.stdout.splitlines()
    report = json.loads(line)
    found = {each["check"]: each for each in report["findings"]}
    assert set(found) == {check for group in groups for check in GROUPS[group]}
    assert found["resume"]["status"] == "PASS" and "killed after the checkpoint of step" in found["resume"]["figure"]
    assert found["compiler"]["status"] == "PASS" and found["gemm"]["figure"] == "no GPU"
    assert "| PASS | resume |" in (tmp_path / "page.md").read_text()
    assert [file.name for file in (tmp_path / "runs" / ".doctor").iterdir()] == []
