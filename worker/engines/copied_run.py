"""Engines whose nodes may share nothing but a bucket with the box: what their settings, tasks and storages share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from worker.engines.bucket import Bucket
from worker.engines.bucket_box import BoxStorage
from worker.engines.engine import EngineTask, SharedStorage, Storage
from worker.engines.settings import EngineSettings


class CopiedRunSettings(EngineSettings):
    """An engine that knows a bucket."""

    bucket: Annotated[str, Field(pattern=r"^[a-z0-9+]+://[^\s?#@]+$")] | None = None
    """URL of a folder in a bucket through which run directory, model and data are copied, such as `s3://bucket/longhaul`.
    Box and node reach it with their own credentials."""
    node_folder: Path = Path("/tmp/longhaul")
    """With a bucket: where the node keeps its copies."""

    @field_validator("bucket")
    @classmethod
    def _can_be_read(cls, url: str | None) -> str | None:
        if url is not None:
            Bucket(url)
        return url

    def storage(self) -> Storage:
        """Of the box's side."""
        return SharedStorage() if self.bucket is None else BoxStorage(self.bucket)

    def on_node(self, task: EngineTask) -> EngineTask:
        """The task as the node starts it."""
        if self.bucket is None:
            return task
        run = self.node_folder / "runs" / task.job
        words = (str(run) if word == str(task.run) else word for word in task.command)
        return replace(task, run=run, command=(*words, "--bucket", self.bucket))
