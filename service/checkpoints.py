"""The checkpoints of a job, in OpenAI's shape: what is on disk now, complete, newest first."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from jobs.rundir import RunDir
from service.confined import NoFile, content, files_below, open_inside
from service.metric_series import SeriesCache

_NAME = re.compile(r"step-(\d{8,15})")


def checkpoints_of(run: RunDir, series: SeriesCache, *, runs_name: str) -> list[dict[str, Any]]:
    """One object each. `best`: the one with the lowest validation loss, if any was evaluated; pruning keeps it."""
    steps = {int(found[1]): name for name in _folders(run) if (found := _NAME.fullmatch(name))}
    shown = [each for step in sorted(steps, reverse=True) if (each := _checkpoint(run, runs_name, step, steps[step]))]
    losses = series.losses(run.metrics_file, [each["step_number"] for each in shown]) if shown else []
    for each, loss in zip(shown, losses, strict=True):
        if loss is not None:
            each["metrics"]["train_loss"] = loss
    evaluated = [each for each in shown if "valid_loss" in each["metrics"]]
    best = min(evaluated, key=lambda each: float(each["metrics"]["valid_loss"]), default=None)
    for each in shown:
        each["best"] = each is best
    return shown


def _folders(run: RunDir) -> list[str]:
    try:
        handle = open_inside(run.path, "checkpoints")
    except NoFile:  # nothing was saved yet
        return []
    try:
        return os.listdir(handle)
    finally:
        os.close(handle)


def _checkpoint(run: RunDir, runs_name: str, step: int, name: str) -> dict[str, Any] | None:
    """None: it is not complete, or was pruned while it was looked at."""
    path = f"checkpoints/{name}"
    try:
        handle = open_inside(run.path, path)
        try:
            files = {file.path: file.status for file in files_below(handle)}
        finally:
            os.close(handle)
        complete = files["manifest.json"]
        loss = json.loads(content(run.path, f"{path}/state.json"))["validation_loss"]
    except (NoFile, NotADirectoryError, KeyError, TypeError, ValueError):
        return None
    metrics: dict[str, float] = {"step": step}
    if isinstance(loss, float):
        metrics["valid_loss"] = loss
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": f"{run.id}/{name}",
        "created_at": int(complete.st_mtime),
        "fine_tuning_job_id": run.id,
        "fine_tuned_model_checkpoint": f"{runs_name}/{run.id}/{path}",
        "step_number": step,
        "metrics": metrics,
        "bytes": sum(status.st_size for status in files.values()),
        "path": path,
    }
