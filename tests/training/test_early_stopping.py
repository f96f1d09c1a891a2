"""`training.early_stopping` and `checkpoint.best`: what is decided by evaluations follows from them alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jobs.attempt import TrainResult
from jobs.disk.rundir import RunDir
from jobs.spec import EarlyStoppingSpec
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished
from tests.training.attempts import attempt, checkpoints, facts, finished, logged, same_tensors, trained
from tests.training.conftest import MakeRun
from tests.training.killed_attempts import killed_attempts
from worker.training import train
from worker.training.checkpoints.checkpoint import STATE, EvaluationRecord, TrainState, newest_is_best, stops
from worker.training.evaluate import Evaluation, evaluate

WORSE: dict[str, Any] = {
    "training": {
        "epochs": 2, "learning_rate": 0.2, "warmup_ratio": 0.99, "early_stopping": {"patience": 2},
    },
    "log": {"every_steps": 1},
    "evaluation": {"every_steps": 2, "samples": 1},
    "checkpoint": {"every_steps": 4, "keep": 1},
}  # fmt: skip
"""11 steps; the rate rises to 0.2, the loss with it: step 2 is the best, and step 6 the last."""
POINTS = 2 + 3 * 4 + 3 * 2
"""Two phases of the evaluation at step 0; of those of steps 2, 4 and 6 those, before and after; three checkpoints."""


def accuracies(by_step: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations, one after every second step, measure these, whatever the model."""
    real = evaluate

    def evaluated(context: Any) -> Evaluation:
        found = real(context)
        metrics = {"accuracy": by_step[context.state.step // 2]}
        return dataclasses.replace(found, metrics=metrics)

    monkeypatch.setattr(train, "evaluate", evaluated)


def of(*figures: float, metric: str = "loss") -> list[EvaluationRecord]:
    return [
        EvaluationRecord(step=number, loss=figure if metric == "loss" else 1.0, metrics={metric: figure})
        for number, figure in enumerate(figures)
    ]


@pytest.mark.parametrize(
    ("figures", "min_delta", "stopped"),
    [
        ([3.0], 0.0, False),
        ([3.0, 2.0, 2.5], 0.0, False),
        ([3.0, 2.0, 2.5, 2.0], 0.0, True),  # as good is not better
        ([3.0, 2.0, 2.5, 1.9], 0.0, False),
        ([3.0, 2.0, 2.5, 1.9], 0.2, True),
        ([3.0, 2.9, 2.8, 2.7], 0.25, False),  # little by little, from the best before them
        ([3.0, 2.9, 2.8], 0.25, True),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_a_better_one(
    figures: list[float], min_delta: float, stopped: bool
) -> None:
    rule = EarlyStoppingSpec(patience=2, min_delta=min_delta)
    assert stops(of(*figures), rule, "loss") is stopped
    assert stops(of(*(-each for each in figures), metric="bleu"), rule, "bleu") is stopped, "higher is better"
    assert not stops(of(*figures), rule, "rougeL"), "an earlier version did not compute it"


def test_the_newest_evaluation_is_the_best_only_if_it_is_better() -> None:
    assert [newest_is_best(of(3.0, *more), "loss") for more in ([], [2.0], [3.0], [2.0, 2.5])] == [
        True, True, False, False,
    ]  # fmt: skip
    assert newest_is_best(of(0.1, 0.2, metric="macro_f1"), "macro_f1")


def test_whenever_a_run_is_killed_it_stops_at_the_same_step_with_the_same_model(make_run: MakeRun) -> None:
    """Killed by SIGKILL before, in and after every evaluation, and before and after every checkpoint."""
    whole = make_run("whole", **WORSE)
    assert attempt(whole) == 0
    assert finished(whole).reason == "early_stopped" and finished(whole).step == 6
    assert [fact.step for fact in facts(whole, CheckpointSaved)] == [2, 4, 6]
    assert checkpoints(whole) == ["step-00000002", "step-00000006"], "the best is kept"
    assert trained(whole).step == 2
    runs = [make_run(f"killed-{point}", **WORSE) for point in range(POINTS)]
    killed_attempts(runs, first=2, within=True)
    for run in runs:
        assert finished(run, 2).reason == "early_stopped"
        assert finished(run, 2).result == finished(whole).result
        assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")
        assert logged(run) == logged(whole)


def test_a_run_that_is_stopped_meanwhile_ends_early_all_the_same(make_run: MakeRun) -> None:
    whole, run = make_run("whole", **WORSE), make_run("run", **WORSE)
    assert attempt(whole) == 0
    for number, looks in enumerate((1 + 3 + 1, 1 + 1 + 2, 1 + 3 + 1), 1):  # in the steps, and in an evaluation
        assert attempt(run, number, stop_at=looks) == 75
    assert attempt(run, 4) == 0
    assert finished(run, 4).reason == "early_stopped" and finished(run, 4).result == finished(whole).result


def test_the_model_is_the_best_by_the_metric_and_of_equals_the_earliest(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies([0.1, 0.5, 0.9, 0.9, 0.2, 0.2, 0.3], monkeypatch)
    saved = {"every_steps": 2, "keep": 1, "best": "accuracy"}
    run = make_run(**WORSE | {"training": {"epochs": 2}, "checkpoint": saved})
    assert attempt(run) == 0
    result = trained(run)
    assert (result.step, result.chosen_by, result.metrics, result.figure) == (
        4,
        "accuracy",
        {"accuracy": 0.9},
        "0.9000",
    )
    assert checkpoints(run) == ["step-00000004", "step-00000011"], "pruning keeps it"
    assert [fact.step for fact in facts(run, EvaluationFinished) if fact.best] == [0, 2, 4]
    state = TrainState.model_validate_json((run.checkpoints / "step-00000004" / STATE).read_bytes())
    assert state.metrics == {"accuracy": 0.9} and [each.step for each in state.evaluations] == [0, 2, 4]
    assert "it is the best by accuracy: 0.9000" in (run.model / "README.md").read_text()


def test_a_run_ends_early_by_a_metric_of_its_own(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies([0.1, 0.5, 0.5, 0.4, 0.9, 0.9, 0.9], monkeypatch)
    stopping = {"metric": "accuracy", "patience": 2}
    run = make_run(**WORSE | {"training": {"epochs": 2, "learning_rate": 0.001, "early_stopping": stopping}})
    assert attempt(run) == 0
    assert finished(run).reason == "early_stopped" and finished(run).step == 6
    result = finished(run).result
    assert isinstance(result, TrainResult) and result.chosen_by == "loss"
    readme = (run.model / "README.md").read_text()
    assert "Training ended early, at step 6: 2 evaluations in a row were no better by accuracy." in readme


def test_the_state_of_an_earlier_version_is_read(make_run: MakeRun) -> None:
    """It has neither metrics nor evaluations; the lowest loss so far is known."""
    run: RunDir = make_run(**WORSE | {"training": {"epochs": 2, "early_stopping": True}})
    assert attempt(run, 1, stop_at=1 + 3 + 2 + 3 + 2 + 3 + 1) == 75
    folder = max(run.checkpoints.glob("step-*"))
    written = TrainState.model_validate_json((folder / STATE).read_bytes())
    before = written.model_dump(exclude={"metrics", "evaluations", "correction"})
    assert TrainState.model_validate(before).evaluations == [] and written.evaluations
