"""A cancelled job, and one submitted to resume from it: through the API, with real workers."""

from __future__ import annotations

import requests

from jobs.events import JobPrepared
from jobs.trainer_facts import ModelLoaded
from tests.e2e.long_jobs import long_job
from tests.support.processes import asked_at, stepping
from tests.support.samples import facts_of
from tests.support.shared_stack import succeeds
from tests.support.stack import Stack


def test_a_job_goes_on_from_one_that_was_cancelled_and_deleted(stack: Stack) -> None:
    cancelled = stack.submit(long_job())
    asked_at(stack, cancelled, "cancel", stepping(4, 39))
    stopped_at = cancelled.record().progress_step

    run = stack.submit(long_job(resume_from=cancelled.id))
    prepared = stack.wait_for_event(run, "job.prepared", "job.failed").fact
    assert isinstance(prepared, JobPrepared) and prepared.adopted is not None
    assert prepared.adopted.source == f"{cancelled.id}/step-{stopped_at:08d}"
    assert requests.delete(f"{stack.url}/jobs/{cancelled.id}", timeout=60).status_code == 200
    succeeds(stack, run)
    (loaded,) = facts_of(run, ModelLoaded)
    assert loaded.resumed_step == stopped_at and (run.model / "model.safetensors").exists()
