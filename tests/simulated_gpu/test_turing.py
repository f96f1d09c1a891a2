"""A GPU of compute capability 7.5 (Quadro RTX 6000), which has neither native bf16 nor flash attention."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.gpus import GpuFacts
from jobs.metrics import MetricRow
from jobs.reasons import Reason
from jobs.text.units import MIB
from jobs.trainer_facts import ModelLoaded
from tests.simulated_gpu.trainers import TURING, train
from tests.support.local import ROOT
from tests.support.samples import read_lines
from tests.training.attempts import facts, finished
from tests.training.conftest import MakeRun
from tests.training.workplace import Workplace, pairs

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
GPU = GpuFacts("Quadro RTX 6000", 24_220 * MIB, native_bf16=False)


def test_what_is_planned_for_float16_is_what_is_allocated_without_scores_of_all_positions() -> None:
    command = [sys.executable, "-m", "benchmarks.simulated_lora", "--layers", "4"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | TURING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["measured"]) == 3 * 5, "everything fits"
    assert result["max_error"] <= 0.01 and result["host_syncs"] == 0


def test_adapters_train_beside_a_model_in_float16(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    workplace.settings = dataclasses.replace(workplace.settings, device="cuda", gpu=GPU)
    workplace.rows("rows.jsonl", pairs(60))
    parts: dict[str, Any] = {
        "training": {"epochs": 2, "batch_size": 8},
        "evaluation": {"every_steps": 1000, "samples": 0},
        "log": {"every_steps": 1},
    }
    run = workplace.job(model="builtin:qwen-tiny", method="lora", **parts)
    checked = workplace.prepare(run)
    assert "Quadro RTX 6000" in checked["memory"]["text"] and "model in float16" in checked["memory"]["text"]
    train(run, **TURING)
    [loaded] = facts(run, ModelLoaded)
    assert (loaded.dtype, loaded.device, loaded.peak_ratio < 1.1) == ("float16", "cuda", True)
    assert {row.loss_scale for row in read_lines(run.metrics_file, MetricRow)} == {2.0**16}


def test_a_plan_in_bfloat16_is_refused_by_the_trainer(make_run: MakeRun) -> None:
    run = make_run(evaluation={"samples": 0})
    log = train(run, Reason.REJECTED, **TURING)
    error = finished(run).error
    assert error is not None and "has no native bf16" in error.message and "method: lora" in str(error.hint), log
