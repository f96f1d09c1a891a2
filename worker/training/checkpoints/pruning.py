"""Which checkpoints are removed, and when. One loses its name first, so that half of it is never taken for a whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.trainer_facts import ModelLoaded
from worker.training.checkpoints.checkpoint import best_first, newest_first

FROM_SCRATCH = "from_scratch.json"
"""In the run directory: what was removed because the job was resumed from scratch, and before which attempt."""
REPLACED = "tmp-replaced-"
"""Before the name of a checkpoint for the moment in which another one of the same step takes that name."""


def prune(run: RunDir, keep: int, best: str) -> None:
    """Keep the `keep` newest and the best one by the metric `best`; rejected ones have been replaced by now."""
    for rejected in run.checkpoints.glob("rejected-*"):
        _delete(rejected)
    folders = newest_first(run)
    kept = {*folders[:keep], *list(best_first(folders, best))[:1]}
    for folder in folders:
        if folder not in kept:
            remove(folder)


def clean(run: RunDir) -> None:
    """Remove what a trainer left that was killed while it wrote. Only the holder of the run's lock may call this."""
    for replaced in run.checkpoints.glob(f"{REPLACED}step-*"):
        if not (final := replaced.with_name(replaced.name.removeprefix(REPLACED))).exists():
            os.rename(replaced, final)  # killed before the new one had the name
    for leftover in (*run.checkpoints.glob("tmp-*"), *run.path.glob(f"tmp-{run.model.name}*")):
        _delete(leftover)
    for unfinished in run.path.glob(f".{run.metrics_file.name}.*"):
        unfinished.unlink()


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there."""
    if (doomed := move_away(folder)) is not None:
        _delete(doomed)


def _delete(path: Path) -> None:
    """Remove a folder, or whatever else has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def move_away(folder: Path, prefix: str = "tmp-removed-") -> Path | None:
    """Take a checkpoint's name, if it is there: a removal cut short leaves no half under it. What is to be removed."""
    if not folder.exists():
        return None
    doomed = folder.with_name(f"{prefix}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    return doomed


def start_from_scratch(run: RunDir, attempt: int) -> bool:
    """Remove what was saved before that attempt (0: there is none), and say whether that was still to be done.

    It is done once: after a crash the run resumes from what it has saved since. Only the holder of the run's lock may
    call this.
    """
    if not attempt or _started_from_scratch(run, attempt):
        return False
    doomed = [*newest_first(run), *run.checkpoints.glob("rejected-*")]
    for folder in doomed:
        remove(folder)
    about = {"attempt": attempt, "removed": [folder.name for folder in doomed]}
    write_atomically(run.path / FROM_SCRATCH, json.dumps(about, indent=1).encode() + b"\n")
    return True


def _started_from_scratch(run: RunDir, attempt: int) -> bool:
    """By the file, or, if it is lost, by the events of a later attempt."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if json.loads((run.path / FROM_SCRATCH).read_bytes())["attempt"] == attempt:
            return True
    return any(isinstance(event.fact, ModelLoaded) and event.attempt >= attempt for event in run.events())
