"""A model that fits neither of two GPUs trains on both, with torch's CUDA build; its peak is the planned one.

A simulated GPU has no NCCL: what ranks exchange goes over gloo, and is zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import DoesNotFit
from jobs.events import CheckpointSaved, MemoryMeasured, ModelLoaded
from jobs.gpus import DRIVER_BYTES, GpuFacts
from jobs.memory_plan import MemoryPlan
from jobs.spec import parse_spec
from jobs.text.units import GIB
from tests.simulated_gpu.trainers import train
from tests.training.attempts import facts, finished
from tests.training.conftest import MakeRun, tiny_spec, write_model
from worker.training.planning.budget import on_gpu
from worker.training.planning.memory_plan import plan_memory
from worker.training.ranks.group import PIECE, TEST_GLOO
from worker.training.tasks.seq2seq.task import Seq2Seq

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
LARGE = {"d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 3072, "num_layers": 5, "num_decoder_layers": 5}
JOB: dict[str, Any] = {
    "training": {"epochs": 1},
    "memory": {"optimizer": "adamw", "micro_batch": 4, "activation_checkpointing": 0},
    "evaluation": {"every_steps": 1000, "samples": 0, "generate_rows": 0},  # no text would ever end
    "checkpoint": {"every_steps": 3, "every_minutes": None},
    "speed": {"compile": False},
}
USABLE = int(2.5 * GIB)
WIDTHS = (16, 16)
"""Padded, of the longest row."""


def planned(model: Path, gpus: int) -> MemoryPlan:
    """For GPUs of that size."""
    spec = parse_spec(tiny_spec(**JOB, resources={"gpus": gpus}).model_dump(mode="json"))
    budget = on_gpu(USABLE, "gpu", GpuFacts("NVIDIA GeForce RTX 5090", USABLE + DRIVER_BYTES))
    config = json.loads((model / "config.json").read_text())
    return plan_memory(spec, Seq2Seq(), config, WIDTHS, device="cuda", budget=budget)


def test_a_model_that_fits_neither_of_two_gpus_trains_on_both(make_run: MakeRun, model_folder: Path) -> None:
    write_model(model_folder, **LARGE)
    with pytest.raises(DoesNotFit):
        planned(model_folder, 1)
    run, memory = make_run(**JOB, resources={"gpus": 2}), planned(model_folder, 2)
    assert memory.sharded_bytes > 0 and memory.peak_bytes <= memory.limit_bytes
    plan = run.plan()
    run.write_plan(plan.model_copy(update={"memory": memory}))
    gpus: dict[str, Any] = {
        "SIMGPU_CARDS": "2",
        "SIMGPU_TOTAL_MIB": str((USABLE + DRIVER_BYTES) // 2**20),
        TEST_GLOO: "1",
    }
    log = train(run, SIMGPU_STATE=str(run.path / "gpus"), **gpus)
    assert facts(run, ModelLoaded)[0].device == "cuda" and "2 ranks train together" in log
    assert [fact.step for fact in facts(run, CheckpointSaved)][:1] == [3]
    assert finished(run).step >= 5
    [measured] = facts(run, MemoryMeasured)
    context, exchange = memory.parts["context"], 4 * PIECE  # of which the plan counts the buffer as well
    assert measured.measured_bytes - context - exchange == pytest.approx(measured.predicted_bytes - context, rel=0.02)
