"""Resuming bit for bit, and every way in which a checkpoint on disk can be wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jobs.attempt import Heartbeat
from jobs.errors import DiskFull, Refused
from jobs.events import CheckpointRejected, CheckpointSaved, DiskLow, EvaluationFinished, ModelLoaded
from jobs.rundir import RunDir
from tests.training.attempts import attempt, checkpoints, facts, finished, logged, same_tensors
from worker.training.optimizers import adamw_8bit
from worker.training.steps.randomness import restore_rng, rng_states

MakeRun = Callable[..., RunDir]
# 41 rows are soon known by heart, and the validation loss rises: the best is neither the last nor among the two newest.
OVERFIT: dict[str, Any] = {
    "schedule": {"epochs": 20, "dropout": 0.0},
    "evaluate": {"every_steps": 20, "samples": 0},
    "checkpoint": {"every_steps": 20, "keep": 2},
}
Usage = namedtuple("Usage", "total used free")
LAST = "step-00000021"


# Looks: 1 when loaded, 2 a batch of each evaluation's loss (6 rows by 4), 1 of its samples, 1 a step. Stops after the
# first evaluation: in step 3 and 4 (4 logs a row), 7, within the evaluation after step 10, at the last step.
@pytest.mark.parametrize("look", [4 + 3, 4 + 4, 4 + 7 + 3, 4 + 10 + 3 + 2, 4 + 21 + 4 * 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(make_run: MakeRun, look: int) -> None:
    whole, broken = make_run("whole"), make_run("broken")
    assert attempt(whole) == 0
    assert attempt(broken, 1, stop_at=look) == 75
    stopped = finished(broken)
    assert stopped.reason == "interrupted" and 0 < stopped.step <= 21
    assert facts(broken, CheckpointSaved)[-1].step == stopped.step
    assert not broken.model.exists()
    assert attempt(broken, 2) == 0
    (loaded,) = facts(broken, ModelLoaded, 2)
    assert loaded.resumed_step == stopped.step
    assert logged(broken) == logged(whole)
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(broken.checkpoints / LAST / file, whole.checkpoints / LAST / file)
    assert finished(broken, 2).result == finished(whole).result


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adafactor"])
def test_so_does_one_that_rounds_by_chance(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    monkeypatch.setattr(adamw_8bit, "LEAST_QUANTISED", 512)  # the tiny model has no matrix of 4,096 numbers
    memory = {"memory": {"optimizer": optimizer, "micro_batch": 4}}
    whole, broken = make_run("whole", **memory), make_run("broken", **memory)
    assert attempt(whole) == 0
    phases = [line.phase for line in whole.attempt_lines(1) if isinstance(line, Heartbeat)]
    assert ("compile" in phases[: phases.index("step")]) == (optimizer == "adamw_8bit")
    assert attempt(broken, 1, stop_at=4 + 7 + 3) == 75
    torch.rand(5)
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == 7
    assert logged(broken) == logged(whole)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(broken.checkpoints / LAST / file, whole.checkpoints / LAST / file)
    assert finished(whole).result["loss"] < finished(whole).result["first_loss"]
    saved = load_file(whole.checkpoints / LAST / "optimizer.safetensors")
    if optimizer == "adamw_8bit":
        assert saved["exp_avg.codes.lm_head.weight"].dtype == torch.uint8
        assert saved["exp_avg_sq.decoder.final_layer_norm.weight"].dtype == torch.float32


def test_the_last_step_is_evaluated_even_if_the_attempt_was_stopped_on_it(make_run: MakeRun) -> None:
    run = make_run()
    attempt(run, 1, stop_at=4 + 21 + 4 * 3)
    assert finished(run).step == 21
    assert attempt(run, 2) == 0
    assert [fact.step for fact in facts(run, EvaluationFinished, 2)] == [21]
    (saved,) = facts(run, CheckpointSaved, 2)
    assert saved.step == 21 and saved.validation_loss is not None


def test_before_the_first_step_there_is_nothing_to_save(make_run: MakeRun) -> None:
    run = make_run()
    for number, look in ((1, 1), (2, 2)):
        assert attempt(run, number, stop_at=look) == 75
        assert finished(run, number).step == 0
        assert checkpoints(run) == []


def flip_a_bit(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 4]))


def cut_short(folder: Path) -> None:
    os.truncate(folder / "optimizer.safetensors", 1000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "model.safetensors is damaged"),
        (cut_short, "optimizer.safetensors has 1000 bytes"),
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors cannot be read"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text('{"files": {}}'), "model.safetensors is not in manifest"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    make_run: MakeRun, damage: Callable[[Path], object], message: str
) -> None:
    whole, run = make_run("whole"), make_run("broken")
    attempt(whole)
    attempt(run, 1, stop_at=4 + 12 + 2 * 3)
    assert checkpoints(run)[-2:] == ["step-00000010", "step-00000012"]
    damage(run.checkpoints / "step-00000012")
    assert attempt(run, 2) == 0
    (rejected,) = facts(run, CheckpointRejected, 2)
    assert rejected.path == "checkpoints/step-00000012" and message in rejected.message
    assert facts(run, ModelLoaded, 2)[0].resumed_step == 10
    assert logged(run) == logged(whole)
    assert not [name for name in checkpoints(run) if not name.startswith("step-")]


def test_with_no_checkpoint_left_the_run_begins_again(make_run: MakeRun) -> None:
    whole, run = make_run("whole"), make_run("broken")
    attempt(whole)
    attempt(run, 1, stop_at=4 + 5 + 3 + 1)
    for name in checkpoints(run):
        flip_a_bit(run.checkpoints / name)
    assert attempt(run, 2) == 0
    assert len(facts(run, CheckpointRejected, 2)) == 2
    assert facts(run, ModelLoaded, 2)[0].resumed_step is None
    assert logged(run) == logged(whole)


def test_what_a_killed_save_left_is_removed_and_never_used(make_run: MakeRun) -> None:
    run = make_run()
    attempt(run, 1, stop_at=4 + 6 + 3)
    shutil.copytree(run.checkpoints / "step-00000006", run.checkpoints / "tmp-step-00000007")
    assert attempt(run, 2) == 0
    assert facts(run, ModelLoaded, 2)[0].resumed_step == 6
    assert not list(run.checkpoints.glob("tmp-*"))


def test_a_checkpoint_of_another_specification_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    attempt(run, 1, stop_at=4 + 3)
    spec = json.loads(run.spec_file.read_text())
    spec["schedule"]["learning_rate"] = 0.5
    run.spec_file.write_text(json.dumps(spec))
    with pytest.raises(Refused, match="another specification") as caught:
        attempt(run, 2)
    assert caught.value.detail_code == "other_spec"


def test_the_newest_and_the_best_are_kept_and_the_best_becomes_the_model(make_run: MakeRun) -> None:
    run = make_run(**OVERFIT)
    assert attempt(run) == 0
    seen = facts(run, EvaluationFinished)
    assert [fact.step for fact in seen] == [0, 20, 40, 60, 80, 100, 103]
    best = min(seen[1:], key=lambda fact: fact.loss)  # there is no checkpoint of step 0
    assert best.step < 100
    names = [f"step-{step:08d}" for step in (best.step, 100, 103)]
    assert checkpoints(run) == names
    result = finished(run).result
    assert result == {"model": "model", "loss": best.loss, "first_loss": seen[0].loss, "step": best.step}
    assert same_tensors(run.model / "model.safetensors", run.checkpoints / names[0] / "model.safetensors")

    last = make_run("last", **OVERFIT | {"checkpoint": OVERFIT["checkpoint"] | {"best": None}})
    assert attempt(last) == 0
    assert finished(last).result["step"] == 103
    assert same_tensors(last.model / "model.safetensors", last.checkpoints / names[2] / "model.safetensors")


def test_a_damaged_best_is_not_made_the_model(make_run: MakeRun) -> None:
    run = make_run(**OVERFIT)
    attempt(run, 1, stop_at=3 + 99 + 4 * 2)
    losses = {fact.step: fact.loss for fact in facts(run, EvaluationFinished) if fact.step}
    best = min(losses, key=losses.__getitem__)
    flip_a_bit(run.checkpoints / f"step-{best:08d}")
    assert attempt(run, 2) == 0
    assert [fact.path for fact in facts(run, CheckpointRejected, 2)] == [f"checkpoints/step-{best:08d}"]
    assert finished(run, 2).result["step"] in (100, 103)


def test_minutes_make_a_checkpoint_due_at_an_evaluation(make_run: MakeRun) -> None:
    run = make_run(checkpoint={"every_steps": None, "every_minutes": 1e-9})
    attempt(run)
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [5, 10, 15, 20, 21]
    rare = make_run("rare", checkpoint={"every_steps": None, "every_minutes": 60})
    attempt(rare)
    assert [fact.step for fact in facts(rare, CheckpointSaved)] == [21]


def test_low_disk_skips_the_save_and_training_goes_on(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, run = make_run("whole"), make_run("low")
    attempt(whole)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 150_000, 150_000))
    assert attempt(run) == 0
    assert checkpoints(run) == []
    low = facts(run, DiskLow)
    assert [fact.step for fact in low] == [5, 10, 15, 20, 21]
    assert low[0].free_bytes == 150_000 < low[0].needed_bytes
    assert logged(run) == logged(whole)
    assert finished(run).result["step"] == 21  # there is room for the model itself

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 0))
    with pytest.raises(DiskFull, match="the final model needs"):
        attempt(make_run("full"))


def test_a_disk_that_fills_up_while_saving_leaves_no_half_checkpoint(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    run = make_run()
    with monkeypatch.context() as patch:
        patch.setattr("worker.training.checkpoints.saving.write_bytes", full)
        assert attempt(run, 1, stop_at=4 + 6 + 3) == 75
    assert [fact.step for fact in facts(run, DiskLow)] == [5, 6]
    assert checkpoints(run) == []


def test_random_states_survive_json() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    random.gauss(0, 1)
    states = json.loads(json.dumps(rng_states()))
    drawn = random.gauss(0, 1), random.random(), np.random.normal(), torch.rand(3).tolist()
    restore_rng(states)
    assert (random.gauss(0, 1), random.random(), np.random.normal(), torch.rand(3).tolist()) == drawn
