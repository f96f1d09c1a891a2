"""Whole jobs on SkyPilot and on Kubeflow: real workers, real trainers, and programs that stand for `sky` and `kubectl`.

Box and node share a bucket alone: the node's folder is emptied before each start, as on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, ModelLoaded, TaskSubmitted
from tests.facts import facts_of, reasons
from tests.fake_cloud.cloud import FakeCloud
from tests.stack import ROLES, Stack, tiny_job


@contextmanager
def cloud_of(kind: str, tmp_path: Path, data: Path, **engine: object) -> Iterator[tuple[FakeCloud, Stack]]:
    """Longhaul on a machine whose jobs train here, and in the cloud where they ask for it."""
    with (
        FakeCloud(tmp_path) as cloud,
        Stack(tmp_path / "home", data=data, environment=cloud.environment(kind, **engine)) as stack,
    ):
        stack.start(*ROLES)
        yield cloud, stack


def long_job(**more: Any) -> dict[str, Any]:
    """240 steps, which last longer than a checkpoint takes to the bucket."""
    training = {"epochs": 30, "batch_size": 8, "learning_rate": 0.003}
    parts = {"training": training, "checkpoint": {"every_steps": 30, "keep": 2}, "resources": {"engine": "cloud"}}
    return tiny_job(**{**parts, "evaluation": {"every_steps": 240, "samples": 0}, **more})


def in_bucket(cloud: FakeCloud, job: RunDir, stack: Stack) -> None:
    """Once a checkpoint of the first attempt is there whole."""
    bucket = Path(cloud.bucket.removeprefix("file://")) / job.id

    def look() -> bool | None:
        listings: list[dict[str, Any]] = [json.loads(each.read_text()) for each in bucket.glob("*/.node.json")]
        return any("checkpoints/" in name for said in listings for name in said["files"]) or None

    stack.wait_for(look, "a checkpoint in the bucket")


def test_a_job_whose_machine_is_lost_on_skypilot_ends_as_one_that_was_never_disturbed(
    tmp_path: Path, data: Path
) -> None:
    with cloud_of("skypilot", tmp_path, data) as (cloud, stack):
        job, twin = stack.submit(long_job()), stack.submit(long_job(resources={}))
        in_bucket(cloud, job, stack)
        [task] = cloud.tasks()
        cloud.end(task["name"], "lose")
        for each in (job, twin):
            assert stack.wait_for_event(each, "job.succeeded", "job.failed").type == "job.succeeded"

        assert reasons(job) == ["worker_lost", "done"] and job.record().restarts == 0
        lost = facts_of(job, AttemptEnded)[0].error
        assert lost is not None and lost.message == "the worker was lost: cloud: CANCELLED"
        assert [each["state"] for each in cloud.tasks()] == ["cancelled", "ended"], (
            "what SkyPilot recovers is cancelled"
        )
        assert cloud.spans() == ["start", "end", "start", "end"]
        assert facts_of(job, ModelLoaded)[1].resumed_step in range(30, 240, 30)
        assert [fact.task for fact in facts_of(job, TaskSubmitted)] == [each["name"] for each in cloud.tasks()]
        ours, theirs = ((run.model / "model.safetensors").read_bytes() for run in (job, twin))
        assert ours == theirs, "bit for bit"
        assert [(row.step, row.loss) for row in job.metrics()] == [(row.step, row.loss) for row in twin.metrics()]
        assert sorted(each.name for each in job.checkpoints.iterdir()) == ["step-00000210", "step-00000240"]


def test_a_machine_that_skypilot_brings_back_first_does_not_train_the_same_attempt_again(
    tmp_path: Path, data: Path
) -> None:
    with cloud_of("skypilot", tmp_path, data, look_every_s=3.0, alone_s=10.0) as (cloud, stack):
        cloud.tell("again")
        job = stack.submit(long_job())
        in_bucket(cloud, job, stack)
        [task] = cloud.tasks()
        cloud.end(task["name"], "lose")
        assert stack.wait_for_event(job, "job.succeeded", "job.failed").type == "job.succeeded"
        assert reasons(job) == ["worker_lost", "done"]
        assert [each["starts"] for each in cloud.tasks()] == [2, 1]


def test_a_pod_that_is_preempted_on_kubeflow_saves_its_checkpoint_and_pause_and_cancel_reach_it(
    tmp_path: Path, data: Path
) -> None:
    with cloud_of("kubeflow", tmp_path, data) as (cloud, stack):
        job = stack.submit(long_job())
        in_bucket(cloud, job, stack)
        cloud.end(cloud.tasks()[0]["name"], "preempt")
        stack.wait_for(lambda: len(facts_of(job, ModelLoaded)) == 2 or None, "the second attempt to train")
        assert stack.post(job, "pause").status_code == 200
        stack.wait_for_event(job, "job.paused")
        assert reasons(job) == ["interrupted", "interrupted"] and job.record().restarts == 0
        steps = [end.step for end in facts_of(job, AttemptEnded)]
        assert facts_of(job, ModelLoaded)[1].resumed_step == steps[0] > 0
        assert (job.checkpoints / f"step-{steps[1]:08d}" / "manifest.json").exists()
        cloud.tell("hold")
        assert stack.post(job, "resume").status_code == 200
        stack.wait_for(lambda: len(cloud.tasks()) == 3 or None, "a third task")
        assert stack.post(job, "cancel").status_code == 200
        stack.wait_for_event(job, "job.cancelled")
        assert [each["state"] for each in cloud.tasks()] == ["lost", "ended", "cancelled"]
        assert cloud.spans() == ["start", "end"] * 2, "what was taken back never ran"
