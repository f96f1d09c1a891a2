"""What becomes of a job when an attempt ends: the policy of design §7, case by case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.attempt import Finished, Noted
from jobs.errors import Superseded
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Fault,
    JobChecked,
    JobPrepared,
    JobQueued,
    JobRequested,
    JobSubmitted,
    Reason,
)
from jobs.files import append_line
from jobs.rundir import RunDir, create
from jobs.spec import parse_spec
from worker.ending import RESTART_DELAYS_S, ending

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})
STARTED = AttemptStarted(worker="w", device="cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A job whose first attempt is running."""
    first = JobSubmitted(name="n", model="m", spec_sha256=SPEC.sha256(), max_restarts=2)
    run, _ = create(tmp_path, "job-1", SPEC, first)
    run.append([JobChecked(plan={}), JobPrepared(data={}, steps=9), JobQueued(), STARTED])
    return run


def end(run: RunDir, reason: Reason, **more: object) -> list[AnyFact]:
    """End the open attempt; the facts that were written."""
    found = Finished.model_validate({"at": 1.0, "reason": reason, **more})
    _, new = run.append(lambda record: ending(run, record, record.attempt, found))
    return [event.fact for event in new]


def types(facts: list[AnyFact]) -> list[str]:
    return [fact.type for fact in facts]


@pytest.mark.parametrize("reason", ["interrupted", "lost", "device_busy", "oom_in_optimizer"])
def test_what_is_nobodys_fault_is_not_counted(run: RunDir, reason: Reason) -> None:
    for _ in range(4):
        assert types(end(run, reason)) == ["attempt.ended", "job.queued"]
        run.append([STARTED])
    assert run.record().restarts == 0


def test_memory_that_ran_out_in_the_optimizer_is_tried_one_rung_lower_at_once(run: RunDir) -> None:
    """Until the trainer says that there is none: the reason is another one then, and final."""
    fault = Fault(code="oom_in_optimizer", message="memory ran out in the optimizer at step 3")
    facts = end(run, "oom_in_optimizer", error=fault.model_dump(), step=2)
    assert types(facts) == ["attempt.ended", "job.queued"]
    assert isinstance(facts[0], AttemptEnded) and (facts[0].reason, facts[0].error) == ("oom_in_optimizer", fault)
    assert isinstance(facts[1], JobQueued) and facts[1].not_before_s == 0
    run.append([STARTED])
    assert types(end(run, "out_of_memory")) == ["attempt.ended", "job.failed"]


@pytest.mark.parametrize("reason", ["crash", "silent", "host_out_of_memory"])
def test_crashes_are_retried_with_growing_delays_then_given_up(run: RunDir, reason: Reason) -> None:
    for count in (1, 2):
        facts = end(run, reason)
        assert isinstance(facts[-1], JobQueued) and facts[-1].not_before_s == RESTART_DELAYS_S[count - 1]
        run.append([STARTED])
    assert types(end(run, reason)) == ["attempt.ended", "job.failed"]
    error = run.record().error
    assert error is not None and error.code == reason and "2 restarts without progress" in error.message


@pytest.mark.parametrize("reason", ["refused", "bad_data", "non_finite", "disk_full", "out_of_memory"])
def test_what_would_fail_again_fails_at_once_with_cause_and_hint(run: RunDir, reason: Reason) -> None:
    fault = Fault(code="some_guard", message="what, the value", hint="the way out")
    assert types(end(run, reason, error=fault.model_dump())) == ["attempt.ended", "job.failed"]
    assert run.record().error == fault


@pytest.mark.parametrize(("request_", "outcome"), [("pause", "job.paused"), ("cancel", "job.cancelled")])
@pytest.mark.parametrize("reason", ["interrupted", "crash", "lost", "oom_in_optimizer"])
def test_whoever_ends_an_attempt_obeys_the_request(run: RunDir, request_: str, outcome: str, reason: Reason) -> None:
    run.append([JobRequested.model_validate({"request": request_})])
    assert types(end(run, reason)) == ["attempt.ended", outcome]
    assert not run.request_file.exists()


def test_a_completion_that_came_first_beats_the_request(run: RunDir) -> None:
    run.append([JobRequested(request="cancel")])
    facts = end(run, "done", step=9, result={"model": "model", "loss": 1.5, "first_loss": 4.0, "step": 8})
    assert types(facts) == ["attempt.ended", "job.succeeded"]
    record = run.record()
    assert (record.result_loss, record.result_step, record.result_model) == (1.5, 8, "model")


def test_what_the_trainer_said_is_not_lost_and_not_doubled(run: RunDir) -> None:
    facts = [CheckpointSaved(step=step, path=f"c{step}", bytes=1, seconds=0.1) for step in (1, 2, 3)]
    for fact in facts:
        append_line(run.attempt_file(1), Noted(at=1.0, fact=fact))
    run.append(facts[:1], attempt=1)
    append_line(run.attempt_file(1), Finished(at=2.0, reason="interrupted", step=3))
    # the caller only knows that the process is gone; the attempt file knows why
    assert types(end(run, "crash")) == ["checkpoint.saved", "checkpoint.saved", "attempt.ended", "job.queued"]
    assert [event.fact.step for event in run.events() if isinstance(event.fact, CheckpointSaved)] == [1, 2, 3]


def test_an_ending_torn_in_two_is_completed(run: RunDir) -> None:
    end(run, "lost")
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["fact"]["type"] == "job.queued"
    run.events_file.write_bytes(b"".join(lines[:-1]) + lines[-1][:10])
    assert types(end(run, "lost")) == ["job.queued"]


def test_nobody_ends_an_attempt_twice(run: RunDir) -> None:
    end(run, "lost")
    with pytest.raises(Superseded):
        run.append(lambda record: ending(run, record, 1, Finished(at=1.0, reason="crash")))
