"""Jobs that are cancelled and paused, before they train and meanwhile. (tests/faults/test_signals.py stops workers.)"""

from __future__ import annotations

from jobs.state import Status
from jobs.trainer_facts import ModelLoaded
from tests.e2e.long_jobs import LONG, long_job
from tests.support.processes import asked_at, freeze, stepping, thaw
from tests.support.samples import facts_of, reasons
from tests.support.stack import Stack


def test_queued_and_running_jobs_are_cancelled_and_paused(stack: Stack) -> None:
    endless = LONG | {"epochs": 1000}
    running = stack.submit(long_job(priority=1) | {"training": endless})
    trainer = freeze(stack, running, stepping(4, 7999))
    waiting, resting = stack.submit(long_job()), stack.submit(long_job() | {"training": endless})
    for run in (waiting, resting):
        stack.wait_for_event(run, "job.queued")

    assert stack.post(waiting, "cancel").json()["status"] == "cancelled"
    assert stack.post(resting, "pause").json()["status"] == "paused"
    thaw(trainer)
    asked_at(stack, running, "cancel", stepping(4, 7999))
    assert reasons(running) == ["interrupted"]
    record = running.record()
    assert record.checkpoint is not None and (running.path / record.checkpoint).is_dir()
    assert [event.type for event in waiting.events()][-1] == "job.cancelled" and waiting.record().attempt == 0

    # the paused one is resumed, paused again while it runs, resumed, and resumes from where it was
    assert stack.post(resting, "resume").json()["status"] == "queued"
    asked_at(stack, resting, "pause", stepping(4, 7999))
    mark = resting.record().number
    assert resting.record().status is Status.PAUSED
    paused_at = resting.record().progress_step
    assert stack.post(resting, "resume").status_code == 200
    stack.wait_for_event(resting, "model.loaded", after=mark)
    assert [loaded.resumed_step for loaded in facts_of(resting, ModelLoaded)] == [None, paused_at]
    assert stack.post(running, "cancel").status_code == 409
