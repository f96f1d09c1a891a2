"""Rows and model of a job as artifacts of its W&B run, if the job wants them: references, never their bytes."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from jobs.errors import Damaged, NotFound
from jobs.events import JobSucceeded
from worker.sinks.base import SinkJob
from worker.sinks.wandb.protocol import ArtifactRequest


def rows_artifact(job: SinkJob) -> list[ArtifactRequest]:
    """The prepared rows, named by their hash: jobs with the same rows share one artifact."""
    if not _wanted(job):
        return []
    try:
        data = job.plan().data
    except (Damaged, NotFound):  # the run is reported all the same
        return []
    if data.prepared is None:
        return []
    name = Path(data.prepared).name
    metadata = data.model_dump(mode="json", exclude={"prepared", "complete"}, exclude_none=True)
    # Publish does not see the rows, and the hash is their checksum.
    return [
        {
            "name": f"rows-{name}",
            "type": "dataset",
            "reference": f"longhaul://prepared/{name}",
            "path": "rows",
            "metadata": metadata,
        }
    ]


def model_artifact(job: SinkJob, fact: JobSucceeded) -> list[ArtifactRequest]:
    """The final model, as publish sees its folder."""
    if fact.model is None or not _wanted(job):
        return []
    place = Path(job.folder, fact.model).absolute().as_uri()
    metadata: dict[str, JsonValue] = {
        "job": job.id,
        "base_model": job.submitted.model,
        "step": fact.step,
        "loss": fact.loss,
    }
    return [{"name": f"model-{job.id}", "type": "model", "reference": place, "path": "model", "metadata": metadata}]


def _wanted(job: SinkJob) -> bool:
    wandb = job.spec.integrations.wandb
    return wandb is not None and wandb.artifacts
