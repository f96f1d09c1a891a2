"""Content-addressed folders that are made once, by the first process that needs them, and complete or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.disk.files import sync_folder
from jobs.errors import BadData, DiskFull, Rejected
from jobs.text.units import GIB, MIB, bytes_alike, format_bytes

_POLL_S = 0.5
_SPARE_BYTES = GIB
_BLOCK_BYTES = 8 * MIB
_PARTIAL = "partial-"
_FORGOTTEN_S = 7 * 24 * 3600


def content_key(facts: list[Any]) -> str:
    """Name of the folder whose content these facts decide: 24 hex digits."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def fingerprint(path: Path, progress: Callable[[], object]) -> str:
    """sha256 of the content, hexadecimal. `progress` is called at every 8 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            progress()
    return digest.hexdigest()


def make_once(
    folder: Path,
    make: Callable[[Path], None],
    usable: Callable[[Path], bool],
    waiting: Callable[[], None],
    *,
    resumable: bool = False,
) -> bool:
    """Make `folder` unless it is there and `usable`; returns whether it was made now.

    `make` fills a folder beside it, which is then renamed. Another process that does the same is waited for;
    `waiting` is called twice a second meanwhile. If `resumable`, the folder that `make` is given may hold what an
    earlier call had done before it was killed or the disk was full, and is kept for the next one; not where it raised
    BadData or Rejected, which say that there is nothing to make.
    """
    with _locked(folder, waiting):
        if folder.exists():
            if usable(folder):
                return False
            shutil.rmtree(folder)
        # No other process makes this folder while the lock is held: leftovers are from a process that was killed.
        for remains in folder.parent.glob(f"tmp-{folder.name}-*"):
            shutil.rmtree(remains, ignore_errors=True)
        started = folder.with_name(
            f"{_PARTIAL}{folder.name}" if resumable else f"tmp-{folder.name}-{uuid.uuid4().hex[:8]}"
        )
        started.mkdir(exist_ok=resumable)
        try:
            make(started)
            sync_folder(started)
            os.rename(started, folder)
        except BaseException as error:
            if not resumable or isinstance(error, BadData | Rejected):
                shutil.rmtree(started, ignore_errors=True)
            raise
        sync_folder(folder.parent)
    _sweep(folder.parent)
    return True


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turn "no space left" into DiskFull, with the figures."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"no room is left on the disk of {folder} ({format_bytes(free_bytes(folder))} free): {error}",
            hint="make room there; what was complete is kept",
        ) from error


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to the disk of `folder`, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_room(folder: Path, needed: int, what: str, variable: str = "LONGHAUL_MODELS") -> None:
    """Raise DiskFull unless `needed` bytes, and 1 GiB for everybody else, fit on the disk of `folder`.

    `variable` is the setting that says where the folder is.
    """
    if (free := free_bytes(folder)) < needed + _SPARE_BYTES:
        least, there = bytes_alike(needed, free)
        raise DiskFull(
            f"{what} needs {least} in {folder}, besides {format_bytes(_SPARE_BYTES)} that stay free for others; "
            f"{there} are free",
            hint=f"make room there, or point {variable} at a larger disk",
        )


def _sweep(store: Path) -> None:
    """Remove unfinished folders that were not touched for a week and that nobody holds."""
    for partial in store.glob(f"{_PARTIAL}*"):
        lock = store / ".locks" / f"{partial.name.removeprefix(_PARTIAL)}.lock"
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(lock, "ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - max(file.stat().st_mtime for file in (partial, *partial.iterdir())) > _FORGOTTEN_S:
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"{folder.name}.lock", "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
        yield
