"""A whole job by Kubeflow's local process backend: its SDK makes an environment, and starts the program with torchrun.

Service, workers and trainer are real. `kubectl` is the one of `tests/fake_cloud`, which hands TrainJobs to the SDK.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jobs.events import AttemptEnded, ModelLoaded
from tests.e2e.test_clouds import in_bucket, long_job
from tests.engines.conftest import PYTHON
from tests.fake_cloud.cloud import FakeCloud
from tests.support.samples import facts_of, reasons
from tests.support.stack import ROLES, Stack

pytestmark = pytest.mark.engines


@pytest.mark.timeout(1500)  # each attempt makes a virtual environment, and torchrun imports torch besides the trainer
def test_a_job_with_a_preemption_in_the_middle_runs_to_its_end(tmp_path: Path, data: Path) -> None:
    variables = {"FAKE_CLOUD_PYTHON": str(PYTHON), "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}
    where = {"KUBEFLOW_LOCAL_PROCESS": str(Path(sys.executable).parent), "OMP_NUM_THREADS": "1"}
    with FakeCloud(tmp_path, variables) as cloud:
        environment = cloud.environment("kubeflow", environment=where)
        with Stack(tmp_path / "home", data=data, environment=environment) as stack:
            stack.start(*ROLES)
            job = stack.submit(long_job())
            in_bucket(cloud, job, stack)
            cloud.end(cloud.tasks()[0]["name"], "preempt")
            end = stack.wait_for_event(job, "job.succeeded", "job.failed", timeout=240)
            assert end.type == "job.succeeded"
            assert reasons(job) == ["interrupted", "done"] and job.record().restarts == 0
            assert facts_of(job, ModelLoaded)[1].resumed_step == facts_of(job, AttemptEnded)[0].step > 0
            stack.wait_for(
                lambda: cloud.tasks()[1]["state"] == "ended" or None, "the SDK to say that the job is complete"
            )
            assert [each["code"] for each in cloud.tasks()] == [0, 0], "Complete, twice"
            assert (job.model / "model.safetensors").exists()
