"""Deleting a run directory, or the weights in it: what goes is renamed first, then removed."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from pathlib import Path

from jobs.disk.event_log import event_log
from jobs.disk.files import sync_folder
from jobs.disk.rundir import RunDir
from jobs.errors import Conflict, Damaged
from jobs.state import CANCEL_FIRST

log = logging.getLogger("longhaul.removal")
PREFIX = "tmp-deleted-"
"""No run directory and no sweep begins so (`jobs.disk.rundir.list_runs`)."""


def move_away(run: RunDir) -> Path:
    """Rename the directory of a job that has ended, so that the job is gone. Returns where it is now.

    Raises NotFound; Conflict for a whole job that has not ended, and while its trainer is still there.
    """
    events = event_log(run.events_file)
    with events.locked():
        events.forget()
        try:
            status = run.verified().status
        except Damaged as error:  # it can neither continue nor end
            log.warning("job %s is damaged and is deleted whatever its state was: %s", run.id, error)
        else:
            if not status.terminal:
                raise Conflict(f"job {run.id} is {status}: {CANCEL_FIRST}")
        if run.held():
            raise Conflict(f"the trainer of job {run.id} is still ending: try again in a moment")
        moved = run.path.with_name(f"{PREFIX}{run.id}-{uuid.uuid4().hex[:8]}")
        os.rename(run.path, moved)
    sync_folder(moved.parent)
    return moved


def remove_weights(run: RunDir) -> None:
    """Remove the model and the checkpoints of a job that has ended; what it found out stays."""
    for folder in (run.model, run.checkpoints):
        if folder.exists():
            moved = run.path.with_name(f"{PREFIX}{run.id}-{folder.name}-{uuid.uuid4().hex[:8]}")
            os.rename(folder, moved)
            remove(moved)


def remove(folder: Path) -> None:
    """Remove what was moved away. What is still in use, or cannot be removed, is left to the next `sweep`."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("%s could not be removed completely; reconcile tries again", folder)


def sweep(runs: Path) -> None:
    """Remove what was moved away by processes that died before they could."""
    for moved in [*runs.glob(f"{PREFIX}*"), *runs.glob(f".*/{PREFIX}*")]:
        remove(moved)
