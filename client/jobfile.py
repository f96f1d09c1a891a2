"""What `longhaul submit` sends: a job file, or a file of rows, with changes from the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.data_names import DATA_SUFFIXES

ROWS = tuple(suffix for suffix in DATA_SUFFIXES if suffix != ".json")
"""What the name of a file of rows ends in here, where .json is a job."""


class BadInput(ValueError):
    """The command line or a file it names cannot be used; says how it could."""


def read_job(file: str, changes: Sequence[str], *, data: Path) -> dict[str, Any]:
    """The job of a .json file, or the smallest job for a file of rows; then `changes` (`key.dotted=value`) in order.

    `data` is the data directory as seen from here: a file of rows inside it is named relative to it.
    """
    if file.endswith(ROWS):
        name = re.sub(r"[^A-Za-z0-9_.\-]", "-", Path(file).name.split(".")[0]).lstrip("-_.")[:64]
        job: dict[str, Any] = {"name": name or "job", "data": {"train": _inside(file, data)}}
    else:
        job = _parsed(file)
    for change in changes:
        _set(job, change)
    return job


def _parsed(file: str) -> dict[str, Any]:
    try:
        job = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}; give a job file (.json) or a file of rows (.jsonl)") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{file} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file} is not UTF-8 text; a job file is JSON") from None
    if not isinstance(job, dict):
        raise BadInput(f'{file}: a job is a JSON object; the least is {{"data": {{"train": "rows.jsonl"}}}}')
    return job


def _inside(file: str, data: Path) -> str:
    """As the service wants it. A file that is not here may be there, so it goes as it is written."""
    if not os.path.exists(file):
        return file
    path, base = os.path.abspath(file), os.path.abspath(data)
    return os.path.relpath(path, base) if path.startswith(base + os.sep) else path


def _set(job: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise BadInput(f"--set {change}: write key.dotted=value, for example --set schedule.epochs=3")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text  # a bare word is a string
    place = job
    for part in parts[:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise BadInput(f"--set {change}: {part} is {inner!r} and has no keys")
        place = inner
    place[parts[-1]] = value
