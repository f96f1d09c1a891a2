"""A check or prepare that something outside kills again and again: why is not forgotten."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jobs.attempt import Finished
from jobs.events import Fault, JobSubmitted
from jobs.files import append_line
from jobs.rundir import RunDir, create
from jobs.spec import parse_spec
from tests.stack import Stack, tiny_job
from tests.worker.test_stage_worker import descendants
from worker.ending import stage_lost
from worker.trainer import OUT_OF_MEMORY_HINT

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create(tmp_path, "job-1", SPEC, JobSubmitted(name="n", model="m", spec_sha256=SPEC.sha256()))[0]


def test_the_job_fails_with_what_the_last_supervisor_knew(run: RunDir) -> None:
    message = "the host's memory ran out and the kernel ended the trainer (phase check, step 0)"
    known = Fault(code="host_out_of_memory", message=message, hint=OUT_OF_MEMORY_HINT)
    append_line(run.attempt_file("check"), Finished(at=1.0, reason="host_out_of_memory", error=known))
    error = stage_lost(run, run.record(), 5).error
    assert (error.code, error.hint) == ("host_out_of_memory", OUT_OF_MEMORY_HINT)
    assert error.message == f"stage check was lost 5 times, the last time for this reason: {message}"


def test_where_the_supervisor_went_too_that_is_all_there_is_to_say(run: RunDir) -> None:
    error = stage_lost(run, run.record(), 5).error
    assert (error.code, error.message) == ("lost", "stage check was lost 5 times: the worker went away")


def test_a_supervisor_writes_down_how_its_trainer_was_killed(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check")
        run = stack.submit(tiny_job())
        said = run.attempt_file("check")
        stack.wait_for(lambda: said.exists() or None, "the trainer's first word")
        trainer = descendants(stack.processes["check"].pid)[-1]
        os.kill(trainer, signal.SIGKILL)

        def last() -> Finished | None:
            lines = run.attempt_lines("check")
            return lines[-1] if lines and isinstance(lines[-1], Finished) else None

        found = stack.wait_for(last, "the supervisor's word")
        assert found.error is not None and "signal SIGKILL" in found.error.message
        assert [event.type for event in run.events()] == ["job.submitted"], "reconcile puts it back"
