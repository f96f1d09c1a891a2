"""Why a job has no model, and what to do."""

from __future__ import annotations

from jobs.disk.rundir import RunDir
from jobs.record import JobRecord
from jobs.state import Status
from service.errors import AnswerFailed


def require_model(run: RunDir) -> None:
    """Raises AnswerFailed (`no_model`) where the job has no model."""
    if not run.has_model():
        message, hint = why_no_model(run.record())
        raise AnswerFailed(409, "no_model", message, hint=hint)


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
        why = f"`longhaul show {job}` says why"
        return f"job {job} has made no model", why if record.checkpoint is None else checkpoints
    return f"job {job} has no model yet", f"wait for its end, or {checkpoints}"
