"""After a repair no number of an event or an attempt is taken for the one that had it before."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.attempt import Finished, Noted
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, repair
from jobs.events import AnyFact, AttemptEnded, JobCancelled, JobPaused, JobQueued, JobResumed, JobSucceeded
from jobs.state import Status
from jobs.trainer_facts import CheckpointSaved
from tests.service.damage import destroyed
from tests.sinks import story
from tests.sinks.driving import Listener, closed, publishing, until, whole
from tests.support.samples import STARTED, write_plan
from worker import publish as publish_module
from worker.ending import ending
from worker.feed import SinkFeed, read_cursor
from worker.training.checkpoints.pruning import start_from_scratch

AGAIN: list[AnyFact] = [AttemptEnded(reason="interrupted"), JobQueued(), STARTED]
LOST = Finished(at=9.0, reason="worker_lost")
FIRST_START = 5
"""Number of the first `attempt.started` of a story."""


def attempts(run: RunDir, *ends: Finished) -> None:
    """What the trainers of attempts 1, 2 … left, in a run directory with a plan."""
    write_plan(run)
    for number, end in enumerate(ends, start=1):
        append_line(run.attempt_file(number), end)


def repaired(run: RunDir, line: int) -> None:
    destroyed(run, line)
    repair(run)


def test_an_attempt_that_was_cut_off_gives_its_number_to_no_other(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    attempts(run, Finished(at=1.0, reason="done"))
    repaired(run, FIRST_START)
    record, new = run.append([STARTED])
    assert (record.attempt, new[0].attempt) == (2, 2)
    # Its supervisor is gone before the trainer says a word: how attempt 1 ended decides nothing.
    record, _ = run.append(lambda now: ending(run, now, 2, LOST))
    assert (record.last_reason, record.status) == ("worker_lost", Status.QUEUED)


def test_an_attempt_whose_start_alone_was_cut_off_goes_on(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    saved = CheckpointSaved(step=8, path="checkpoints/step-00000008", bytes=1, seconds=0.1)
    append_line(run.attempt_file(2), Noted(at=1.0, fact=saved))
    attempts(run, Finished(at=1.0, reason="interrupted"), Finished(at=2.0, reason="done", step=9))
    run.append([*AGAIN, saved])
    repaired(run, run.record().number - 3)
    record = run.record()
    assert (record.status, record.attempt, record.attempt_open, record.noted) == (Status.RUNNING, 2, True, 0)
    record, new = run.append(lambda now: ending(run, now, 2, LOST))
    assert [event.type for event in new] == ["checkpoint.saved", "attempt.ended", "job.succeeded"]


def test_from_scratch_after_a_repair_begins_anew_once_more(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    run.append([AttemptEnded(reason="interrupted"), JobPaused()])
    resumed = run.record().number + 1
    record, _ = run.append([JobResumed(from_scratch=True), STARTED])
    assert start_from_scratch(run, record.scratch_attempt)
    attempts(run, LOST, LOST)
    repaired(run, resumed)
    record, _ = run.append([JobResumed(from_scratch=True), STARTED])
    (run.checkpoints / "step-00000004").mkdir()
    assert start_from_scratch(run, record.scratch_attempt) and not list(run.checkpoints.glob("step-*"))


def test_what_a_job_had_before_it_began_from_scratch_is_gone_though_that_start_was_cut_off(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    run.append([AttemptEnded(reason="interrupted"), JobPaused(), JobResumed(from_scratch=True), STARTED])
    attempts(run, LOST, LOST)
    repaired(run, run.record().number)
    record = run.record()
    assert (record.status, record.attempt, record.first_loss) == (Status.QUEUED, 2, None)


def test_rows_of_an_attempt_after_a_repair_are_handed_over(tmp_path: Path) -> None:
    listener, run = Listener(), story.submit(tmp_path)
    feed = SinkFeed(listener, run)
    story.start(run)
    run.append(AGAIN)
    attempts(run, LOST, LOST)
    story.train(run, 10, 20, attempt=2)
    feed.turn()
    repaired(run, FIRST_START)
    record, _ = run.append([STARTED])
    story.train(run, 15, 25, attempt=record.attempt)
    feed.turn()
    assert listener.steps == [10, 20, 15, 25]


@pytest.mark.parametrize("seen", [True, False])
def test_every_event_after_a_repair_is_handed_over(tmp_path: Path, seen: bool) -> None:
    """Also where publish was away from before the damage until the numbers were as high as before."""
    listener, run = Listener(), story.submit(tmp_path)
    feed = SinkFeed(listener, run)
    story.start(run)
    run.append(AGAIN)
    attempts(run, LOST, LOST)
    feed.turn()
    told = len(listener.order)
    for line in (8, 6):  # a second repair cuts off the first
        destroyed(run, line)
        if seen:
            feed.turn()
        repair(run)
        if seen:
            feed.turn()
    run.append([*AGAIN, *AGAIN, JobCancelled()])
    assert run.record().number > told
    feed = feed if seen else SinkFeed(listener, run)
    feed.turn()
    since = [event.type for event in run.events(after=5)]
    assert since[0] == "job.repaired" and listener.order[told:] == ["job.repaired"] * seen + since
    assert feed.closed
    SinkFeed(listener, run).turn()
    assert listener.order[-1] == "job.cancelled" and listener.order.count("job.cancelled") == 1


@pytest.mark.parametrize("anew", [True, False])
def test_a_job_that_had_ended_and_is_repaired_is_told_again(
    tmp_path: Path, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module, "LIST_S", 0.0)
    listener, run = Listener(), whole(tmp_path)
    told = [event.type for event in run.events()]

    def train_again() -> None:
        repaired(run, FIRST_START)
        until(lambda: anew or read_cursor(run, "listener").closed is None)
        run.append([STARTED, AttemptEnded(reason="done"), JobSucceeded(model="model", step=9, loss=None)])

    with publishing(tmp_path, listener):
        until(lambda: closed(run, "listener"))
        if not anew:
            train_again()
            until(lambda: closed(run, "listener"))
    if anew:
        train_again()
        with publishing(tmp_path, listener):
            until(lambda: listener.order.count("job.succeeded") == 2)
    since = ["job.repaired", "attempt.started", "attempt.ended", "job.succeeded"]
    assert [each for each in listener.order if each != "rows"] == told + since
    assert closed(run, "listener") and len(listener.closed) == 2
