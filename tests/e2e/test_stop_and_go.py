"""Jobs that are cancelled, paused, and stopped with their worker; and what the final weights are after that."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.events import ModelLoaded
from jobs.state import Status
from tests.e2e.long_jobs import LONG, long_job, wait_for_step
from tests.facts import facts_of, reasons
from tests.stack import Stack


@pytest.fixture
def stack(tmp_path: Path, data: Path) -> Stack:
    return Stack(tmp_path / "home", data=data)


def test_a_worker_stopped_mid_job_and_started_again_ends_with_the_same_weights(stack: Stack) -> None:
    with stack:
        stack.start("service", "check", "prepare", "train", "publish")
        undisturbed = stack.submit(long_job())
        stack.wait_for_event(undisturbed, "job.succeeded", "job.failed", timeout=120)

        run = stack.submit(long_job())
        wait_for_step(stack, run, 14)
        assert stack.stop("train") == 0
        record = run.record()
        assert (record.status, record.last_reason) == (Status.QUEUED, "interrupted")
        stopped_at = record.progress_step
        assert 14 <= stopped_at < 96

        stack.start("train")
        stack.wait_for_event(run, "job.succeeded", "job.failed", timeout=120)
        assert [loaded.resumed_step for loaded in facts_of(run, ModelLoaded)] == [None, stopped_at]

    assert (run.model / "model.safetensors").read_bytes() == (undisturbed.model / "model.safetensors").read_bytes()
    series = [[(row.step, row.loss, row.grad_norm) for row in each.metrics()] for each in (undisturbed, run)]
    assert series[0] == series[1]


def test_queued_and_running_jobs_are_cancelled_and_paused(stack: Stack) -> None:
    with stack:
        stack.start("service", "check", "prepare", "train")
        # Longer than check and prepare of the two behind it take, however busy the machine.
        endless = LONG | {"epochs": 1000}
        running = stack.submit(long_job(priority=1) | {"training": endless})
        wait_for_step(stack, running, 4)
        waiting = stack.submit(long_job())
        resting = stack.submit(long_job())
        for run in (waiting, resting):
            stack.wait_for_event(run, "job.queued")

        assert stack.post(waiting, "cancel").json()["status"] == "cancelled"
        assert stack.post(resting, "pause").json()["status"] == "paused"
        answer = stack.post(running, "cancel")
        assert (answer.status_code, answer.json()["requested"]) == (200, "cancel")
        stack.wait_for_event(running, "job.cancelled")
        assert reasons(running) == ["interrupted"]
        record = running.record()
        assert record.checkpoint is not None and (running.path / record.checkpoint).is_dir()
        assert [event.type for event in waiting.events()][-1] == "job.cancelled" and waiting.record().attempt == 0

        # the paused one is resumed, paused again while it runs, resumed, and resumes from where it was
        assert stack.post(resting, "resume").json()["status"] == "queued"
        wait_for_step(stack, resting, 4)
        stack.post(resting, "pause")
        stack.wait_for_event(resting, "attempt.ended")
        mark = resting.record().number
        assert resting.record().status is Status.PAUSED
        paused_at = resting.record().progress_step
        assert stack.post(resting, "resume").status_code == 200
        loaded = stack.wait_for_event(resting, "model.loaded", after=mark)
        assert isinstance(loaded.fact, ModelLoaded) and loaded.fact.resumed_step == paused_at
        assert stack.post(running, "cancel").status_code == 409
