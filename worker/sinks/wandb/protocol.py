"""What the sink asks its child process, as JSON lines. Answers are only logged and compared."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from pydantic import JsonValue

WandbRow = dict[str, float]
"""Figures by W&B's names."""


class ArtifactRequest(TypedDict):
    """What a job reads or makes, by reference."""

    name: str
    type: Literal["dataset", "model"]
    reference: str
    """URI of a folder, or of something that only has a name."""
    path: str
    """What it is called within the artifact."""
    metadata: dict[str, JsonValue]


class InitRequest(TypedDict):
    """Open the run of a job."""

    do: Literal["init"]
    online: bool
    why_offline: str | None
    project: str
    entity: str | None
    id: str
    group: str
    job_type: Literal["train", "evaluate"]
    name: str
    folder: str
    config: dict[str, JsonValue]
    tags: list[str]
    notes: str | None
    artifacts: list[ArtifactRequest]
    flush_s: float
    finish_s: float


class SampleTable(TypedDict):
    """Samples of an evaluation."""

    key: str
    columns: list[str | int]
    data: list[list[int | str]]


class LogRequest(TypedDict):
    """Take rows; the table goes with the last."""

    do: Literal["log"]
    rows: list[WandbRow]
    first: NotRequired[int]
    """W&B's own step of the first row; the others follow. Set when it is sent."""
    table: NotRequired[SampleTable]


class AlertRequest(TypedDict):
    """Call a person."""

    do: Literal["alert"]
    title: str
    text: str
    level: str


class FinishRequest(TypedDict):
    """End the run."""

    do: Literal["finish"]
    exit_code: int
    summary: dict[str, str | float | None]
    alert: AlertRequest | None
    artifacts: list[ArtifactRequest]


Request = InitRequest | LogRequest | AlertRequest | FinishRequest
