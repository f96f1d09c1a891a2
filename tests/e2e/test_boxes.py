"""Two boxes, between which is a network of their own: submitted on one, trained on the other, cut off, killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis

from jobs.attempt import Noted
from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted
from jobs.metrics import MetricRow
from jobs.reasons import Reason
from jobs.trainer_facts import CheckpointSaved, ModelLoaded
from tests.support.boxes import OTHER, TwoBoxes, forget_locks, why_no_namespace
from tests.support.processes import freeze, said, stepping, thaw, trainers
from tests.support.samples import facts_of, read_lines, reasons
from tests.support.shared_stack import rows, stop, succeeds
from tests.support.stack import ROOT, tiny_job

NO_NAMESPACE = why_no_namespace()
pytestmark = pytest.mark.skipif(NO_NAMESPACE is not None, reason=str(NO_NAMESPACE))


@pytest.fixture(scope="module")
def _boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoBoxes]:
    home = tmp_path_factory.mktemp("boxes")
    with TwoBoxes(home / "home", data=rows(home)) as boxes:
        yield boxes


@pytest.fixture
def boxes(_boxes: TwoBoxes) -> TwoBoxes:
    """Everything here but the train worker, which is on the other box."""
    stop(_boxes, "train")
    _boxes.start_if_gone("service", "check", "prepare", "publish", OTHER)
    return _boxes


def job(epochs: int) -> dict[str, Any]:
    """8 steps an epoch, each logged, a checkpoint every 4."""
    training = {"epochs": epochs, "batch_size": 8, "learning_rate": 0.003}
    return tiny_job(
        log={"every_steps": 1}, checkpoint={"every_steps": 4, "keep": 2}, training=training,
        evaluation={"every_steps": 1000, "samples": 1},
    )  # fmt: skip


def wait_for_step(boxes: TwoBoxes, run: RunDir, step: int, attempt: int = 1) -> None:
    """Until that attempt has logged it."""

    def look() -> bool | None:
        return any(row.step >= step and row.attempt == attempt for row in run.metrics()) or None

    boxes.wait_for(look, f"step {step} of {run.id}")


def reconciled(boxes: TwoBoxes, admin: Any) -> None:
    """Until reconcile has looked at all leases: it renews its own at the beginning of each look."""

    def until_s() -> float:
        seconds, microseconds = admin.time()
        return float(seconds + microseconds / 1e6 + admin.pttl("longhaul:reconcile") / 1e3)

    def renewed(before: float) -> bool | None:
        return until_s() > before + 1 or None

    for _ in range(2):
        boxes.wait_for(partial(renewed, until_s()), "a look of reconcile")


def told(boxes: TwoBoxes, *words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "longhaul.main", *words]
    environment = {**boxes.environment, "LONGHAUL_URL": boxes.url, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def as_planned(run: RunDir, epochs: int) -> None:
    """It succeeded; no event's number and no row of metrics is missing or there twice."""
    assert [event.number for event in run.events()] == list(range(1, run.record().number + 1))
    assert [row.step for row in read_lines(run.metrics_file, MetricRow)] == list(range(1, 8 * epochs + 1))


def test_a_job_that_is_submitted_here_is_trained_on_the_other_box(boxes: TwoBoxes) -> None:
    run = boxes.submit(job(2))
    succeeds(boxes, run)
    as_planned(run, 2)
    assert [fact.box for fact in facts_of(run, AttemptStarted)] == ["gpu2"]
    assert "started on cpu of gpu2 (worker train-" in told(boxes, "events", run.id)
    listed = told(boxes, "workers")
    assert "box" in listed and any(line.startswith("train ") and " gpu2 " in line for line in listed.splitlines())
    with redis.Redis.from_url(
        boxes.redis.admin_url
    ) as admin:  # redis-py introduces itself with CLIENT, and lives without
        refused = {each["object"] for each in admin.acl_log() if each["username"] == "box-gpu2"}
    assert {each for each in refused if not each.startswith("client")} == set()


def test_while_the_network_is_away_the_box_trains_on_and_is_heard_of_again_after_it(boxes: TwoBoxes) -> None:
    # Cut: the network to Redis, for longer than a lease; the folders are there. Must hold: the attempt continues: its
    # trainer has the job's lock; all it says arrives by the folders; then the worker takes the next job.
    run = boxes.submit(job(400))
    trainer = freeze(boxes, run, stepping(2, 3000))
    boxes.cut()
    with redis.Redis.from_url(boxes.redis.admin_url) as admin:
        assert admin.zadd("longhaul:leases", {run.id: 0}, xx=True, ch=True) == 1
        reconciled(boxes, admin)
    thaw(trainer)
    wait_for_step(boxes, run, run.metrics()[-1].step + 1)
    assert trainers(run) and reasons(run) == []
    # What happens meanwhile is told here, too.
    saved = boxes.wait_for_event(run, "checkpoint.saved", after=run.record().number)
    boxes.wait_for(lambda: (boxes.shown(run)["event_number"] >= saved.number) or None, "that to be shown")
    boxes.join()
    assert boxes.post(run, "cancel").status_code == 200
    boxes.wait_for_event(run, "job.cancelled")
    succeeds(boxes, boxes.submit(job(1)))
    assert [fact.reason for fact in facts_of(run, AttemptEnded)] == [Reason.INTERRUPTED]


def test_a_box_that_loses_network_and_folders_is_replaced_and_writes_nothing_when_it_is_back(boxes: TwoBoxes) -> None:
    # Cut: everything, for longer than lease and lock last. Must hold: the job is trained on here, and once the other
    # box is back its trainer ends without having written.
    run = boxes.submit(job(3))
    freeze(boxes, run, stepping(6, 20))
    boxes.freeze_other()
    boxes.cut()
    forget_locks(run)
    boxes.start("train")
    ended = boxes.wait_for_event(run, "attempt.ended")
    assert isinstance(ended.fact, AttemptEnded) and ended.fact.reason is Reason.WORKER_LOST
    assert "the worker was lost: it was not heard of for too long (box gpu2)" in told(boxes, "events", run.id)
    wait_for_step(boxes, run, 10, attempt=2)
    said = run.attempt_file(1).read_bytes()
    boxes.join()
    boxes.thaw_other()
    succeeds(boxes, run)
    assert run.attempt_file(1).read_bytes() == said
    as_planned(run, 3)
    assert [fact.box for fact in facts_of(run, AttemptStarted)] == ["gpu2", "main"]
    boxes.stop("train")
    succeeds(boxes, boxes.submit(job(1)))


def test_a_box_that_is_killed_costs_the_steps_since_its_checkpoint(boxes: TwoBoxes) -> None:
    # Killed: every process of the other box. Must hold: a lost attempt as any other; the next one resumes here.
    run = boxes.submit(job(3))
    freeze(boxes, run, lambda run: stepping(4, 20)(run) and "checkpoint.saved" in said(run, 1))
    boxes.kill_other()  # its supervisor, too, perhaps before it has told of the checkpoint
    facts = [line.fact for line in run.attempt_lines(1) if isinstance(line, Noted)]
    saved = max(fact.step for fact in facts if isinstance(fact, CheckpointSaved))
    boxes.start("train")
    succeeds(boxes, run)
    as_planned(run, 3)
    assert reasons(run) == ["worker_lost", "done"]
    resumed = facts_of(run, ModelLoaded)[1].resumed_step
    assert resumed is not None and resumed >= saved
    assert json.loads(told(boxes, "show", run.id, "--json"))["status"] == "succeeded"
