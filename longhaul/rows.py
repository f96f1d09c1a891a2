"""A file of rows that is here: how the service gets to read it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from jobs.data_names import data_format, hub_data, uploaded_name
from longhaul.api import ApiError, Longhaul
from longhaul.connection import is_loopback
from longhaul.figures import size
from longhaul.transfer import Progress, sha256_of


def at_the_service(
    api: Longhaul,
    file: str,
    *,
    data: Path,
    upload: bool,
    before_upload: Callable[[], None],
    say: Callable[[str], None],
    on_progress: Progress,
) -> str:
    """What `data.train` has to be for the service to read this file; `say` is called with the reason why.

    One in the data directory is read where it lies when the service is on this machine (unless `upload`); any other
    is uploaded, if the service does not have it yet; `before_upload` may raise a reason not to. A file that is not here
    may be there: it goes as it is written.
    """
    if not os.path.exists(file):
        say(f"{file} is not here: the service looks for it {_where(file)}")
        return file
    inside = _inside(file, data)
    if inside is not None and not upload and is_loopback(api.url):
        say(f"{file} is read from the data directory, as {inside} (--upload uploads it instead)")
        return inside
    digest = sha256_of(Path(file)).hex()
    name = dataset_name(os.path.basename(file))
    there = _sha256(api, name)
    if there is not None and there != digest:
        # A data set never changes: other content under a name that is taken gets one of its own.
        stem, dot, suffix = name.partition(".")
        name = f"{stem}-{digest[:8]}{dot}{suffix}"
        there = _sha256(api, name)
    if there == digest:
        say(f"the service already has {file} as dataset:{name}")
    else:
        before_upload()
        api.upload(file, name, on_progress=on_progress)
        say(f"uploaded {file} ({size(os.path.getsize(file))}) as dataset:{name}")
    return f"dataset:{name}"


def _inside(file: str, data: Path) -> str | None:
    path, base = os.path.abspath(file), os.path.abspath(data)
    return os.path.relpath(path, base) if path.startswith(base + os.sep) else None


def _where(name: str) -> str:
    """Where rows of that name are looked for."""
    if uploaded_name(name) is not None:
        return "among the uploaded data sets"
    return "in its data directory" if hub_data(name, "auto") is None else "on the hub"


def dataset_name(name: str) -> str:
    """What a file of that name is called once it is uploaded: the nearest legal name (jobs/data_names.py)."""
    if data_format(name) is None:
        name += ".json"  # rows are recognized under another name only where they are JSON, by the line or in an array
    legal = re.sub(r"[^A-Za-z0-9_.\-]", "-", name)[-100:].lstrip("-_.")
    return f"data.{legal}" if data_format(f".{legal}") and not data_format(legal) else legal  # nothing but the ending


def _sha256(api: Longhaul, name: str) -> str | None:
    """Of a data set of the service; None: there is none."""
    try:
        return str(api.dataset(name)["sha256"])
    except ApiError as error:
        if error.status == 404:
            return None
        raise
