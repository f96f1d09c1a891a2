"""A dry run of the benchmark that compares the optimizers: far too short to judge them."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import bf16_quality


def test_the_benchmark_runs_every_optimizer_and_says_so_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert bf16_quality.main(["--steps", "3", "--pretrain-steps", "3"]) == 1  # in three steps no gap can open
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {key for key in found if key.endswith("_gap")} == {
        "adamw_gap",
        "adamw_8bit_gap",
        "adafactor_gap",
        "bf16_adamw_gap",
    }
    assert all(abs(value) < 0.01 for key, value in found.items() if key.endswith("_gap"))
    changed = {name: row["changed_weights"] for name, row in found["table"].items()}
    # Rounded to the nearest, most weights stay where they were.
    assert changed["bf16_adamw"] < changed["adamw_8bit"] < changed["fp32"]
