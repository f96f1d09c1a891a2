"""A cancelled job, and one submitted to resume from it: through the API, with real workers."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs.events import JobPrepared, ModelLoaded
from tests.e2e.long_jobs import long_job, wait_for_step
from tests.facts import facts_of
from tests.stack import Stack


def test_a_job_goes_on_from_one_that_was_cancelled_and_deleted(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare", "train")
        cancelled = stack.submit(long_job())
        wait_for_step(stack, cancelled, 4)
        stack.post(cancelled, "cancel")
        stack.wait_for_event(cancelled, "job.cancelled")
        stopped_at = cancelled.record().progress_step

        run = stack.submit(long_job(resume_from=cancelled.id))
        prepared = stack.wait_for_event(run, "job.prepared", "job.failed").fact
        assert isinstance(prepared, JobPrepared) and prepared.adopted is not None
        assert prepared.adopted.source == f"{cancelled.id}/step-{stopped_at:08d}"
        shutil.rmtree(cancelled.path)
        stack.wait_for_event(run, "job.succeeded", "job.failed", timeout=120)
        (loaded,) = facts_of(run, ModelLoaded)
        assert loaded.resumed_step == stopped_at and (run.model / "model.safetensors").exists()
