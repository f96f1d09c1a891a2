"""What is due where an attempt was stopped or killed comes first in the next: all is as in a run left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs.disk.rundir import RunDir
from jobs.spec import parse_spec
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, ModelLoaded
from tests.training.attempts import attempt, facts, finished, logged, same_tensors, trained
from tests.training.conftest import MakeRun
from tests.training.contexts import plan_of
from tests.training.killed_attempts import killed_attempts
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.pace import Durations, Pace
from worker.training.row_figures import file_of
from worker.training.run_length import Due, RunLength
from worker.training.tasks.seq2seq.batches import PairBatch

SHORT: dict[str, Any] = {
    "training": {"epochs": 1, "learning_rate": 1.0, "warmup_ratio": 0.99},
    "log": {"every_steps": 1},
    "evaluation": {"every_steps": 2, "samples": 1, "generate_rows": 2},
    "checkpoint": {"every_steps": 4, "keep": 2},
}
"""6 steps, evaluated at 0, 2, 4 and 6. The rate rises to 1, the loss with it: 2 is the best, saved and delivered; 4 and
6 are saved, too."""
LOOKS = 1 + 6 + 4 * (2 + 1)
"""Loaded; a step done; of each evaluation two batches for the loss and one for its sample."""


def evaluations(run: RunDir, attempts: int) -> list[tuple[int, float, bool]]:
    """Step, loss and whether it was the best, of every attempt."""
    return [
        (fact.step, fact.loss, fact.best) for n in range(1, attempts + 1) for fact in facts(run, EvaluationFinished, n)
    ]


def saves(run: RunDir, number: int) -> list[tuple[int, float | None]]:
    """Step and loss of every checkpoint that an attempt saved."""
    return [(fact.step, fact.validation_loss) for fact in facts(run, CheckpointSaved, number)]


@pytest.fixture(scope="module")
def whole(make_shared_run: MakeRun) -> RunDir:
    """A run that nobody stopped."""
    run = make_shared_run("whole", **SHORT)
    assert attempt(run) == 0
    assert [step for step, _ in saves(run, 1)] == [2, 4, 6]
    assert trained(run).step == 2, "the best is not the last"
    return run


def assert_same(run: RunDir, whole: RunDir, last: int) -> None:
    """The same model, from the same evaluations and the same rows."""
    for step in (0, 2, 4, 6):
        assert file_of(run, step).read_bytes() == file_of(whole, step).read_bytes()
    assert finished(run, last).result == finished(whole).result
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")
    assert logged(run) == logged(whole)


def test_wherever_a_run_is_stopped_it_evaluates_and_saves_as_if_it_had_not_been(
    make_run: MakeRun, whole: RunDir
) -> None:
    for look in range(1, LOOKS + 1):
        run = make_run(f"stopped-{look}", **SHORT)
        assert attempt(run, 1, stop_at=look) == 75, look
        stopped = finished(run).step
        assert attempt(run, 2) == 0
        assert evaluations(run, 2) == evaluations(whole, 1), look
        for_the_stop = [(step, loss) for step, loss in saves(run, 1) if step == stopped and loss is None]
        assert [each for each in [*saves(run, 1), *saves(run, 2)] if each not in for_the_stop] == saves(whole, 1), look
        assert_same(run, whole, 2)


def test_it_may_be_stopped_again_and_again_in_that_evaluation(make_run: MakeRun, whole: RunDir) -> None:
    run = make_run("again", **SHORT)
    assert attempt(run, 1, stop_at=1 + 3 + 2 + 3 + 2 + 2) == 75
    for number in (2, 3):
        assert attempt(run, number, stop_at=2) == 75
        assert finished(run, number).step == 4 and saves(run, number) == []
    assert attempt(run, 4) == 0
    assert evaluations(run, 4) == evaluations(whole, 1)
    assert_same(run, whole, 4)


def test_wherever_a_run_is_killed_it_ends_as_if_it_had_not_been(make_run: MakeRun, whole: RunDir) -> None:
    """Killed before and after evaluations and checkpoints of steps 4 and 6 are noted; what was not saved is redone."""
    runs = [make_run(f"killed-{point}", **SHORT) for point in range(8)]
    killed_attempts(runs)
    resumed = [facts(run, ModelLoaded, 2)[0].resumed_step for run in runs]
    assert resumed[:2] == [2, 2] and resumed[-1] == 6
    for run in runs:
        losses, expected = ({step: loss for step, loss, _ in evaluations(*each)} for each in ((run, 2), (whole, 1)))
        assert losses == expected
        assert_same(run, whole, 2)


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, [2, 4, 6]), (60, [6])])
def test_minutes_are_those_of_training_whoever_stops_it(make_run: MakeRun, minutes: float, saved: list[int]) -> None:
    run = make_run(**SHORT | {"checkpoint": {"every_minutes": minutes, "every_steps": None, "keep": 9, "best": None}})
    assert attempt(run, 1, stop_at=1 + 3 + 2 + 2) == 75
    assert saves(run, 1) == [(2, None)], "stopped in the evaluation after step 2"
    assert attempt(run, 2) == 0
    assert [step for step, _ in saves(run, 2)] == saved
    assert dict(saves(run, 2)) == {step: loss for step, loss, _ in evaluations(run, 2) if step in saved}


def test_the_minutes_until_a_stop_count_in_the_next_attempt() -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl"}, "checkpoint": {"every_minutes": 30}})
    now = [1000.0]

    def due(state: TrainState) -> Due:
        plan = plan_of(spec, 1_000_000)
        length = RunLength(spec, plan, state, Pace(spec, plan, Durations()), first=0, spent_s=lambda: 0.0)
        return Due(spec, state, length=length, validation_rows=1, best_saved=lambda: 0.5, clock=lambda: now[0])

    state = TrainState(spec_sha256="", micro_batch=1, step=500, validation_loss=1.0, evaluated=True)
    first = due(state)
    now[0] += 29 * 60
    assert not first.checkpoint and not first.evaluation
    state.unsaved_s = first.unsaved_s
    now[0] += 7 * 24 * 3600
    second = due(state)
    now[0] += 59
    assert not second.checkpoint
    now[0] += 1
    assert second.checkpoint
    second.saved()
    assert not second.checkpoint and second.unsaved_s == 0


def test_memory_that_runs_out_in_an_evaluation_that_was_still_due(
    make_run: MakeRun, whole: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("short", **SHORT)
    assert attempt(run, 1, stop_at=1 + 3 + 2 + 3 + 2 + 2) == 75
    assert finished(run).step == 4
    real, calls = PairBatch.evaluated, iter(range(1, 999))

    def once_too_much(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(PairBatch, "evaluated", once_too_much)
    assert attempt(run, 2) == 0
    assert [step for step, _, _ in evaluations(run, 2)] == [0, 2, 4, 6]
    assert [step for step, _ in saves(run, 2)] == [4, 6] and trained(run, 2).step == 2
    assert logged(run) == logged(whole)
