"""What clients may download from a run directory: regular files inside it, except those for internal use.

No `..` in any spelling, no symbolic link anywhere on the way, no device or pipe. Each folder is opened relative to the
one before and without following links, so that whoever can write there leads no reader out either, not even by putting
a link in a folder's place meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import NotFound

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,254}")
"""Names that are the same everywhere: in an address, in a header, in a tar, on any file system. We write no others."""
# The trainer's own words can be read at /logs, where what looks like a secret is taken out.
_OURS = frozenset({"lock", "events.lock", "request", "sinks", "trainer.log", "attempts"})
# Opening a pipe would wait for its other end.
_ANY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_THERE = {
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.ENAMETOOLONG,
}  # fmt: skip


class NoFile(NotFound):
    """The run directory has no such file, or none that people may have."""

    code = "no_file"


@dataclass(frozen=True)
class Found:
    """A regular file."""

    path: str
    """Relative to the folder that was looked through."""
    status: os.stat_result


def open_inside(run: Path, path: str) -> int:
    """A handle, to read from, of a regular file or a folder of a run directory. Raises NoFile."""
    parts = path.removesuffix("/").split("/")
    if not all(_may_be_had(part) for part in parts) or parts[0] in _OURS:
        raise _none(run, path)
    handle = _open_run(run)
    try:
        for part in parts:
            handle = _step(handle, part)
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise _none(run, path) from None
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        os.close(handle)
        raise _none(run, path)
    return handle


def content(run: Path, path: str) -> bytes:
    """A file of a run directory, whole. Raises NoFile."""
    handle = open_inside(run, path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _none(run, path)
    with open(handle, "rb") as file:
        return file.read()


def reopen(folder: int, file: Found) -> int:
    """A handle of a file found below this open folder. Raises FileNotFoundError when another one is there now."""
    handle = os.dup(folder)
    for part in file.path.split("/"):
        handle = _step(handle, part)
    now = os.fstat(handle)
    if (now.st_dev, now.st_ino) != (file.status.st_dev, file.status.st_ino):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", file.path)
    return handle


def files_of(run: Path) -> list[Found]:
    """All that people may have of a run directory, in order of path. Raises NoFile if it is no directory itself."""
    handle = _open_run(run)
    try:
        return [file for file in files_below(handle) if file.path.partition("/")[0] not in _OURS]
    finally:
        os.close(handle)


def files_below(folder: int) -> list[Found]:
    """The regular files in an open folder and in its folders, in order of path."""
    return sorted(_walk(folder, ""), key=lambda file: file.path)


def _walk(folder: int, prefix: str) -> Iterator[Found]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _may_be_had(entry.name)]
    for name in names:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield Found(prefix + name, status)
            elif stat.S_ISDIR(status.st_mode):
                below = os.open(name, _ANY | os.O_DIRECTORY, dir_fd=folder)
                try:
                    yield from _walk(below, f"{prefix}{name}/")
                finally:
                    os.close(below)
        except OSError as error:  # a checkpoint that is pruned meanwhile; a folder that may not be entered
            if error.errno not in _NOT_THERE:
                raise


def _open_run(run: Path) -> int:
    try:
        return os.open(run, _ANY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise NoFile(f"there is no folder of job {run.name}, or it is a link to elsewhere") from None
        raise


def _step(folder: int, name: str) -> int:
    """From an open folder, which is closed, to what it has under this name."""
    try:
        return os.open(name, _ANY, dir_fd=folder)
    finally:
        os.close(folder)


def _may_be_had(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.startswith("tmp-")


def _none(run: Path, path: str) -> NoFile:
    return NoFile(f"job {run.name} has no file {path[:200]!r} that can be had: GET /jobs/{run.name}/files lists them")
