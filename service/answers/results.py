"""What a run leaves behind: checkpoints and files."""

from __future__ import annotations

from typing import Literal

from pydantic.json_schema import SkipJsonSchema

from jobs.frozen import left_out
from service.answers.parts import Answer, Page


class CheckpointMetrics(Answer):
    """What is known of exactly these weights."""

    step: int
    """Optimizer steps done."""
    train_loss: float | SkipJsonSchema[None] = left_out()
    """Training loss of the newest row of metrics up to here; left out where there is none."""
    valid_loss: float | SkipJsonSchema[None] = left_out()
    """Validation loss, nats per target token (of a classifier: per row); left out where they were not evaluated."""
    others: dict[str, float] | SkipJsonSchema[None] = left_out()
    """Other metrics of the evaluation by name, such as `accuracy`; left out where there are none."""


class Checkpoint(Answer):
    """A complete checkpoint on disk."""

    object: Literal["fine_tuning.job.checkpoint"]
    """Always `fine_tuning.job.checkpoint`."""
    id: str
    """`<job>/step-00000500`: what `resume_from` of another job takes."""
    created_at: int
    """Unix time, seconds."""
    fine_tuning_job_id: str
    """Whose it is."""
    fine_tuned_model_checkpoint: str
    """Its folder, which begins with the name of the runs folder."""
    step_number: int
    """Optimizer steps done."""
    metrics: CheckpointMetrics
    bytes: int
    """Size of all its files."""
    best: bool
    """Whether it has the lowest validation loss of those on disk: it is kept, however old it gets."""
    path: str
    """Relative to the run directory: download it from `/jobs/{job}/files/{path}`."""


class CheckpointList(Page):
    """Checkpoints, newest first."""

    cursor = "id"
    data: list[Checkpoint]
    first_id: str | None
    """Id of the first one; null for an empty list."""
    last_id: str | None
    """Id of the last one."""


class RunFile(Answer):
    """A file of a run directory."""

    object: Literal["file"]
    """Always `file`."""
    path: str
    """Relative to the run directory: download it from `/jobs/{job}/files/{path}`."""
    bytes: int
    """Its size."""
    modified_at: float
    """Unix time, seconds."""


class RunFileList(Page):
    """Files in order of path."""

    cursor = "path"
    data: list[RunFile]
    first_id: str | None
    """Path of the first one; null for an empty list."""
    last_id: str | None
    """Path of the last one."""
