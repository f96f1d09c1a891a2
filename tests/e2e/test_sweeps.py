"""A sweep of real trials: kill -9 of everything changes nothing, and a trial is the lone job bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

from jobs.disk.rundir import RunDir, list_runs
from jobs.events import AttemptEnded, ModelLoaded
from jobs.sweeps.directory import SweepDir, find
from jobs.sweeps.record import SweepRecord, TrialRecord
from tests.conftest import ROWS
from tests.facts import facts_of
from tests.stack import Stack

SWEEP: dict[str, Any] = {
    "name": "tickets",
    "job": {
        "model": "builtin:roberta-tiny",
        "data": {"train": "tickets.jsonl", "validation": 0.2, "max_input_tokens": 64},
        "training": {"epochs": 3, "batch_size": 16},
        "checkpoint": {"every_steps": 10},
        "evaluation": {"every_steps": 20, "samples": 0},
    },
    "space": {
        "training.learning_rate": {"range": [1e-4, 1e-2], "log": True},
        "training.batch_size": [8, 16],
    },
    "metric": "accuracy",
    "sampler": "random",  # which does not depend on which trial was faster
    "max_trials": 3,
    "keep_models": "all",
}


def submit(stack: Stack, sweep: dict[str, Any]) -> SweepDir:
    answer = requests.post(f"{stack.url}/sweeps", json=sweep, timeout=10)
    assert answer.status_code == 202, answer.text
    return find(stack.runs, answer.json()["id"])


def ended(stack: Stack, sweep: SweepDir) -> SweepRecord:
    def look() -> SweepRecord | None:
        record = sweep.record()
        return record if record.ended is not None else None

    return stack.wait_for(look, f"the end of {sweep.id}", timeout=240)


def wait_for_checkpoint(stack: Stack, sweep: SweepDir, trial: int) -> RunDir:
    """Until this trial has one, and still runs."""

    def look() -> RunDir | None:
        trials = sweep.record().trials
        run = RunDir(stack.runs / trials[trial].jobs[0]) if len(trials) > trial else None
        return run if run is not None and run.exists() and run.record().progress_step else None

    return stack.wait_for(look, f"a checkpoint of trial {trial}", timeout=120)


def weights(stack: Stack, trial: TrialRecord) -> bytes:
    return (stack.runs / trial.jobs[0] / "model" / "model.safetensors").read_bytes()


def test_kill_everything_and_nothing_is_lost_or_made_twice(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "tickets.jsonl").write_bytes((ROWS.parent / "tickets.jsonl").read_bytes())
    stack = Stack(tmp_path / "home", data=data)
    roles = ("service", "check", "prepare", "train", "train-2", "publish")
    with stack:
        stack.start(*roles)
        undisturbed = ended(stack, submit(stack, SWEEP))
        assert undisturbed.counts == {"succeeded": 3}
        lone = stack.submit(RunDir(stack.runs / undisturbed.trials[2].jobs[0]).spec().model_dump(mode="json"))
        stack.wait_for_event(lone, "job.succeeded", "job.failed")

        sweep = submit(stack, SWEEP)
        wait_for_checkpoint(stack, sweep, 1)
        for role in tuple(stack.processes):
            stack.kill(role)
        stack.redis.stop()  # by SIGKILL, too
        stack.redis.start()
        stack.start(*roles)
        record = ended(stack, sweep)

    assert record.counts == {"succeeded": 3}
    for trial, twin in zip(record.trials, undisturbed.trials, strict=True):
        assert (trial.settings, trial.value) == (twin.settings, twin.value)
        assert weights(stack, trial) == weights(stack, twin), f"trial {trial.number}"
    assert (lone.model / "model.safetensors").read_bytes() == weights(stack, undisturbed.trials[2])
    one = RunDir(stack.runs / undisturbed.trials[2].jobs[0])
    pictures = [{path.name for path in run.path.glob("*.png")} & {"memory.png", "loss.png"} for run in (lone, one)]
    assert pictures == [{"memory.png", "loss.png"}, set()]
    jobs = [job for each in (undisturbed, record) for trial in each.trials for job in trial.jobs]
    assert sorted([*jobs, lone.id]) == [run.id for run in list_runs(stack.runs)], "none made twice"
    interrupted = [
        run for run in map(RunDir, (stack.runs / job for job in jobs)) if len(facts_of(run, ModelLoaded)) > 1
    ]
    assert interrupted, "nothing was killed while it trained"
    for run in interrupted:
        assert [end.reason for end in facts_of(run, AttemptEnded)][-1] == "done"
        assert facts_of(run, ModelLoaded)[-1].resumed_step, "it did not begin again"
