"""A check or prepare that something outside kills again and again: why is not forgotten."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jobs.attempt import Finished
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.reasons import Reason
from jobs.spec import parse_spec
from jobs.trainer_facts import Fault
from tests.support.processes import trainers
from tests.support.stack import Stack, tiny_job
from worker.ending import stage_lost

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create(tmp_path, "job-1", SPEC, JobSubmitted(name="n", model="m", spec_sha256=SPEC.sha256()))[0]


def test_the_job_fails_with_what_the_last_supervisor_knew(run: RunDir) -> None:
    message = "the host's memory ran out and the kernel ended the trainer (phase check, step 0)"
    known = Fault(code="host_out_of_memory", message=message, hint=Reason.HOST_OUT_OF_MEMORY.hint)
    append_line(run.attempt_file("check"), Finished(at=1.0, reason="host_out_of_memory", error=known))
    error = stage_lost(run, run.record(), 5).error
    assert error is not None and (error.code, error.hint) == ("host_out_of_memory", Reason.HOST_OUT_OF_MEMORY.hint)
    assert error.message == f"stage check was lost 5 times, the last time for this reason: {message}"


def test_where_the_supervisor_went_too_that_is_all_there_is_to_say(run: RunDir) -> None:
    message = "stage check was lost 5 times: the worker was lost"
    error = Fault(code="worker_lost", message=message, hint="look at the worker's log")
    assert stage_lost(run, run.record(), 5).error == error


def test_a_supervisor_writes_down_how_its_trainer_was_killed(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check")
        run = stack.submit(tiny_job())
        said = run.attempt_file("check")
        stack.wait_for(lambda: said.exists() or None, "the trainer's first word")
        [trainer] = trainers(run)
        os.kill(trainer, signal.SIGKILL)

        def last() -> Finished | None:
            lines = run.attempt_lines("check")
            return lines[-1] if lines and isinstance(lines[-1], Finished) else None

        found = stack.wait_for(last, "the supervisor's word")
        assert found.error is not None and "signal SIGKILL" in found.error.message
        assert [event.type for event in run.events()] == ["job.submitted"], "reconcile puts it back"
