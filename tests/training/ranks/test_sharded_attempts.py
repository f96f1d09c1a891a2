"""Attempts of several real processes that shard the weights of the model: what is learned, delivered, and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from jobs.disk.rundir import RunDir
from jobs.errors import StageError
from jobs.events import EvaluationFinished, ModelLoaded
from jobs.reasons import Reason
from tests.support.samples import memory_plan
from tests.training.attempts import attempt, facts, finished, logged, same_tensors
from tests.training.conftest import MakeRun, write_model
from tests.training.ranks.conftest import After, attempt_with, followers, signal_followers

LORA: dict[str, Any] = {"type": "lora", "rank": 4, "targets": "all-linear"}
FULL: dict[str, Any] = {"method": "full"}
PLAIN: dict[str, Any] = {
    "training": {"epochs": 2, "dropout": 0.0, "batch_size": 8, "learning_rate": 0.01},
    "evaluation": {"every_steps": 5, "samples": 1, "max_rows": 6, "generate_rows": 0},
    "checkpoint": {"every_steps": 5, "every_minutes": None}, "log": {"every_steps": 1}, "method": LORA,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _layers(model_folder: Path) -> None:
    """More layers than a rank has slots for."""
    write_model(model_folder, num_layers=3, num_decoder_layers=2)


def shard(run: RunDir) -> RunDir:
    """As if one GPU had no room for all weights."""
    plan, resolved = run.plan(), run.plan().resolved
    chosen = {"micro_batch": 4, "optimizer": resolved.optimizer, "activation_checkpointing": 1, "compile": False}
    run.write_plan(plan.model_copy(update={"memory": memory_plan(device="cpu", gpu=None, sharded_bytes=1, **chosen)}))
    return run


def on(gpus: int, **more: Any) -> dict[str, Any]:
    return {**PLAIN, "resources": {"gpus": gpus}, **more}


def test_two_ranks_that_shard_the_weights_learn_and_deliver_what_one_does(make_run: MakeRun) -> None:
    merged = {"method": LORA | {"merge": True}}
    one, two = make_run("one", **on(1, **merged)), shard(make_run("two", **on(2, **merged)))
    assert attempt(one) == 0 and attempt(two) == 0
    assert finished(two).reason is Reason.DONE and followers() == []
    assert [row[0] for row in logged(two)] == [row[0] for row in logged(one)]
    assert [row[1] for row in logged(two)] == pytest.approx([row[1] for row in logged(one)], rel=0.02)
    first, second = (facts(run, EvaluationFinished)[0] for run in (one, two))
    assert second.loss == first.loss and second.samples == first.samples, "the same weights, one layer after the other"
    assert facts(two, ModelLoaded)[0].parameters == facts(one, ModelLoaded)[0].parameters
    expected, found = (load_file(run.model / "model.safetensors") for run in (one, two))
    assert found.keys() == expected.keys()
    assert all(bool(tensor.isclose(expected[name], atol=0.05).all()) for name, tensor in found.items())
    frozen = [name for name in found if "layer_norm" in name or "shared" in name]
    assert frozen and all(bool((found[name] == expected[name]).all()) for name in frozen)


def test_it_resumes_bit_for_bit_after_a_rank_was_killed(make_run: MakeRun) -> None:
    whole, broken = shard(make_run("whole", **on(2, **FULL))), shard(make_run("broken", **on(2, **FULL)))
    assert attempt(whole) == 0
    with pytest.raises(StageError, match=r"rank 1 \(CPU\) was killed by signal 9") as caught:
        attempt_with(broken, 1, After(broken, 7, lambda: signal_followers(signal.SIGKILL)))
    assert (caught.value.reason, caught.value.detail_code) == (Reason.CRASH, "rank_lost")
    assert followers() == []
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == 5
    assert logged(broken) == logged(whole)
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")
