"""A sweep of real trials: kill -9 of everything changes nothing, and a trial is the lone job bit for bit."""

from __future__ import annotations

from typing import Any

import requests

from jobs.disk.rundir import RunDir, list_runs
from jobs.events import AttemptEnded
from jobs.sweeps.directory import SweepDir, find
from jobs.sweeps.record import SweepRecord, TrialRecord
from jobs.trainer_facts import ModelLoaded
from tests.support.processes import freeze, resumable
from tests.support.samples import facts_of
from tests.support.shared_stack import succeeds
from tests.support.stack import ROLES, Stack

SWEEP: dict[str, Any] = {
    "name": "tickets",
    "job": {
        "model": "builtin:roberta-tiny",
        "data": {"train": "tickets.jsonl", "validation": 0.2, "max_input_tokens": 64},
        "training": {"epochs": 1, "batch_size": 16},
        "checkpoint": {"every_steps": 5},
        "evaluation": {"every_steps": 10, "samples": 0},
        "integrations": {"wandb": None},
    },
    "space": {
        "training.learning_rate": {"range": [1e-4, 1e-2], "log": True},
        "training.batch_size": [8, 16],
    },
    "metric": "accuracy",
    "sampler": "random",  # which does not depend on which trial was faster
    "max_trials": 2,
    "keep_models": "all",
}


def submit(stack: Stack, sweep: dict[str, Any]) -> SweepDir:
    answer = requests.post(f"{stack.url}/sweeps", json=sweep, timeout=60)
    assert answer.status_code == 202, answer.text
    return find(stack.runs, answer.json()["id"])


def ended(stack: Stack, sweep: SweepDir) -> SweepRecord:
    def look() -> SweepRecord | None:
        record = sweep.record()
        return record if record.ended is not None else None

    return stack.wait_for(look, f"the end of {sweep.id}")


def trial_of(stack: Stack, sweep: SweepDir, number: int) -> RunDir:
    """The job of this trial, once it is there."""

    def look() -> RunDir | None:
        trials = sweep.record().trials
        run = RunDir(stack.runs / trials[number].jobs[0]) if len(trials) > number and trials[number].jobs else None
        return run if run is not None and run.exists() else None

    return stack.wait_for(look, f"trial {number}")


def weights(stack: Stack, trial: TrialRecord) -> bytes:
    return (stack.runs / trial.jobs[0] / "model" / "model.safetensors").read_bytes()


def test_kill_everything_and_nothing_is_lost_or_made_twice(stack: Stack) -> None:
    roles = (*ROLES, "train-2")
    stack.start("train-2")
    undisturbed = ended(stack, submit(stack, SWEEP))
    assert undisturbed.counts == {"succeeded": 2}
    lone = stack.submit(RunDir(stack.runs / undisturbed.trials[1].jobs[0]).spec().model_dump(mode="json"))
    succeeds(stack, lone)

    sweep = submit(stack, SWEEP)
    freeze(stack, trial_of(stack, sweep, 1), resumable)
    for role in tuple(stack.processes):
        stack.kill(role)
    stack.redis.stop()  # by SIGKILL, too
    stack.redis.start()
    stack.start(*roles)
    record = ended(stack, sweep)
    assert stack.stop("train-2") == 0

    assert record.counts == {"succeeded": 2}
    for trial, twin in zip(record.trials, undisturbed.trials, strict=True):
        assert (trial.settings, trial.value) == (twin.settings, twin.value)
        assert weights(stack, trial) == weights(stack, twin), f"trial {trial.number}"
    assert (lone.model / "model.safetensors").read_bytes() == weights(stack, undisturbed.trials[1])
    one = RunDir(stack.runs / undisturbed.trials[1].jobs[0])
    pictures = [{path.name for path in run.path.glob("*.png")} & {"memory.png", "loss.png"} for run in (lone, one)]
    assert pictures == [{"memory.png", "loss.png"}, set()]
    jobs = [job for each in (undisturbed, record) for trial in each.trials for job in trial.jobs]
    ours = (undisturbed.id, record.id)
    assert sorted(jobs) == [run.id for run in list_runs(stack.runs) if run.record().sweep in ours], "none made twice"
    interrupted = [
        run for run in map(RunDir, (stack.runs / job for job in jobs)) if len(facts_of(run, ModelLoaded)) > 1
    ]
    assert interrupted, "nothing was killed while it trained"
    for run in interrupted:
        assert [end.reason for end in facts_of(run, AttemptEnded)][-1] == "done"
        assert facts_of(run, ModelLoaded)[-1].resumed_step, "it did not begin again"
