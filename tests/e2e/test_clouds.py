"""Whole jobs on SkyPilot: real workers, real trainers, and a program that stands for `sky`.

Box and node share a bucket alone: the node's folder is emptied before each start, as on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, TaskSubmitted
from jobs.trainer_facts import ModelLoaded
from tests.fake_cloud.cloud import FakeCloud
from tests.support.samples import facts_of, reasons
from tests.support.shared_stack import restarted, shared_stack, succeeds
from tests.support.stack import Stack, tiny_job


class CloudHome(NamedTuple):
    """Longhaul on a machine whose jobs train here, and in a cloud where they ask for it."""

    cloud: FakeCloud
    stack: Stack

    def tasks(self, job: RunDir) -> list[dict[str, Any]]:
        """Those of this job, in order."""
        names = [fact.task for fact in facts_of(job, TaskSubmitted)]
        return sorted(
            (each for each in self.cloud.tasks() if each["name"] in names), key=lambda e: names.index(e["name"])
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudHome]:
    folder = tmp_path_factory.mktemp("clouds")
    engines: dict[str, dict[str, object]] = {
        "sky": {"kind": "skypilot"},
        "slow": {"kind": "skypilot", "look_every_s": 3.0, "alone_s": 30.0},
    }
    with FakeCloud(folder) as cloud, shared_stack(folder) as stack:
        stack.start("service", "check", "prepare", "publish")
        with restarted(stack, "train", **cloud.environment_of(**engines)):
            yield CloudHome(cloud, stack)


def long_job(engine: str = "cloud", **more: Any) -> dict[str, Any]:
    """240 steps, which last longer than a checkpoint takes to the bucket."""
    training = {"epochs": 30, "batch_size": 8, "learning_rate": 0.003}
    parts = {"training": training, "checkpoint": {"every_steps": 30, "keep": 2}, "resources": {"engine": engine}}
    return tiny_job(**{**parts, "evaluation": {"every_steps": 240, "samples": 0}, **more})


def in_bucket(cloud: FakeCloud, job: RunDir, stack: Stack) -> None:
    """Once a checkpoint of the first attempt is there whole."""
    bucket = Path(cloud.bucket.removeprefix("file://")) / job.id

    def look() -> bool | None:
        listings: list[dict[str, Any]] = [json.loads(each.read_text()) for each in bucket.glob("*/.node.json")]
        return any("checkpoints/" in name for said in listings for name in said["files"]) or None

    stack.wait_for(look, "a checkpoint in the bucket")


def test_a_job_whose_machine_is_lost_on_skypilot_ends_as_one_that_was_never_disturbed(place: CloudHome) -> None:
    cloud, stack = place
    job, twin = stack.submit(long_job("sky")), stack.submit(long_job(resources={}))
    in_bucket(cloud, job, stack)
    before = cloud.spans()
    cloud.end(place.tasks(job)[0]["name"], "lose")
    succeeds(stack, job, twin)

    assert reasons(job) == ["worker_lost", "done"] and job.record().restarts == 0
    lost = facts_of(job, AttemptEnded)[0].error
    assert lost is not None and lost.message == "the worker was lost: sky: CANCELLED"
    assert [each["state"] for each in place.tasks(job)] == ["cancelled", "ended"], "what SkyPilot recovers is cancelled"
    assert cloud.spans()[len(before) :] == ["end", "start", "end"]
    assert facts_of(job, ModelLoaded)[1].resumed_step in range(30, 240, 30)
    ours, theirs = ((run.model / "model.safetensors").read_bytes() for run in (job, twin))
    assert ours == theirs, "bit for bit"
    assert [(row.step, row.loss) for row in job.metrics()] == [(row.step, row.loss) for row in twin.metrics()]
    assert sorted(each.name for each in job.checkpoints.iterdir()) == ["step-00000210", "step-00000240"]


def test_a_machine_that_skypilot_brings_back_first_does_not_train_the_same_attempt_again(place: CloudHome) -> None:
    cloud, stack = place
    cloud.tell("again")
    job = stack.submit(long_job("slow"))
    in_bucket(cloud, job, stack)
    cloud.end(place.tasks(job)[0]["name"], "lose")
    succeeds(stack, job)
    cloud.untell("again")
    assert reasons(job) == ["worker_lost", "done"]
    assert [each["starts"] for each in place.tasks(job)] == [2, 1]


def test_a_machine_that_is_taken_back_saves_its_checkpoint_and_pause_and_cancel_reach_it(place: CloudHome) -> None:
    cloud, stack = place
    before = cloud.spans()
    job = stack.submit(long_job("sky"))
    in_bucket(cloud, job, stack)
    cloud.end(place.tasks(job)[0]["name"], "preempt")
    stack.wait_for(lambda: len(facts_of(job, ModelLoaded)) == 2 or None, "the second attempt to train")
    assert stack.post(job, "pause").status_code == 200
    stack.wait_for_event(job, "job.paused")
    assert reasons(job) == ["interrupted", "interrupted"] and job.record().restarts == 0
    steps = [end.step for end in facts_of(job, AttemptEnded)]
    assert facts_of(job, ModelLoaded)[1].resumed_step == steps[0] > 0
    assert (job.checkpoints / f"step-{steps[1]:08d}" / "manifest.json").exists()
    cloud.tell("hold")
    assert stack.post(job, "resume").status_code == 200
    stack.wait_for(lambda: len(place.tasks(job)) == 3 or None, "a third task")
    assert stack.post(job, "cancel").status_code == 200
    stack.wait_for_event(job, "job.cancelled")
    cloud.untell("hold")
    assert [each["state"] for each in place.tasks(job)] == ["cancelled", "ended", "cancelled"]
    assert cloud.spans()[len(before) :] == ["start", "end"] * 2, "what was taken back never ran"
