"""Whole jobs on Slurm: real workers, real trainers, and programs that stand for Slurm's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.disk.rundir import RunDir, list_runs
from jobs.events import AttemptEnded, AttemptStarted, JobQueued, ModelLoaded, TaskStarted, TaskSubmitted
from tests.facts import facts_of, reasons
from tests.fake_slurm.slurm import FakeSlurm
from tests.stack import ROLES, ROOT, Stack, tiny_job


@contextmanager
def cluster(tmp_path: Path, data: Path, **engine: object) -> Iterator[tuple[FakeSlurm, Stack]]:
    """Longhaul on a machine whose jobs train here, and on Slurm where they ask for it."""
    with (
        FakeSlurm(tmp_path) as slurm,
        Stack(tmp_path / "home", data=data, environment=slurm.environment(**engine)) as stack,
    ):
        stack.start(*ROLES)
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


def progressed(stack: Stack, job: RunDir, attempt: int) -> None:
    """Once this attempt has saved a checkpoint."""
    saved = "checkpoint.saved"
    stack.wait_for(
        lambda: next((e for e in job.events() if e.type == saved and e.attempt == attempt), None),
        f"a checkpoint of attempt {attempt}",
    )


def test_a_job_that_waits_and_is_preempted_ends_as_one_that_was_never_disturbed(tmp_path: Path, data: Path) -> None:
    with cluster(tmp_path, data) as (slurm, stack):
        slurm.tell("hold")
        job = stack.submit(long_job())
        twin = stack.submit(long_job(resources={}))
        stack.wait_for_event(job, "task.waiting")
        shown = stack.shown(job)
        assert shown["status"] == "running"
        assert shown["waiting_reason"] == "it waits on the engine cluster: PENDING (Resources)"
        slurm.untell("hold")
        progressed(stack, job, 1)
        assert stack.shown(job)["waiting_reason"] is None
        slurm.end("1", "preempt")
        for each in (job, twin):
            assert stack.wait_for_event(each, "job.succeeded", "job.failed").type == "job.succeeded"

        assert reasons(job) == ["interrupted", "done"] and job.record().restarts == 0
        resumed = facts_of(job, ModelLoaded)[1].resumed_step
        assert resumed is not None and resumed == facts_of(job, AttemptEnded)[0].step > 0
        assert slurm.spans() == ["start 1", "end 1", "start 2", "end 2"]
        assert [fact.engine for fact in facts_of(job, AttemptStarted)] == ["cluster", "cluster"]
        assert [fact.engine for fact in facts_of(twin, AttemptStarted)] == [None]
        assert [fact.task for fact in facts_of(job, TaskSubmitted)] == ["1", "2"]
        ours, theirs = ((run.model / "model.safetensors").read_bytes() for run in (job, twin))
        assert ours == theirs, "bit for bit"


def test_pause_and_cancel_reach_the_node(tmp_path: Path, data: Path) -> None:
    with cluster(tmp_path, data) as (slurm, stack):
        file = tmp_path / "job.json"
        file.write_text(json.dumps({**long_job(), "resources": {}}))
        assert "is validating" in longhaul(stack, "submit", str(file), "--on", "cluster")
        [job] = list_runs(stack.runs)
        progressed(stack, job, 1)
        shown = longhaul(stack, "show", "last")
        assert re.search("engine +cluster, task 1", shown), shown
        assert re.search("train .* cpu, engine cluster", longhaul(stack, "workers"))
        assert stack.post(job, "pause").status_code == 200
        stack.wait_for_event(job, "job.paused")
        stack.wait_for(lambda: slurm.spans() == ["start 1", "end 1"] or None, "the end of the script")
        assert reasons(job) == ["interrupted"] and job.record().checkpoint is not None
        slurm.tell("hold")
        assert stack.post(job, "resume").status_code == 200
        stack.wait_for_event(job, "task.waiting")
        assert stack.post(job, "cancel").status_code == 200
        stack.wait_for_event(job, "job.cancelled")
        assert slurm.jobs()[1]["state"] == "CANCELLED", "it was taken out of Slurm's queue"
        assert slurm.spans() == ["start 1", "end 1"], "and never ran"
        assert [job["state"] for job in slurm.jobs()] == ["FAILED", "CANCELLED"]


def test_a_task_whose_supervisor_is_killed_stops_by_itself_and_none_runs_beside_it(tmp_path: Path, data: Path) -> None:
    with cluster(tmp_path, data, alone_s=5) as (slurm, stack):
        job = stack.submit(long_job(epochs=24))  # long enough to be at work when the silence is noticed
        progressed(stack, job, 1)
        stack.kill("train")
        stack.start("train")
        assert stack.wait_for_event(job, "job.succeeded", "job.failed", timeout=300).type == "job.succeeded"

        assert reasons(job) == ["interrupted", "done"], "the trainer could write why it ended"
        assert slurm.spans() == ["start 1", "end 1", "start 2", "end 2"]
        assert facts_of(job, ModelLoaded)[1].resumed_step == facts_of(job, AttemptEnded)[0].step


def test_a_cluster_that_is_away_and_a_node_that_dies_cost_no_job(tmp_path: Path, data: Path) -> None:
    with cluster(tmp_path, data) as (slurm, stack):
        slurm.tell("down")
        job = stack.submit(long_job())
        stack.wait_for_event(job, "task.waiting")
        words = "sbatch: error: Unable to contact slurm controller (connect failure)"
        assert words in (stack.shown(job)["waiting_reason"] or "")
        assert facts_of(job, JobQueued)[-1].not_before_s == 30
        slurm.untell("down")
        progressed(stack, job, 2)
        slurm.end("1", "node_fail")
        assert stack.wait_for_event(job, "job.succeeded", "job.failed").type == "job.succeeded"

        assert reasons(job) == ["not_submitted", "worker_lost", "done"] and job.record().restarts == 0
        lost = facts_of(job, AttemptEnded)[1].error
        assert lost is not None and lost.message == "the worker was lost: cluster: NODE_FAIL"
        assert [fact.task for fact in facts_of(job, TaskStarted)] == ["1", "2"]
        assert slurm.spans() == ["start 1", "end 1", "start 2", "end 2"]
