"""Attempts of several real processes: they end well, resume, and end at once with the cause when one is lost."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.errors import StageError
from jobs.reasons import Reason
from jobs.trainer_facts import CheckpointSaved, ModelLoaded
from tests.training.attempts import attempt, facts, finished, logged, same_tensors
from tests.training.conftest import WORDS, MakeRun
from tests.training.ranks.conftest import After, attempt_with, followers, signal_followers
from tests.training.workplace import Workplace
from worker.training.context import TrainingContext
from worker.training.evaluate import Evaluation, evaluate
from worker.training.journal import StopSignal
from worker.training.ranks import leader

PLAIN = {
    "training": {"epochs": 4, "dropout": 0.0}, "evaluation": {"every_steps": 10, "samples": 0},
    "checkpoint": {"every_steps": 5}, "log": {"every_steps": 1},
}  # fmt: skip


def on(gpus: int) -> dict[str, object]:
    return {**PLAIN, "resources": {"gpus": gpus}}


def test_two_ranks_learn_what_one_learns_and_whatever_happens_to_them_costs_no_bit(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, whole, broken = make_run("one", **on(1)), make_run("whole", **on(2)), make_run("broken", **on(2))
    (whole.path / "ranks-of-a-killed-attempt").mkdir()
    assert attempt(one) == 0 and attempt(whole) == 0
    assert not list(whole.path.glob("ranks-*"))
    assert finished(whole).reason is Reason.DONE and followers() == []
    expected, seen = logged(one), logged(whole)
    assert [row[0] for row in seen] == [row[0] for row in expected]
    assert [row[1] for row in seen] == pytest.approx([row[1] for row in expected], rel=0.02), "bf16 rounds otherwise"
    assert [loaded.resumed_step for loaded in facts(whole, ModelLoaded)] == [None]

    def lost(number: int, stop: StopSignal, says: str, reason: Reason, code: str) -> None:
        """An attempt that ends with this, and leaves nobody."""
        with pytest.raises(StageError, match=says) as caught:
            attempt_with(broken, number, stop)
        assert (caught.value.reason, caught.value.detail_code) == (reason, code)
        assert followers() == []

    # The other rank is killed.
    killed = r"rank 1 \(CPU\) was killed by signal 9"
    lost(1, After(broken, 8, lambda: signal_followers(signal.SIGKILL)), killed, Reason.CRASH, "rank_lost")

    # It hangs: it is killed.
    stopped: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(leader, "SILENT_S", 5.0)
        hang = After(broken, 8, lambda: stopped.extend(signal_followers(signal.SIGSTOP)))
        lost(2, hang, r"one rank did not answer in time \(at least 5 s\)", Reason.STALLED, "rank_silent")
    assert stopped and not any(Path(f"/proc/{pid}").exists() for pid in stopped)

    # It is killed while rank 0 evaluates: the weights are saved all the same.
    def killing(context: TrainingContext) -> Evaluation:
        if context.state.step == 10:
            signal_followers(signal.SIGKILL)
        return evaluate(context)

    with monkeypatch.context() as patch:
        patch.setattr("worker.training.train.evaluate", killing)
        lost(3, StopSignal(), killed, Reason.CRASH, "rank_lost")
    assert facts(broken, CheckpointSaved, 3)[-1].step == 10

    # It gets the SIGTERM that is for rank 0 alone, which is then asked to stop.
    asked = After(broken, 12, lambda: signal_followers(signal.SIGTERM), stop=14)
    assert attempt_with(broken, 4, asked) == 75 and asked.done
    end = finished(broken, 4)
    assert end.reason is Reason.INTERRUPTED and facts(broken, CheckpointSaved, 4)[-1].step == end.step

    assert attempt(broken, 5) == 0
    assert [facts(broken, ModelLoaded, number)[0].resumed_step for number in range(1, 6)] == [None, 5, 5, 10, end.step]
    assert logged(broken) == logged(whole)
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")


def test_a_checkpoint_goes_from_two_ranks_to_one_and_back(tmp_path: Path, model_folder: Path) -> None:
    place = Workplace(tmp_path / "place")
    shutil.copytree(model_folder, place.data / "model")
    draw = random.Random(7)
    words = [[draw.choice(WORDS) for _ in range(draw.randint(3, 14))] for _ in range(40)]
    place.rows("rows.jsonl", [{"input": " ".join(row), "target": " ".join(reversed(row[::2]))} for row in words])
    parts: dict[str, Any] = {**PLAIN, "model": "./model", "data": {"validation": 0.2}, "memory": {"micro_batch": 4}}
    parts["training"] = {"epochs": 4, "dropout": 0.0, "batch_size": 8, "learning_rate": 0.01}

    def begun(gpus: int, source: str | None, stop_at: int) -> RunDir:
        run = place.job(**parts, resources={"gpus": gpus}, **({"resume_from": source} if source else {}))
        place.prepare(run)
        assert attempt(run, stop_at=stop_at) == (75 if stop_at else 0)
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


def test_what_another_rank_refuses_ends_the_attempt_with_its_reason(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**on(2))
    monkeypatch.setenv("LONGHAUL_DEVICE", "cuda")  # of the other rank alone: there is no GPU here
    with pytest.raises(StageError, match=r"rank 1 \(CPU\): .* sees no usable CUDA device") as caught:
        attempt(run)
    assert caught.value.reason is Reason.GPU_LOST
