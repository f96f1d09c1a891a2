"""A whole job on Slurm: real workers, real trainers, and programs that stand for Slurm's."""

from __future__ import annotations

from pathlib import Path

from tests.fake_slurm.slurm import FakeSlurm
from tests.stack import ROLES, Stack, tiny_job

ON = {"resources": {"engine": "cluster"}}


def test_a_job_runs_to_its_end_on_slurm(tmp_path: Path, data: Path) -> None:
    with FakeSlurm(tmp_path) as slurm, Stack(tmp_path / "home", data=data, environment=slurm.environment()) as stack:
        stack.start(*ROLES)
        job = stack.submit(tiny_job(**ON))
        stack.wait_for_event(job, "job.succeeded", "job.failed")
        life = [event.type for event in job.events()]
        assert life[4:8] == ["attempt.started", "task.submitted", "task.started", "memory.planned"]
        assert life[-2:] == ["attempt.ended", "job.succeeded"]
        assert slurm.spans() == ["start 1", "end 1"]
