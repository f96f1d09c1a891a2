"""The checkpoints of a job, in OpenAI's shape: what is on disk now, complete, newest first."""

from __future__ import annotations

import os
import re
from operator import itemgetter

from pydantic import BaseModel, ValidationError

from jobs.answers import Checkpoint, CheckpointMetrics
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import EvaluationMetric, cost_of
from jobs.record import JobRecord
from jobs.redis.store import read_spec
from jobs.state import Status
from service.errors import AnswerFailed
from service.files.confined import NoFile, content, files_below, open_inside
from service.reading.metric_series import SeriesCache

_NAME = re.compile(r"step-(\d{8,15})")


class _State(BaseModel):
    """What state.json says of the weights, among much else."""

    validation_loss: float | None
    metrics: dict[str, float] = {}


def checkpoints_of(run: RunDir, series: SeriesCache, *, runs_name: str) -> list[Checkpoint]:
    """One object each. `best`: the best by `checkpoint.best` of the job (or the loss), of equals the earliest, if any
    was evaluated; pruning keeps it."""
    steps = {int(found[1]): name for name in _folders(run) if (found := _NAME.fullmatch(name))}
    shown = [each for step in sorted(steps, reverse=True) if (each := _checkpoint(run, runs_name, step, steps[step]))]
    losses = series.losses(run.metrics_file, [each["step_number"] for each in shown]) if shown else []
    for each, loss in zip(shown, losses, strict=True):
        if loss is not None:
            each["metrics"]["train_loss"] = loss
    spec = read_spec(run.spec_text())
    metric = (spec and spec.checkpoint.best) or EvaluationMetric.LOSS
    known = [(each["metrics"], each) for each in reversed(shown)]
    costs = [(cost_of(metric, of.get("valid_loss"), of.get("others", {})), each) for of, each in known]
    evaluated = [(cost, each) for cost, each in costs if cost is not None]
    if evaluated:
        min(evaluated, key=itemgetter(0))[1]["best"] = True
    return shown


def _folders(run: RunDir) -> list[str]:
    try:
        handle = open_inside(run.path, "checkpoints")
    except NoFile:  # nothing was saved yet
        return []
    try:
        return os.listdir(handle)
    except NotADirectoryError:  # a file: nothing that was saved
        return []
    finally:
        os.close(handle)


def _checkpoint(run: RunDir, runs_name: str, step: int, name: str) -> Checkpoint | None:
    """None: it is not complete, or was pruned while it was looked at."""
    path = f"checkpoints/{name}"
    try:
        handle = open_inside(run.path, path)
        try:
            files = {file.path: file.status for file in files_below(handle)}
        finally:
            os.close(handle)
        complete = files["manifest.json"]
        state = _State.model_validate_json(content(run.path, f"{path}/state.json"))
    except (NoFile, NotADirectoryError, KeyError, ValidationError):
        return None
    metrics = CheckpointMetrics(step=step)
    if state.validation_loss is not None:
        metrics["valid_loss"] = state.validation_loss
    if state.metrics:
        metrics["others"] = state.metrics
    return Checkpoint(
        object="fine_tuning.job.checkpoint",
        id=f"{run.id}/{name}",
        created_at=int(complete.st_mtime),
        fine_tuning_job_id=run.id,
        fine_tuned_model_checkpoint=f"{runs_name}/{run.id}/{path}",
        step_number=step,
        metrics=metrics,
        bytes=sum(status.st_size for status in files.values()),
        best=False,
        path=path,
    )


# -- no model ----------------------------------------------------------------------------------------------------------
# Why a job has no model, and what to do.


def require_model(run: RunDir, *, or_checkpoint: bool = False) -> None:
    """Raises AnswerFailed (`no_model`) where the job has no model. `or_checkpoint`: the request could name one."""
    if not run.has_model():
        message, hint = why_no_model(run.record(), or_checkpoint=or_checkpoint)
        raise AnswerFailed(409, "no_model", message, hint=hint)


def why_no_model(record: JobRecord, *, or_checkpoint: bool = False) -> tuple[str, str]:
    """For people: what there is to say of the job, and a hint. `or_checkpoint`: naming a checkpoint would do."""
    job = record.id
    named = f"name a checkpoint: `longhaul checkpoints {job}` lists those that it has"
    checkpoint = named if or_checkpoint and record.checkpoint is not None else None
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
        return f"job {job} has made no model", checkpoint or f"`longhaul show {job}` says why"
    wait = f"resume it: `longhaul resume {job}`" if record.status is Status.PAUSED else "wait for its end"
    return f"job {job} has no model yet", f"{wait}, or {checkpoint}" if checkpoint else wait
