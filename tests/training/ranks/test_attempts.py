"""Attempts of several real processes: they end well, resume, and end at once with the cause when one is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jobs.errors import StageError
from jobs.events import CheckpointSaved, ModelLoaded
from jobs.reasons import Reason
from tests.training.attempts import attempt, facts, finished, logged, same_tensors
from tests.training.conftest import MakeRun
from tests.training.ranks.conftest import followers, meanwhile
from worker.training.context import TrainingContext
from worker.training.evaluate import Evaluation, evaluate
from worker.training.ranks import leader

PLAIN = {
    "training": {"epochs": 4, "dropout": 0.0}, "evaluation": {"every_steps": 10, "samples": 0},
    "checkpoint": {"every_steps": 5}, "log": {"every_steps": 1},
}  # fmt: skip


def on(gpus: int) -> dict[str, object]:
    return {**PLAIN, "resources": {"gpus": gpus}}


def test_two_ranks_train_a_job_to_its_end_and_learn_what_one_learns(make_run: MakeRun) -> None:
    one, two = make_run("one", **on(1)), make_run("two", **on(2))
    (two.path / "ranks-of-a-killed-attempt").mkdir()
    assert attempt(one) == 0 and attempt(two) == 0
    assert not list(two.path.glob("ranks-*"))
    assert finished(two).reason is Reason.DONE and followers() == []
    expected, seen = logged(one), logged(two)
    assert [row[0] for row in seen] == [row[0] for row in expected]
    assert [row[1] for row in seen] == pytest.approx([row[1] for row in expected], rel=0.02), "bf16 rounds otherwise"
    (loaded,) = facts(two, ModelLoaded)
    assert loaded.resumed_step is None


def test_a_job_on_two_ranks_resumes_bit_for_bit(make_run: MakeRun) -> None:
    whole, broken = make_run("whole", **on(2)), make_run("broken", **on(2))
    assert attempt(whole) == 0
    assert attempt(broken, stop_at=9) == 75
    stopped = finished(broken)
    assert stopped.reason is Reason.INTERRUPTED and facts(broken, CheckpointSaved)[-1].step == stopped.step
    assert attempt(broken, 2) == 0
    assert facts(broken, ModelLoaded, 2)[0].resumed_step == stopped.step
    assert logged(broken) == logged(whole)
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed_ends_the_attempt_with_the_cause_and_the_next_one_goes_on(
    make_run: MakeRun, signum: signal.Signals
) -> None:
    whole, broken = make_run("whole", **on(2)), make_run("broken", **on(2))
    assert attempt(whole) == 0

    def far() -> bool:
        return len(logged(broken)) >= 8

    def kill() -> None:
        for pid in followers():
            os.kill(pid, signum)

    with meanwhile(far, kill):
        if signum == signal.SIGTERM:  # only rank 0 is asked to stop
            assert attempt(broken) == 0
            assert logged(broken) == logged(whole)
            return
        with pytest.raises(StageError, match=r"rank 1 \(CPU\) was killed by signal 9") as caught:
            attempt(broken)
    assert (caught.value.reason, caught.value.detail_code) == (Reason.CRASH, "rank_lost")
    assert followers() == []
    assert attempt(broken, 2) == 0
    assert logged(broken) == logged(whole)


def test_weights_are_saved_although_another_rank_was_killed_while_rank_0_evaluated(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**on(2))

    def killing(context: TrainingContext) -> Evaluation:
        if context.state.step == 10:
            for pid in followers():
                os.kill(pid, signal.SIGKILL)
        return evaluate(context)

    monkeypatch.setattr("worker.training.train.evaluate", killing)
    with pytest.raises(StageError, match=r"rank 1 \(CPU\) was killed by signal 9"):
        attempt(run)
    assert facts(run, CheckpointSaved)[-1].step == 10
    assert attempt(run, 2) == 0 and facts(run, ModelLoaded, 2)[0].resumed_step == 10


def test_a_rank_that_hangs_ends_the_attempt_and_is_killed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "SILENT_S", 2.0)
    run = make_run(**on(2))
    stopped: list[int] = []

    def stop() -> None:
        stopped.extend(followers())
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    with (
        meanwhile(lambda: len(logged(run)) >= 4, stop),
        pytest.raises(StageError, match=r"one rank did not answer in time \(at least 2 s\)") as caught,
    ):
        attempt(run)
    assert (caught.value.reason, caught.value.detail_code) == (Reason.STALLED, "rank_silent")
    assert stopped and not any(Path(f"/proc/{pid}").exists() for pid in stopped)


def test_what_another_rank_refuses_ends_the_attempt_with_its_reason(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**on(2))
    monkeypatch.setenv("LONGHAUL_DEVICE", "cuda")  # of the other rank alone: there is no GPU here
    with pytest.raises(StageError, match=r"rank 1 \(CPU\): .* sees no usable CUDA device") as caught:
        attempt(run)
    assert caught.value.reason is Reason.GPU_LOST
