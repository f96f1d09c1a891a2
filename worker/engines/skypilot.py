"""SkyPilot: a task is a managed job on one machine of whatever cloud has one. The run directory goes through a bucket.

SkyPilot would start a job that it lost again, by itself. Here the box decides what follows an attempt: what SkyPilot
wants to recover is cancelled, and the next attempt is a job of its own.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from jobs.frozen import Frozen
from worker.engines.bucket import Bucket
from worker.engines.bucket_box import BoxStorage
from worker.engines.engine import EngineRefused, EngineTask, EngineUnavailable, Storage, TaskState, TaskStatus, ask, run
from worker.engines.settings import EngineSettings

_S = TaskStatus
STATES: Mapping[str, TaskStatus] = {
    "PENDING": _S.QUEUED, "SUBMITTED": _S.QUEUED, "STARTING": _S.QUEUED, "RUNNING": _S.RUNNING,
    "WINDING_DOWN": _S.RUNNING, "RECOVERING": _S.RUNNING, "CANCELLING": _S.RUNNING, "SUCCEEDED": _S.ENDED,
    "CANCELLED": _S.PREEMPTED, "FAILED": _S.FAILED, "FAILED_SETUP": _S.FAILED, "FAILED_PRECHECKS": _S.FAILED,
    "FAILED_NO_RESOURCE": _S.PREEMPTED, "FAILED_CONTROLLER": _S.PREEMPTED,
}  # fmt: skip
"""What SkyPilot calls the states of a managed job. Of one that is not here it is not known whether it is an end."""
SUBMIT_S = 1800.0
"""The first job of all waits until SkyPilot has a machine for its controller."""
LINES = 40
NONE = "No in-progress managed jobs"
"""What SkyPilot says while its controller is stopped, as it is soon after the last job has ended."""


class SkyPilotSettings(EngineSettings):
    """`kind = "skypilot"`: `sky` is a program of this machine, and has its credentials."""

    kind: Literal["skypilot"]
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9+]+://[^\s?#@]+$")]
    """URL of a folder in a bucket through which run directory, model and data are copied, such as `s3://bucket/longhaul`.
    Box and node reach it with their own credentials."""
    node_folder: Path = Path("/tmp/longhaul")
    """Where the node keeps its copies."""
    accelerator: str | None = None
    """The GPU, as `sky show-gpus` names it, such as `H100`."""
    infra: str | None = None
    """Where machines are sought, such as `aws`, `gcp/us-central1` or `k8s/my-context`; null: wherever is cheapest."""
    use_spot: bool = True
    """Machines that the cloud may take back are cheaper."""
    image: str | None = None
    """`image_id`, such as `docker:registry.example/longhaul:1`."""
    cpus: str | None = None
    """At least so many cores, such as `8+`."""
    memory: str | None = None
    """At least so many GiB of the host's memory, such as `64+`."""
    disk_gb: Annotated[int, Field(ge=20, le=65_536)] = 256
    """Of the machine; model, data, checkpoints and image lie on it."""
    look_every_s: Annotated[float, Field(ge=0.1, le=600.0)] = 30.0
    """As of any engine; `sky` takes seconds to answer."""
    setup: str | None = None
    """Lines of bash that make Longhaul ready, before each attempt, where the image does not have it."""

    @field_validator("bucket")
    @classmethod
    def _can_be_read(cls, url: str) -> str:
        Bucket(url)
        return url

    def connect(self) -> SkyPilot:
        """Its program."""
        return SkyPilot(self)


class _Job(Frozen, extra="ignore"):
    """What `sky jobs queue` says of a managed job."""

    job_name: str | None
    status: str
    failure_reason: str | None = None
    details: str | None = None


_jobs = TypeAdapter(list[_Job])


class SkyPilot:
    """The engine, by its program. Its id of a task is the task's name: that is all that `sky jobs launch` need tell."""

    def __init__(self, settings: SkyPilotSettings) -> None:
        self._settings = settings
        self.storage: Storage = BoxStorage(settings.bucket)

    def render(self, task: EngineTask) -> str:
        """The task YAML; JSON is YAML, too."""
        given = self._settings
        run = str(given.node_folder / "runs" / task.job)
        words = [run if word == str(task.run) else word for word in task.command]
        # What fails SkyPilot may start again. So the program ends well; the report has the code of the trainer.
        command = [*words, "--bucket", given.bucket, "--exit-0"]
        resources = {
            "accelerators": {given.accelerator: task.gpus} if given.accelerator and task.gpus else None,
            "infra": given.infra,
            "use_spot": given.use_spot,
            "image_id": given.image,
            "cpus": given.cpus,
            "memory": given.memory,
            "disk_size": given.disk_gb,
            "job_recovery": {"max_restarts_on_errors": 0},
        }
        document = {
            "name": task.name,
            "resources": {name: value for name, value in resources.items() if value is not None},
            "envs": dict(sorted(task.environment.items())),
            "setup": given.setup,
            "run": f"cd {shlex.quote(str(task.directory))}\nexec {shlex.join(command)}\n",
        }
        document = {name: value for name, value in document.items() if value is not None}
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    def submit(self, task: EngineTask) -> str:
        """Its name."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(self.render(task))
            file.flush()
            run(["sky", "jobs", "launch", "--yes", "--detach-run", "--name", task.name, file.name], limit_s=SUBMIT_S)
        return task.name

    def find(self, name: str) -> str | None:
        """By name."""
        return name if self._job(name) is not None else None

    def state(self, task: str) -> TaskState:
        """From the queue of managed jobs. What SkyPilot recovers is cancelled, and ends when SkyPilot has done that."""
        job = self._job(task)
        if job is None:
            return TaskState(_S.GONE, "SkyPilot does not know it any more")
        if job.status == "RECOVERING":
            self.cancel(task)
        if (status := STATES.get(job.status)) is None:
            raise EngineUnavailable(f"SkyPilot says {job.status[:40]!r}, a state that is not known here")
        why = job.failure_reason or job.details
        return TaskState(status, job.status + (f" ({' '.join(why.split())[:300]})" if why else ""))

    def logs(self, task: str) -> str:
        """What the program itself has said, and SkyPilot around it; the trainer writes to trainer.log."""
        return run(["sky", "jobs", "logs", "--no-follow", "--tail", str(LINES), "--name", task], any_code=True)

    def cancel(self, task: str) -> None:
        """End it, and the machine with it."""
        ask(["sky", "jobs", "cancel", "--yes", "--name", task])

    def _job(self, name: str) -> _Job | None:
        try:
            said = run(["sky", "jobs", "queue", "--all", "--verbose", "--output", "json"])
        except EngineRefused as error:
            said = str(error)
            if NONE not in said:
                raise EngineUnavailable(said) from None
        found = re.search(r"^\[\n.*^\]|^\[\]$", said, re.MULTILINE | re.DOTALL)  # warnings may stand before it
        if found is None and NONE in said:
            return None
        try:
            jobs = _jobs.validate_json(found[0] if found else said)
        except ValidationError as error:
            raise EngineUnavailable(f"`sky jobs queue` is not understood: {error.errors()[0]['msg']}") from None
        return next((job for job in jobs if job.job_name == name), None)
