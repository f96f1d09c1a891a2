"""Whole jobs on Slurm: real workers, real trainers, and programs that stand for Slurm's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir, list_runs
from jobs.events import AttemptEnded, AttemptStarted, JobQueued, TaskStarted, TaskSubmitted
from jobs.trainer_facts import ModelLoaded
from tests.fake_slurm.slurm import FakeSlurm
from tests.support.processes import Moment, asked_at, continue_once_asked, freeze, said
from tests.support.samples import facts_of, reasons
from tests.support.shared_stack import restarted, shared_stack, succeeds
from tests.support.stack import ROOT, Stack, tiny_job

ALONE_S = 15.0
"""After which a node that hears nothing of us stops its trainer."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeSlurm, Stack]]:
    """Longhaul on a machine whose jobs train here, and on Slurm where they ask for it."""
    folder = tmp_path_factory.mktemp("slurm")
    with FakeSlurm(folder) as slurm, shared_stack(folder) as stack:
        stack.start("service", "check", "prepare", "publish")
        with restarted(stack, "train", **slurm.environment(alone_s=ALONE_S)):
            yield slurm, stack


def long_job(epochs: int = 8, **more: Any) -> dict[str, Any]:
    """8 steps an epoch, a checkpoint after each, on Slurm; evaluated before and after."""
    training = {"epochs": epochs, "batch_size": 8, "learning_rate": 0.003}
    evaluation = {"every_steps": 1000, "samples": 1}
    return tiny_job(**{"training": training, "evaluation": evaluation, "resources": {"engine": "cluster"}, **more})


def longhaul(stack: Stack, *words: str) -> str:
    """What the command prints."""
    environment = {"PATH": os.environ["PATH"], "LONGHAUL_URL": stack.url, "COLUMNS": "200"}
    command = [sys.executable, "-m", "longhaul.main", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def saved(attempt: int) -> Moment:
    """Once this attempt has saved a checkpoint."""
    return lambda run: "checkpoint.saved" in said(run, attempt)


def waits(stack: Stack, job: RunDir, words: str) -> None:
    """Once the job waits, and says so."""
    stack.wait_for(lambda: words in (stack.shown(job)["waiting_reason"] or "") or None, words)


def test_whatever_the_cluster_does_a_job_ends_as_one_that_was_never_disturbed(place: tuple[FakeSlurm, Stack]) -> None:
    # The cluster is away; then the job waits in its queue; its node is preempted; the next one dies.
    slurm, stack = place
    before, first = len(slurm.spans()), len(slurm.jobs()) + 1
    slurm.tell("down")
    job, twin = stack.submit(long_job()), stack.submit(long_job(resources={}))
    waits(stack, job, "sbatch: error: Unable to contact slurm controller (connect failure)")
    assert facts_of(job, JobQueued)[-1].not_before_s == 30
    slurm.tell("hold")
    slurm.untell("down")
    waits(stack, job, "it waits on the engine cluster: PENDING (Resources)")
    assert stack.shown(job)["status"] == "running"
    slurm.untell("hold")
    trainer = freeze(stack, job, saved(2))
    stack.wait_for(lambda: stack.shown(job)["waiting_reason"] is None or None, "the end of its waiting")
    slurm.end(str(first), "preempt")
    continue_once_asked(stack, trainer)
    freeze(stack, job, saved(3))
    slurm.end(str(first + 1), "node_fail")
    succeeds(stack, job, twin)

    # Where a machine is so busy that the dead node goes unseen for minutes, it is the silence that is seen.
    silent = "stalled" in reasons(job)
    lost = "stalled" if silent else "worker_lost"
    assert reasons(job) == ["not_submitted", "interrupted", lost, "done"] and job.record().restarts == silent
    ends = facts_of(job, AttemptEnded)
    assert ends[2].error is not None and ends[2].error.message == "the worker was lost: cluster: NODE_FAIL"
    loaded = facts_of(job, ModelLoaded)
    assert loaded[1].resumed_step == ends[1].step and (loaded[2].resumed_step or 0) >= (ends[1].step or 1) > 0
    tasks = [str(first + number) for number in range(3)]
    assert slurm.spans()[before:] == [f"{what} {task}" for task in tasks for what in ("start", "end")]
    assert [fact.engine for fact in facts_of(job, AttemptStarted)] == ["cluster"] * 4
    assert [fact.engine for fact in facts_of(twin, AttemptStarted)] == [None]
    assert [fact.task for fact in facts_of(job, TaskSubmitted)] == tasks == [f.task for f in facts_of(job, TaskStarted)]
    ours, theirs = ((run.model / "model.safetensors").read_bytes() for run in (job, twin))
    assert ours == theirs, "bit for bit"


def test_pause_and_cancel_reach_the_node(place: tuple[FakeSlurm, Stack], tmp_path: Path) -> None:
    # And a task whose supervisor is killed stops by itself, and none runs beside it.
    slurm, stack = place
    before, jobs, runs = len(slurm.spans()), len(slurm.jobs()), {run.id for run in list_runs(stack.runs)}
    first, second, third = (f"{jobs + number}" for number in (1, 2, 3))
    file = tmp_path / "job.json"
    file.write_text(json.dumps({**long_job(), "resources": {}}))
    assert "is validating" in longhaul(stack, "submit", str(file), "--on", "cluster")
    [job] = [run for run in list_runs(stack.runs) if run.id not in runs]
    trainer = freeze(stack, job, saved(1))
    shown = longhaul(stack, "show", "last")
    assert re.search(f"engine +cluster, task {first}", shown), shown
    assert re.search("train .* cpu, engine cluster", longhaul(stack, "workers"))
    stack.kill("train")
    continue_once_asked(stack, trainer)
    stack.start("train")
    asked_at(stack, job, "pause", saved(2))
    stack.wait_for(lambda: slurm.spans()[before:][-1] == f"end {second}" or None, "the end of the script")
    assert reasons(job) == ["interrupted", "interrupted"] and job.record().checkpoint is not None
    assert facts_of(job, ModelLoaded)[1].resumed_step == facts_of(job, AttemptEnded)[0].step
    slurm.tell("hold")
    assert stack.post(job, "resume").status_code == 200
    waits(stack, job, "PENDING")
    assert stack.post(job, "cancel").status_code == 200
    stack.wait_for_event(job, "job.cancelled")
    slurm.untell("hold")
    assert slurm.spans()[before:] == [f"{what} {task}" for task in (first, second) for what in ("start", "end")]
    assert [job["state"] for job in slurm.jobs()[jobs:]] == ["FAILED", "FAILED", "CANCELLED"], "the last one never ran"
    assert slurm.jobs()[-1]["id"] == third
