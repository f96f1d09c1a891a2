"""What the name of a job's rows says: a file and its format, or a data set on the hub."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

DataFormat = Literal["jsonl", "csv", "parquet"]


_TEXT_FORMATS: dict[str, DataFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip


_FORMATS: dict[str, DataFormat] = {
    suffix + packed: format for packed in ("", ".gz", ".zst") for suffix, format in _TEXT_FORMATS.items()
} | {".parquet": "parquet"}


DATA_SUFFIXES = tuple(_FORMATS)
"""What the name of a file of rows ends in, so that `data.format: auto` knows it."""


def data_format(name: str) -> DataFormat | None:
    """The format of a file of rows by its name, whatever the case; None where that says nothing."""
    return next((format for suffix, format in _FORMATS.items() if name.lower().endswith(suffix)), None)


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
