"""How a run directory goes: first its name, so that nobody takes it for a job any more, then what is in it."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from pathlib import Path

from jobs.errors import Conflict
from jobs.files import sync_folder
from jobs.record import fold
from jobs.rundir import RunDir

log = logging.getLogger("longhaul.removal")
PREFIX = "tmp-deleted-"
"""No run directory begins so (`jobs.rundir.list_runs`)."""


def set_aside(run: RunDir) -> Path:
    """Take the name from the directory of a job that has ended. Returns where it is now.

    Raises NotFound; Conflict for a job that has not ended, and while its trainer is still there.
    """
    with run.locked() as events:
        record = fold(run.id, events)
        if not record.status.terminal:
            raise Conflict(f"job {run.id} is {record.status}: cancel it first, and delete it when it has ended")
        if run.held():
            raise Conflict(f"the trainer of job {run.id} is still ending: try again in a moment")
        aside = run.path.with_name(f"{PREFIX}{run.id}-{uuid.uuid4().hex[:8]}")
        os.rename(run.path, aside)
    sync_folder(aside.parent)
    return aside


def remove(folder: Path) -> None:
    """Remove what was set aside. What somebody still writes to, or may not be removed, is left to the next `sweep`."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("%s could not be removed altogether; reconcile tries again", folder)


def sweep(runs: Path) -> None:
    """Remove what was set aside by processes that died before they could."""
    for entry in os.scandir(runs):
        if entry.name.startswith(PREFIX):
            remove(Path(entry.path))
