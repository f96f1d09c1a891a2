"""Why a job has no model, and what to do."""

from __future__ import annotations

from jobs.record import JobRecord
from jobs.state import Status


def why_no_model(record: JobRecord) -> tuple[str, str]:
    """For people: what there is to say of the job, and a hint."""
    job, checkpoints = record.id, f"name a checkpoint: `longhaul checkpoints {record.id}` lists those that it has"
    if record.dry_run:
        return f"job {job} is a dry run, which trains nothing", f"`longhaul clone {job}` submits it for training"
    if record.kind == "evaluate":
        return (
            f"job {job} evaluates a model, and makes none",
            "name a job that has trained one: `longhaul list --status succeeded` shows them",
        )
    if record.sweep is not None and record.status is Status.SUCCEEDED:
        return (
            f"job {job} is a trial of sweep {record.sweep}, which keeps the model of its best trial alone",
            f"`longhaul sweep show {record.sweep}` names the best; a sweep with `keep_models: all` keeps all models",
        )
    if record.status.terminal:
        return f"job {job} has made no model", checkpoints
    return f"job {job} has no model yet", f"wait for its end, or {checkpoints}"
