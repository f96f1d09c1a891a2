"""Exports of a model, and its upload to the hub."""

from __future__ import annotations

from typing import Literal

from jobs.attempt import Phase
from jobs.events import Fault
from jobs.export import ExportFormat, ExportReport
from service.answers.parts import Answer, Page

WorkStatus = Literal["queued", "running", "done", "failed"]


class Export(Answer):
    """One format of a model: there, being made, or refused."""

    object: Literal["export"]
    """Always `export`."""
    format: ExportFormat
    """`merged`, `adapter`, `ctranslate2` or `gguf`."""
    status: WorkStatus
    """Of what was asked for last; `done` for what is there."""
    phase: Phase | None
    """While it runs: `load`, `save` (it is converted) or `evaluate` (it is compared with the model)."""
    ahead: int | None
    """While it is queued: requests that have their turn before it, at most."""
    error: Fault | None
    """Why it failed, and what was there before is kept; while it is queued, why no worker takes it."""
    path: str | None
    """Folder to download from `/jobs/{job}/files/{path}`; null: none is there."""
    report: ExportReport | None
    """export.json of what is there: types, versions, figures of the verification, files with sha256."""


class ExportList(Page):
    """Exports in order of format."""

    data: list[Export]


class Push(Answer):
    """The newest upload of a job to the hub that was asked for."""

    object: Literal["push"]
    """Always `push`."""
    repository: str
    """`org/name`."""
    status: WorkStatus
    """Of the upload."""
    ahead: int | None
    """While it is queued: requests that have their turn before it, at most."""
    error: Fault | None
    """Why it failed: repeating it uploads only what is missing; while it is queued, why no worker takes it."""
