"""What the name of a job's rows says: a file and its format, an uploaded data set, or a data set on the hub."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

DataFormat = Literal["jsonl", "csv", "parquet"]
FileFormat = Literal[DataFormat, "workbook", "zip"]
"""What a file's name may say: also a sheet of a workbook, or a zip archive, in which another file is."""


_TEXT_FORMATS: dict[str, DataFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip


_FORMATS: dict[str, FileFormat] = {
    **{suffix + packed: format for packed in ("", ".gz", ".zst") for suffix, format in _TEXT_FORMATS.items()},
    ".parquet": "parquet", ".xlsx": "workbook", ".xlsm": "workbook", ".xls": "workbook", ".ods": "workbook",
    ".zip": "zip",
}  # fmt: skip


DATA_SUFFIXES = tuple(_FORMATS)
"""What the name of a file of rows ends in, so that `data.format: auto` knows it."""


def data_format(name: str) -> FileFormat | None:
    """The format of a file of rows by its name, whatever the case; None where that says nothing."""
    return next((format for suffix, format in _FORMATS.items() if name.lower().endswith(suffix)), None)


def workbook_suffix(members: Collection[str]) -> str | None:
    """What the name of a zip archive with these files ends in where it is a workbook (Excel, OpenDocument); None: it is
    none."""
    kinds = {"mimetype": ".ods", "[Content_Types].xml": ".xlsx"}
    return next((suffix for member, suffix in kinds.items() if member in members), None)


# -- uploaded ---------------------------------------------------------------------------------------------------------

UPLOADED = "dataset:"
"""What the name of an uploaded data set has in front, in a job."""
ABOUT = "about.json"
"""The file beside an uploaded data set."""


def is_dataset_name(name: str) -> bool:
    """Whether an uploaded data set may be called that: one path segment, with an ending that says its format."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
    return plain and data_format(name) is not None and name != ABOUT


def uploaded_name(name: str) -> str | None:
    """The uploaded data set that `data.train` or `data.validation` names; None: something else.

    The answer need not be a legal name: is_dataset_name says that, before it becomes part of a path.
    """
    return name.removeprefix(UPLOADED) if name.startswith(UPLOADED) else None


def dataset_file(uploads: Path, dataset: str) -> Path:
    """Where the rows of an uploaded data set lie: in a folder of its own, with ABOUT beside them."""
    return uploads / dataset / dataset


# -- on the hub -------------------------------------------------------------------------------------------------------


class HubData(NamedTuple):
    """A hub data set as named in a job."""

    repository: str
    revision: str | None
    """Branch, tag or commit; None: the default branch."""
    configuration: str | None
    """None: the default one."""
    split: str


def hub_data(name: str, format: str) -> HubData | None:
    """What `data.train` or `data.validation` names on the hub; None: a file. DataSpec.train tells the rule."""
    parts = re.fullmatch(r"([A-Za-z0-9][\w.\-]*/[\w.\-]+)(?:@([\w.\-/]+))?(?::(?:([\w.\-]+)/)?([\w.\-]+))?", name)
    if parts is None or format != "auto" or data_format(name) is not None:
        return None
    return HubData(parts[1], parts[2], parts[3], parts[4] or "train")
