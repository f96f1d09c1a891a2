"""Resuming bit for bit, and every way in which a checkpoint on disk can be wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jobs.attempt import Heartbeat, TrainResult
from jobs.disk.rundir import RunDir
from jobs.errors import DiskFull, NoValidCheckpoint, Rejected
from jobs.events import AttemptEnded, AttemptStarted, JobPaused, JobQueued, JobResumed
from jobs.trainer_facts import CheckpointRejected, CheckpointSaved, DiskLow, EvaluationFinished, ModelLoaded
from tests.support.machine import free_bytes
from tests.support.samples import checked, prepared
from tests.training.attempts import attempt, checkpoints, facts, finished, logged, same_tensors, trained
from tests.training.checkpoints.damage import cut_short, flip_a_bit
from tests.training.conftest import RISING, MakeRun
from worker.training.checkpoints import pruning
from worker.training.optimizers import adamw_8bit
from worker.training.steps.randomness import restore_rng, rng_states

LAST = "step-00000021"
Stopped = Callable[[int], RunDir]


@pytest.fixture(scope="module")
def whole(make_shared_run: MakeRun) -> RunDir:
    """A run that nobody stopped."""
    run = make_shared_run("whole")
    assert attempt(run) == 0
    return run


@pytest.fixture(scope="module")
def _stopped_once(make_shared_run: MakeRun) -> Stopped:
    @cache
    def stopped(look: int) -> RunDir:
        run = make_shared_run(f"stopped-{look}")
        assert attempt(run, 1, stop_at=look) == 75
        return run

    return stopped


@pytest.fixture
def stopped(_stopped_once: Stopped, tmp_path: Path) -> Stopped:
    """A copy of a run whose first attempt was stopped at a look."""

    def copy(look: int) -> RunDir:
        run = _stopped_once(look)
        return RunDir(shutil.copytree(run.path, tmp_path / "stopped" / run.id))

    return copy


# Looks: 1 when loaded, 2 a batch of each evaluation's loss (6 rows by 4), 1 of its samples, 1 a step. Stops after the
# first evaluation: in step 3 and 4 (4 logs a row), 7, within the evaluation after step 10, at the last step.
@pytest.mark.parametrize("look", [4 + 3, 4 + 4, 4 + 7 + 3, 4 + 10 + 3 + 2, 4 + 21 + 4 * 3])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(stopped: Stopped, whole: RunDir, look: int) -> None:
    broken = stopped(look)
    end = finished(broken)
    assert end.reason == "interrupted" and 0 < end.step <= 21
    assert facts(broken, CheckpointSaved)[-1].step == end.step
    assert not broken.model.exists()
    assert attempt(broken, 2) == 0
    (loaded,) = facts(broken, ModelLoaded, 2)
    assert loaded.resumed_step == end.step
    assert logged(broken) == logged(whole)
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert same_tensors(broken.checkpoints / LAST / file, whole.checkpoints / LAST / file)
    assert finished(broken, 2).result == finished(whole).result


@pytest.mark.parametrize("optimizer", ["adamw_offload", "adamw_8bit", "adafactor"])
def test_a_resumed_run_with_stochastic_rounding_equals_an_uninterrupted_one(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
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
    assert (trained(whole).loss or 9.0) < (trained(whole).first_loss or 0.0)
    saved = load_file(whole.checkpoints / LAST / "optimizer.safetensors")
    if optimizer == "adamw_8bit":
        assert saved["exp_avg.codes.lm_head.weight"].dtype == torch.uint8
        assert saved["exp_avg_sq.decoder.final_layer_norm.weight"].dtype == torch.float32


def test_the_last_step_is_evaluated_even_if_the_attempt_was_stopped_on_it(stopped: Stopped) -> None:
    run = stopped(4 + 21 + 4 * 3)
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
    stopped: Stopped, damage: Callable[[Path], object], message: str
) -> None:
    run = stopped(4 + 12 + 2 * 3)
    assert checkpoints(run)[-2:] == ["step-00000010", "step-00000012"]
    damage(run.checkpoints / "step-00000012")
    assert attempt(run, 2, stop_at=2) == 75  # whose save removes what was rejected
    (rejected,) = facts(run, CheckpointRejected, 2)
    assert rejected.path == "checkpoints/step-00000012" and message in rejected.message
    assert facts(run, ModelLoaded, 2)[0].resumed_step == 10
    assert not [name for name in checkpoints(run) if not name.startswith("step-")]


def test_with_no_valid_checkpoint_it_ends_and_leaves_them_as_they_are(
    stopped: Stopped, whole: RunDir, tmp_path: Path
) -> None:
    run = stopped(4 + 5 + 3 + 1)
    backup = shutil.copytree(run.checkpoints / "step-00000005", tmp_path / "backup")
    size = (backup / "optimizer.safetensors").stat().st_size
    flip_a_bit(run.checkpoints / "step-00000005")
    cut_short(run.checkpoints / "step-00000006")
    for number in (2, 3):
        with pytest.raises(NoValidCheckpoint) as caught:
            attempt(run, number)
        assert str(caught.value) == (
            "there is no valid checkpoint to resume from: checkpoints/step-00000006: optimizer.safetensors has 1000 "
            f"bytes, not {size}; checkpoints/step-00000005: model.safetensors is damaged: its sha256 is another"
        )
        assert run.attempt_lines(number)[-1].kind == "heartbeat", "nothing is noted, the error says it all"
        assert checkpoints(run) == ["step-00000005", "step-00000006"]
    shutil.rmtree(run.checkpoints / "step-00000005")
    shutil.copytree(backup, run.checkpoints / "step-00000005")
    assert attempt(run, 4) == 0
    assert [fact.path for fact in facts(run, CheckpointRejected, 4)] == ["checkpoints/step-00000006"]
    assert facts(run, ModelLoaded, 4)[0].resumed_step == 5
    assert logged(run) == logged(whole)


def paused(run: RunDir) -> None:
    """A job that was trained by hand, as if it had been paused."""
    run.append([checked(), prepared(21), JobQueued()])
    run.append([AttemptStarted(worker="w", device="cpu"), *facts(run, CheckpointSaved)])
    run.append([AttemptEnded(reason="interrupted", step=6), JobPaused()])


def test_one_that_is_gone_is_missed_and_one_that_never_was_is_not(stopped: Stopped, make_run: MakeRun) -> None:
    run = stopped(4 + 5 + 3 + 1)
    paused(run)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(NoValidCheckpoint, match="checkpoints/step-00000006 is gone"):
        attempt(run, 2)
    new = make_run("new")
    (new.checkpoints / "tmp-step-00000005").mkdir(parents=True)  # killed in its very first save
    assert attempt(new, 1, stop_at=1 + 3 + 1) == 75
    assert facts(new, ModelLoaded)[0].resumed_step is None


def test_from_scratch_it_begins_at_step_0_once(
    stopped: Stopped, whole: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(4 + 5 + 3 + 1)
    paused(run)
    for name in checkpoints(run):
        flip_a_bit(run.checkpoints / name)
    record, _ = run.append([JobResumed(from_scratch=True)])
    assert record.scratch_attempt == 2
    removed: list[Path] = []

    def killed(folder: Path) -> None:
        removed.append(folder)
        if len(removed) == 2:
            raise KeyboardInterrupt
        shutil.rmtree(folder)

    with monkeypatch.context() as patch:  # killed while it removes them: the next one continues with that
        patch.setattr(pruning, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            attempt(run, 2)
    assert checkpoints(run) == ["step-00000005"]
    assert attempt(run, 3, stop_at=4 + 7 + 3) == 75
    assert facts(run, ModelLoaded, 3)[0].resumed_step is None
    assert json.loads((run.path / "from_scratch.json").read_bytes()) == {
        "attempt": 2,
        "removed": ["step-00000005"],
    }
    # Its new checkpoints stay, although no event has told of them.
    assert run.record().scratch_attempt == 2
    assert attempt(run, 4) == 0
    assert facts(run, ModelLoaded, 4)[0].resumed_step == 7
    assert logged(run) == logged(whole) and finished(run, 4).result == finished(whole).result
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")


@pytest.mark.parametrize("content", [None, b"", b"[]"])
def test_without_its_file_the_events_say_that_from_scratch_has_begun(stopped: Stopped, content: bytes | None) -> None:
    run = stopped(4 + 3)
    paused(run)
    run.append([JobResumed(from_scratch=True)])
    run.append([AttemptStarted(worker="w", device="cpu")], attempt=2)
    assert attempt(run, 2, stop_at=4 + 4) == 75
    run.append([*facts(run, ModelLoaded, 2), *facts(run, CheckpointSaved, 2)], attempt=2)
    if content is None:
        (run.path / "from_scratch.json").unlink()
    else:
        (run.path / "from_scratch.json").write_bytes(content)
    attempt(run, 3, stop_at=1)
    assert facts(run, ModelLoaded, 3)[0].resumed_step == 4


def test_what_a_kill_leaves_while_a_checkpoint_is_replaced(stopped: Stopped) -> None:
    run = stopped(4 + 3)
    (saved,) = checkpoints(run)
    (run.checkpoints / saved).rename(run.checkpoints / f"tmp-replaced-{saved}")
    (run.path / ".metrics.jsonl.0123").write_text("half a file")
    attempt(run, 2, stop_at=1)
    assert facts(run, ModelLoaded, 2)[0].resumed_step == int(saved.removeprefix("step-"))
    assert checkpoints(run) == [saved] and not (run.path / ".metrics.jsonl.0123").exists()


def test_what_a_killed_save_left_is_removed_and_never_used(stopped: Stopped) -> None:
    run = stopped(4 + 6 + 3)
    shutil.copytree(run.checkpoints / "step-00000006", run.checkpoints / "tmp-step-00000007-0123abcd")
    shutil.copytree(run.checkpoints / "step-00000006", run.path / "tmp-model-0123abcd")
    assert attempt(run, 2) == 0
    assert facts(run, ModelLoaded, 2)[0].resumed_step == 6
    assert not [*run.checkpoints.glob("tmp-*"), *run.path.glob("tmp-*")]


def test_a_checkpoint_of_another_specification_is_refused(stopped: Stopped) -> None:
    run = stopped(4 + 3)
    spec = json.loads(run.spec_file.read_text())
    spec["training"]["learning_rate"] = 0.5
    run.spec_file.write_text(json.dumps(spec))
    with pytest.raises(Rejected, match="another specification") as caught:
        attempt(run, 2)
    assert caught.value.detail_code == "other_spec"


def test_a_key_that_a_later_version_adds_makes_no_other_specification(make_run: MakeRun) -> None:
    # spec.json as a version wrote it that did not know data.csv_quoting.
    run = make_run()
    spec = json.loads(run.spec_file.read_text())
    del spec["data"]["csv_quoting"]
    run.spec_file.write_text(json.dumps(spec))
    assert run.spec_sha256() != run.spec().sha256()
    attempt(run, 1, stop_at=4 + 3)
    [state] = [json.loads(file.read_bytes()) for file in run.checkpoints.glob("step-*/state.json")]
    assert state["spec_sha256"] == run.spec_sha256()
    assert attempt(run, 2) == 0


def test_the_newest_and_the_best_are_kept_and_the_best_becomes_the_model(make_run: MakeRun) -> None:
    run = make_run(**RISING)
    assert attempt(run) == 0
    seen = facts(run, EvaluationFinished)
    assert [fact.step for fact in seen] == [0, 4, 8, 12, 16, 20, 21]
    best = min(seen[1:], key=lambda fact: fact.loss)  # there is no checkpoint of step 0
    assert best.step < 20
    names = [f"step-{step:08d}" for step in (best.step, 20, 21)]
    assert checkpoints(run) == names
    first = seen[0].loss
    assert trained(run) == TrainResult(
        model="model",
        loss=best.loss,
        first_loss=first,
        step=best.step,
        chosen_by="loss",
        metrics=best.metrics,
        verdict=best.verdict,
    )
    assert same_tensors(run.model / "model.safetensors", run.checkpoints / names[0] / "model.safetensors")

    last = make_run("last", **RISING | {"checkpoint": RISING["checkpoint"] | {"best": None}})
    assert attempt(last) == 0
    assert trained(last).step == 21
    assert same_tensors(last.model / "model.safetensors", last.checkpoints / names[2] / "model.safetensors")


def losses(run: RunDir, number: int = 1) -> dict[int, float]:
    """Of the evaluations after step 0, by step."""
    return {fact.step: fact.loss for fact in facts(run, EvaluationFinished, number) if fact.step}


def best_step(run: RunDir) -> int:
    """Of the lowest of them."""
    found = losses(run)
    return min(found, key=found.__getitem__)


def test_a_run_of_less_than_every_minutes_delivers_its_best_evaluation(make_run: MakeRun) -> None:
    # Before: only the last step was saved, and it became the model as "the best".
    run = make_run(**RISING | {"checkpoint": {"every_steps": None, "every_minutes": 30, "keep": 1}})
    assert attempt(run) == 0
    best = best_step(run)
    assert best < 20 and (trained(run).step, trained(run).chosen_by, trained(run).better_step) == (best, "loss", None)
    falling = [step for step, loss in losses(run).items() if step <= best]
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [*falling, 21]


def test_the_best_is_delivered_though_the_model_was_better_before_training(make_run: MakeRun) -> None:
    rising = {"training": {"epochs": 2, "learning_rate": 1.0, "warmup_ratio": 0.5}}
    run = make_run(**rising, evaluation={"every_steps": 2, "samples": 0}, checkpoint={"every_steps": None})
    assert attempt(run) == 0
    best = best_step(run)
    assert min(losses(run).values()) == losses(run)[best] > facts(run, EvaluationFinished)[0].loss
    assert (trained(run).step, trained(run).better_step) == (best, None)


def test_a_damaged_best_is_found_on_resume_and_the_result_says_that_it_is_missing(make_run: MakeRun) -> None:
    run = make_run(**RISING)
    attempt(run, 1, stop_at=3 + 19 + 4 * 2)
    best = best_step(run)
    flip_a_bit(run.checkpoints / f"step-{best:08d}")
    assert attempt(run, 2, stop_at=1) == 75
    assert [fact.path for fact in facts(run, CheckpointRejected, 2)] == [f"checkpoints/step-{best:08d}"]
    assert attempt(run, 3) == 0 and facts(run, CheckpointRejected, 3) == []
    result = trained(run, 3)
    left = {step: loss for step, loss in (losses(run) | losses(run, 3)).items() if step in (16, 19, 20, 21)}
    assert result.step == min(left, key=left.__getitem__) and result.better_step == best
    page = (run.model / "README.md").read_text()
    assert f"The evaluation of step {best} was better, and its checkpoint is missing." in page


def test_after_the_best_was_lost_the_next_best_is_saved(make_run: MakeRun) -> None:
    run = make_run(**RISING | {"checkpoint": {"every_steps": 10, "every_minutes": None, "keep": 1}})
    attempt(run, 1, stop_at=3 + 13 + 3 * 2)
    best = best_step(run)
    assert best < 10
    shutil.rmtree(run.checkpoints / f"step-{best:08d}")
    assert attempt(run, 2) == 0
    later = losses(run, 2)
    assert trained(run, 2).step == min(later, key=later.__getitem__) and trained(run, 2).better_step == best


def test_the_result_says_that_there_was_no_room_for_a_better_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**RISING)
    free_bytes(monkeypatch, 150_000)
    assert attempt(run) == 0
    assert checkpoints(run) == []
    assert (trained(run).step, trained(run).better_step) == (21, best_step(run))


def test_the_best_weights_become_the_model_though_there_was_no_room_for_their_checkpoint(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before: the model was that of the last checkpoint, however much worse.
    slow = {"epochs": 4, "batch_size": 8, "learning_rate": 0.002, "lr_scheduler": "constant"}
    whole, run = make_run("whole", training=slow), make_run(training=slow)
    attempt(whole)
    losses = [fact.loss for fact in facts(whole, EvaluationFinished)]
    assert min(losses) == losses[-1]
    free_bytes(monkeypatch, 10**9)
    attempt(run, 1, stop_at=4 + 6 + 3)
    assert checkpoints(run)
    free_bytes(monkeypatch, 150_000)
    assert attempt(run, 2) == 0
    assert checkpoints(run)[-1] < LAST
    assert finished(run, 2).result == finished(whole).result
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")


def test_what_is_no_folder_among_the_checkpoints_ends_no_attempt(make_run: MakeRun) -> None:
    run = make_run()
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "rejected-step-00000003").write_bytes(b"")
    assert attempt(run) == 0
    assert checkpoints(run)[-1] == LAST


def test_minutes_make_a_checkpoint_due_at_an_evaluation(make_run: MakeRun) -> None:
    run = make_run(checkpoint={"every_steps": None, "every_minutes": 1e-9})
    attempt(run)
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [5, 10, 15, 20, 21]
    rare = make_run("rare", checkpoint={"every_steps": None, "every_minutes": 60, "best": None})
    attempt(rare)
    assert [fact.step for fact in facts(rare, CheckpointSaved)] == [21]


def test_low_disk_skips_the_save_and_training_goes_on(
    make_run: MakeRun, whole: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("low")
    free_bytes(monkeypatch, 150_000)
    assert attempt(run) == 0
    assert checkpoints(run) == []
    low = facts(run, DiskLow)
    assert [fact.step for fact in low] == [5, 10, 15, 20, 21]
    assert low[0].free_bytes == 150_000 < low[0].needed_bytes
    assert logged(run) == logged(whole)
    assert trained(run).step == 21  # there is room for the model itself

    free_bytes(monkeypatch, 0)
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
