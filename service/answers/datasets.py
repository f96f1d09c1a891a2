"""Uploaded data sets."""

from __future__ import annotations

from typing import Literal

from jobs.data_names import FileFormat
from jobs.dataset_report import DatasetReport
from service.answers.parts import Answer, Page


class Dataset(Answer):
    """An uploaded file of rows. A job names it `dataset:<name>`."""

    object: Literal["dataset"]
    """Always `dataset`."""
    name: str
    """As it was uploaded; other content needs another name."""
    uri: str
    """How a job names it in `data.train` or `data.validation`: `dataset:<name>`."""
    format: FileFormat
    """What its ending says."""
    bytes: int
    """Its size."""
    sha256: str
    """Of its content, in hexadecimal."""
    created_at: int
    """When it was uploaded, Unix seconds."""


class DatasetDetail(Dataset):
    """A data set, and what became of it."""

    jobs: list[str]
    """Ids of jobs that name it, newest first, at most ten."""
    in_use: bool
    """Whether an open job needs it: it cannot be deleted while there is one."""
    report: DatasetReport | None
    """What the newest job that read it found in its rows (`dataset.json`); null before the first."""
    report_job: str | None
    """That job."""


class DatasetList(Page):
    """Data sets in order of name."""

    cursor = "name"
    data: list[Dataset]
    first_id: str | None
    """Name of the first one; null for an empty list."""
    last_id: str | None
    """Name of the last one."""


class DeletedDataset(Answer):
    """It is gone."""

    name: str
    """Which one it was."""
    object: Literal["dataset"]
    """Always `dataset`."""
    deleted: Literal[True]
    """Always true."""
