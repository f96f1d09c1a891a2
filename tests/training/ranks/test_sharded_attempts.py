"""Attempts of several real processes that shard the weights of the model: what is learned, delivered, and resumed."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from jobs.disk.rundir import RunDir
from jobs.errors import StageError
from jobs.events import CheckpointSaved, EvaluationFinished, ModelLoaded, OomRecovered
from jobs.reasons import Reason
from tests.memory_plans import memory_plan
from tests.training.attempts import attempt, facts, finished, logged, same_tensors
from tests.training.conftest import WORDS, MakeRun, write_model
from tests.training.ranks.conftest import followers, meanwhile
from tests.training.workplace import Workplace
from worker.training.ranks import leader, shards
from worker.training.ranks.schedule import Direction

LORA: dict[str, Any] = {"type": "lora", "rank": 4, "targets": "all-linear"}
FULL: dict[str, Any] = {"method": "full"}
CODED = {"d_ff": 512}
"""Matrices large enough that `adamw_8bit` keeps their states in one byte a number."""
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


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit"])
def test_all_weights_are_trained_by_their_owners_and_delivered_whole(
    make_run: MakeRun, model_folder: Path, optimizer: str
) -> None:
    if optimizer == "adamw_8bit":
        write_model(model_folder, num_layers=3, num_decoder_layers=2, **CODED)
    memory = {"memory": {"optimizer": optimizer, "micro_batch": 4}}
    one, two = make_run("one", **on(1, **FULL, **memory)), shard(make_run("two", **on(2, **FULL, **memory)))
    assert attempt(one) == 0 and attempt(two) == 0
    assert [row[1] for row in logged(two)] == pytest.approx([row[1] for row in logged(one)], rel=0.02)
    assert [row[2] for row in logged(two)] == pytest.approx([row[2] for row in logged(one)], rel=0.05), "global norms"
    assert facts(two, EvaluationFinished)[0].loss == facts(one, EvaluationFinished)[0].loss
    step = f"checkpoints/step-{finished(two).step:08d}"
    for name in ("model/model.safetensors", f"{step}/model.safetensors", f"{step}/optimizer.safetensors"):
        expected, found = load_file(one.path / name), load_file(two.path / name)
        assert {key: each.shape for key, each in found.items()} == {key: each.shape for key, each in expected.items()}
    expected, found = (load_file(run.model / "model.safetensors") for run in (one, two))
    assert all(bool(tensor.isclose(expected[name], atol=0.05).all()) for name, tensor in found.items())


@pytest.mark.parametrize("method", [{}, FULL, FULL | {"memory": {"optimizer": "adamw_8bit", "micro_batch": 4}}])
def test_it_resumes_bit_for_bit(make_run: MakeRun, model_folder: Path, method: dict[str, Any]) -> None:
    if "memory" in method:
        write_model(model_folder, num_layers=3, num_decoder_layers=2, **CODED)
    whole, broken = shard(make_run("whole", **on(2, **method))), shard(make_run("broken", **on(2, **method)))
    assert attempt(whole) == 0
    assert attempt(broken, stop_at=7) == 75
    stopped = finished(broken)
    assert facts(broken, CheckpointSaved)[-1].step == stopped.step
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == stopped.step
    assert logged(broken) == logged(whole)
    weights = "model.safetensors" if method else "adapter_model.safetensors"
    assert same_tensors(broken.model / weights, whole.model / weights)


@pytest.mark.parametrize("method", [{}, FULL])
def test_a_checkpoint_goes_from_two_ranks_to_one_and_back(
    tmp_path: Path, model_folder: Path, method: dict[str, Any]
) -> None:
    place = Workplace(tmp_path / "place")
    shutil.copytree(model_folder, place.data / "model")
    draw = random.Random(7)
    words = [[draw.choice(WORDS) for _ in range(draw.randint(3, 14))] for _ in range(40)]
    place.rows("rows.jsonl", [{"input": " ".join(row), "target": " ".join(reversed(row[::2]))} for row in words])
    job: dict[str, Any] = on(1, **method) | {
        "model": "./model",
        "evaluation": PLAIN["evaluation"] | {"every_steps": 100, "samples": 0},
        "data": {"validation": 0.2},
    }
    job["memory"] = {"micro_batch": 4, "optimizer": "adamw"}

    def begun(name: int, source: str | None, stop_at: int) -> RunDir:
        run = place.job(**{**job, "resources": {"gpus": name}, **({"resume_from": source} if source else {})})
        place.prepare(run)
        assert attempt(shard(run) if name > 1 else run, stop_at=stop_at) == (75 if stop_at else 0)
        return run

    whole = begun(1, None, 0)
    first = begun(2, None, 7)
    second = begun(1, first.id, 4)
    third = begun(2, second.id, 0)
    steps = [(facts(run, ModelLoaded)[0].resumed_step or 0, finished(run).step) for run in (first, second, third)]
    assert steps[0][0] == 0 < steps[0][1] == steps[1][0] < steps[1][1] == steps[2][0]
    seen = {row[0]: row[1] for run in (first, second, third) for row in logged(run)}
    expected = {row[0]: row[1] for row in logged(whole)}
    assert seen == pytest.approx(expected, rel=0.02) and len(seen) > 6


def test_a_rank_that_is_killed_ends_the_attempt_with_the_cause(make_run: MakeRun) -> None:
    run = shard(make_run(**on(2)))

    def kill() -> None:
        for pid in followers():
            os.kill(pid, signal.SIGKILL)

    with (
        meanwhile(lambda: len(logged(run)) >= 6, kill),
        pytest.raises(StageError, match=r"rank 1 \(CPU\) was killed by signal 9") as caught,
    ):
        attempt(run)
    assert (caught.value.reason, caught.value.detail_code) == (Reason.CRASH, "rank_lost")
    assert followers() == []
    assert attempt(run, 2) == 0 and facts(run, ModelLoaded, 2)[0].resumed_step == 5


@pytest.mark.parametrize("method", [{}, FULL])
def test_what_a_lost_rank_has_alone_is_not_saved(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    run = shard(make_run(**on(2, **method)))
    real = leader.Leader.check_equal

    def check_equal(own: leader.Leader) -> None:
        for pid in followers():
            os.kill(pid, signal.SIGKILL)
        real(own)

    monkeypatch.setattr(leader.Leader, "check_equal", check_equal)
    with pytest.raises(StageError, match="was killed by signal 9") as caught:
        attempt(run)
    assert caught.value.detail_code == "rank_lost"
    assert [fact.step for fact in facts(run, CheckpointSaved)] == ([] if method else [5]), "adapters are whole here"
    assert [each.name for each in run.checkpoints.iterdir()] == ([] if method else ["step-00000005"])


def test_a_rank_that_hangs_ends_the_attempt(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SILENT_S", 2.0)
    run = shard(make_run(**on(2)))
    stopped: list[int] = []

    def stop() -> None:
        stopped.extend(followers())
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    with (
        meanwhile(lambda: len(logged(run)) >= 2, stop),
        pytest.raises(StageError, match=r"one rank did not answer in time \(at least 2 s\)") as caught,
    ):
        attempt(run)
    assert (caught.value.reason, caught.value.detail_code) == (Reason.STALLED, "rank_silent")
    assert stopped and not any(Path(f"/proc/{pid}").exists() for pid in stopped)


def test_memory_that_runs_out_on_rank_0_costs_a_pass_of_all(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shard(make_run(**on(2)))
    real, failed = shards.Shards._use, list[int]()

    def use(own: shards.Shards, direction: Direction, layer: int) -> None:
        real(own, direction, layer)
        if direction is Direction.BACKWARD and layer == 2 and not failed:
            failed.append(layer)
            raise MemoryError

    monkeypatch.setattr(shards.Shards, "_use", use)
    assert attempt(run) == 0
    assert failed and len(facts(run, OomRecovered)) == 1
