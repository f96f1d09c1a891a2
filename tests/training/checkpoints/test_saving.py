"""Checkpoints written beside the training: the same bytes, one at a time, complete or absent, no error in silence."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.disk.rundir import RunDir
from jobs.errors import NonFinite
from jobs.spec import CheckpointSpec, TrainingSpec
from jobs.trainer_facts import CheckpointSaved, DiskLow
from tests.training.attempts import attempt, checkpoints, facts, same_tensors
from tests.training.conftest import MakeRun
from tests.training.killed_saves import killed_saves
from worker.training import window
from worker.training.adapters.method import weights_of
from worker.training.checkpoints import saving
from worker.training.checkpoints.checkpoint import FILES, TrainState, verify
from worker.training.checkpoints.saving import Saver
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.journal import Journal
from worker.training.optimizers.optimizer import make_optimizer


class Gate:
    """Holds writers back at their first file, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = write_tensors

        def wait_and_write(*arguments: Any) -> Any:
            self.reached.set()
            assert self._open.wait(60)
            return real(*arguments)

        monkeypatch.setattr(saving, "write_tensors", wait_and_write)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "job-1").mkdir()
    return RunDir(tmp_path / "job-1")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))


def saver(run: RunDir, model: nn.Module, *, copies: bool | None, keep: int = 3) -> Saver:
    optimizer = make_optimizer("adamw", model.named_parameters(), TrainingSpec(), fused=False)
    return Saver(
        run, weights_of(model), optimizer, CheckpointSpec(keep=keep), Journal(run.attempt_file(1)), copies=copies
    )


def state(step: int) -> TrainState:
    return TrainState(spec_sha256="s", micro_batch=1, step=step)


def test_what_changes_while_it_is_written_is_not_in_it(
    run: RunDir, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = saver(run, model, copies=False)
    waited.save(state(1))
    gate = Gate(monkeypatch)
    beside = saver(run, model, copies=True)
    changing = state(2)
    beside.save(changing)
    assert gate.reached.wait(60)
    changing.validation_loss = 7.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    gate.open()
    beside.wait()
    one, two = run.checkpoints / "step-00000001", run.checkpoints / "step-00000002"
    assert verify(two).validation_loss is None
    for file in FILES[:2]:
        assert (one / file).read_bytes() == (two / file).read_bytes()
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [1, 2]


def test_the_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(
    run: RunDir, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    beside = saver(run, model, copies=True, keep=1)
    beside.save(state(1))
    assert gate.reached.wait(60)
    beside.poll()
    (unfinished,) = checkpoints(run)
    assert facts(run, CheckpointSaved) == [] and unfinished.startswith("tmp-step-00000001-")
    second = threading.Thread(target=beside.save, args=(state(2),))
    second.start()
    gate.open()
    second.join(60)
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [1]
    beside.wait()
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [1, 2]
    assert checkpoints(run) == ["step-00000002"]


def test_an_error_of_the_writer_is_raised_in_the_training(
    run: RunDir, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    beside = saver(run, model, copies=True)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_bytes", broken)
        beside.save(state(1))
        with pytest.raises(PermissionError):
            beside.wait()
    assert checkpoints(run) == []
    beside.save(state(2))
    beside.wait()
    assert checkpoints(run) == ["step-00000002"]


def test_a_disk_that_fills_up_beside_the_training_is_noted(
    run: RunDir, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_bytes", full)
    beside = saver(run, model, copies=True)
    beside.save(state(1))
    beside.wait()
    (low,) = facts(run, DiskLow)
    assert low.step == 1 and low.needed_bytes > sum(each.nbytes for each in model.parameters())
    assert checkpoints(run) == []


def test_without_room_on_the_host_or_under_a_hard_limit_tensors_are_streamed(
    run: RunDir, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"file": dict(model.named_parameters())}
    assert saving.has_room_for_copies(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "SPARE", 2**60)
        assert not saving.has_room_for_copies(tensors)
        streamed = saver(run, model, copies=None)
        streamed.save(state(1))
        assert [fact.step for fact in facts(run, CheckpointSaved)] == [1]  # before anybody asked
    monkeypatch.setattr("resource.getrlimit", lambda which: (2**40, 2**40))
    assert not saving.has_room_for_copies(tensors)


def test_a_run_saved_beside_the_training_ends_like_one_that_waited(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, waited = make_run("beside"), make_run("waited")
    assert attempt(beside) == 0
    monkeypatch.setattr(saving, "has_room_for_copies", lambda tensors: False)
    assert attempt(waited) == 0
    assert checkpoints(beside) == checkpoints(waited)
    for name in checkpoints(beside):
        for file in FILES[:2]:
            assert same_tensors(beside.checkpoints / name / file, waited.checkpoints / name / file)


def test_the_checkpoint_before_a_bad_step_is_completed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    # A loss that is not finite in step 6, while the checkpoint of step 5 is still being written.
    run = make_run(log={"every_steps": 1})
    gate = Gate(monkeypatch)
    real = window.Meter.row

    def bad_at_six(self: Any, result: Any, now: float) -> Any:
        if result.step == 6:
            gate.open()
            raise NonFinite("loss of step 6 is NaN")
        return real(self, result, now)

    monkeypatch.setattr(window.Meter, "row", bad_at_six)
    with pytest.raises(NonFinite):
        attempt(run)
    assert [fact.step for fact in facts(run, CheckpointSaved)] == [5]
    assert verify(run.checkpoints / "step-00000005").step == 5


def test_a_save_killed_at_any_point_leaves_a_checkpoint_that_verifies(tmp_path: Path) -> None:
    # kill -9 at 50 lines spread over the code that saves. Must hold: step 1 until the rename, step 2 after it.
    points = list(killed_saves(tmp_path, 50))
    assert len(points) == 50 and all(point["killed"] for point in points)
    assert len({point["place"] for point in points}) > 20
    for point in points:
        assert point["found"] == (2 if point["renamed"] else 1), point
        assert point["left"] == ["step-00000001", "step-00000002"] and point["again"] == 2, point
    assert {point["found"] for point in points} == {1, 2}
