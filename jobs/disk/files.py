"""Files that survive: JSON lines of which every whole one counts, contents that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shlex
import shutil
import stat
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from pydantic import BaseModel
log = logging.getLogger("longhaul.files")

NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL})
"""There is no file of this name, or it is something else."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2, which Python does not have."""


def regular(path: str, flags: int) -> int:
    """An `opener` for files of a run directory: it waits for no other end of a pipe, and takes nothing but files."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):  # `open` says itself what a folder is
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def read_regular(file: Path) -> bytes:
    """All of a file. Raises OSError, also for what is no file."""
    with open(file, "rb", opener=regular) as handle:
        return handle.read()


def whole_lines(raw: bytes) -> list[bytes]:
    """The complete lines, without their newlines; what follows the last newline was torn."""
    return raw.split(b"\n")[:-1]


class FilePosition(NamedTuple):
    """How far a reader has read a JSON-lines file, and the last line that it has read, by length and CRC."""

    offset: int = 0
    """Bytes read: the end of a whole line."""
    length: int = 0
    crc: int = 0

    def after(self, lines: bytes) -> FilePosition:
        """The place after these whole lines, at least one."""
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        return FilePosition(self.offset + len(lines), len(last), zlib.crc32(last))

    def found_in(self, file: BinaryIO | FileIO) -> FilePosition:
        """This place, where that line still ends there; else the beginning: the file was cut, or is another one.

        The position of the file is then there, too.
        """
        file.seek(self.offset - self.length)
        place = self if zlib.crc32(file.read(self.length)) == self.crc else START
        file.seek(place.offset)
        return place


START = FilePosition()


def append_line(file: Path, row: BaseModel) -> None:
    """Append one JSON line in one write; a line torn by a crash before is cut first."""
    line = row.model_dump_json().encode() + b"\n"
    with open(file, "a+b", buffering=0) as handle:
        size = handle.seek(0, os.SEEK_END)
        if size:
            handle.seek(size - 1)
            if handle.read(1) != b"\n":
                handle.seek(0)
                whole = whole_lines(handle.read())
                handle.truncate(sum(len(each) + 1 for each in whole))
        handle.seek(0, os.SEEK_END)
        write_whole(handle, line)


def write_whole(handle: FileIO, content: bytes, *, sync: bool = False) -> None:
    """Write all of it at the end of the file, where the handle is, and have it on disk (`sync`).

    With an error the file is as it was: what a full disk did take is cut.
    """
    end = handle.tell()
    try:
        if handle.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(handle.name))
        if sync:
            os.fsync(handle.fileno())
    except OSError:
        handle.truncate(end)
        if sync:
            os.fsync(handle.fileno())
        raise


class LineWriter:
    """Appends rows to a JSON-lines file. What a full disk does not take is kept, and written before a later row."""

    def __init__(self, file: Path, before: Callable[[], None] = lambda: None) -> None:
        """`before` is called before each line is written."""
        self._file, self._before = file, before
        self._unsaid: list[BaseModel] = []

    def write(self, row: BaseModel, *, keep: bool = True) -> None:
        """Write it, after what could not be written before. `keep` False: leave it out where there is no room."""
        self._unsaid.append(row)
        if not self.flush() and not keep:
            self._unsaid.pop()

    def flush(self) -> bool:
        """Whether all is written now."""
        while self._unsaid:
            self._before()
            try:
                append_line(self._file, self._unsaid[0])
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.error("%d lines of %s wait for room on the disk", len(self._unsaid), self._file.name)
                return False
            self._unsaid.pop(0)
        return True

    def sync(self) -> None:
        """Have on disk what is written so far."""
        with contextlib.suppress(FileNotFoundError), open(self._file, "rb") as handle:
            os.fsync(handle.fileno())

    def close(self) -> None:
        """Raise OSError (ENOSPC) if anything is still unwritten."""
        if not self.flush():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))


def write_atomically(file: Path, content: bytes) -> None:
    """Readers see the old content or the new, also after a power failure."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        write_synced(temporary, content)
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(made: Path, target: Path) -> None:
    """Give a complete folder its name. At every instant the name has what was there, or what is there now.

    `made` is on the same file system, and gone afterwards. Where that cannot exchange two names (NFS, for one), the old
    folder loses its name first: after a kill in between `restore_folder` gives it back.
    """
    restore_folder(target)
    sync_folder(made)
    old = _displaced(target)
    if not target.exists():
        os.rename(made, target)
    elif _exchange(made, target):
        old = made
    else:
        os.rename(target, old)
        os.rename(made, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(target: Path) -> None:
    """Give a folder its name back that it lost in a `replace_folder` which was killed."""
    if (old := _displaced(target)).exists() and not target.exists():
        os.rename(old, target)
    shutil.rmtree(old, ignore_errors=True)


def _displaced(target: Path) -> Path:
    return target.with_name(f"tmp-old-{target.name}")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False: this file system, or this kernel, cannot."""
    renamed = ctypes.CDLL(None, use_errno=True).renameat2(
        _AT_FDCWD, os.fsencode(one.absolute()), _AT_FDCWD, os.fsencode(other.absolute()), _RENAME_EXCHANGE
    )
    if renamed == 0:
        return True
    if (error := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(other))


def write_synced(file: Path, content: bytes) -> None:
    """Write a file and have it on disk."""
    with open(file, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


# -- writable ----------------------------------------------------------------------------------------------------------
# Whether a process can write where it must; if not, one line with the owner of the folder and what helps.

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Work continues once there is room; any other obstacle to writing lasts until the process is restarted."""
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
PROBE_BYTES = 32 * 1024
"""As much as a new run directory takes, its folders included."""


def probe(folder: Path) -> None:
    """Make a folder in it with a file that is on disk, and remove both. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ready-") as name:
        write_synced(Path(name) / "probe", bytes(PROBE_BYTES))


def unwritable(folders: Iterable[Path]) -> str | None:
    """Make these folders where they are missing. One line on the first that cannot be written; None: all can.

    A full disk does not count: the write that fails reports it, and it passes.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe(folder)
        except OSError as error:
            if error.errno not in FULL:
                return f"{folder} cannot be written: {error.strerror}; {_whose(folder)}"
    return None


def _whose(folder: Path) -> str:
    """Whose it is, or whose the nearest folder above it is, who we are, and the command that helps."""
    for place in (folder, *folder.parents):
        try:
            found = place.stat()
        except OSError:
            continue
        break
    uid, gid = os.geteuid(), os.getegid()
    here = "it" if place == folder else str(place)
    mode = stat.S_IMODE(found.st_mode)
    state = f"{here} is owned by {found.st_uid}:{found.st_gid} with mode {mode:o}, and this process runs as {uid}:{gid}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{state}. It is not a folder: name another place"
    name = shlex.quote(str(place))
    if found.st_uid == uid and mode & 0o700 != 0o700:
        return f"{state}. What helps: chmod u+rwx {name}"
    if uid in (0, found.st_uid):
        return f"{state}. Its file system takes no writes: mount it writable, or name another place"
    return f"{state}. What helps: sudo chown -R {uid}:{gid} {name} (in a container: the folder that is mounted there)"
