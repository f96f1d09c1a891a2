"""Files of rows: found inside the data directory, opened and fingerprinted.

Errors name the dotted key of the job (`param`) and the path as the user wrote it.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol

from jobs.errors import BadData, Rejected
from worker.training.store import fingerprint

_BLOCK = 8 << 20
Refuse = Callable[[str, str, str], NoReturn]
"""Raises BadData about a file: code, what is wrong with it, hint."""


class RowFile(Protocol):
    """A file of rows, wherever it is."""

    @property
    def name(self) -> str:
        """Its name in errors and reports."""

    @property
    def bytes(self) -> int:
        """Its size."""

    @property
    def fetched(self) -> int:
        """Bytes that came over the network so far."""

    def open(self, param: str) -> BufferedReader:
        """Its content, from the beginning; can be sought in. Raises StageError, naming `param`."""

    @property
    def sha256(self) -> str | None:
        """The hash that its content must have; None: any content."""

    def state(self) -> object:
        """A value that changes when the content changes."""


@dataclass(frozen=True)
class DataFile:
    """A file of rows on this machine."""

    path: Path
    name: str
    bytes: int
    sha256: str | None = None
    known_state: object = None
    """Its state before it was hashed."""
    fetched: ClassVar[int] = 0

    def known(self, param: str, progress: Callable[[], object]) -> DataFile:
        """The file as it is now: who reads it to its end finds this content, or BadData (`file_changed`)."""
        with named_errors(self.path, self.name, param):
            state, size = self.state(), self.path.stat().st_size
            return replace(self, bytes=size, sha256=fingerprint(self.path, progress), known_state=state)

    def digest(self, param: str) -> str:
        """What tells it from other files, for *check*, which reads no file whole: its size, and the hash of its first
        and last 8 MiB."""
        with self.open(param) as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for place in (0, max(_BLOCK, size - _BLOCK)):
                file.seek(place)
                digest.update(file.read(_BLOCK))
        return digest.hexdigest()

    def check_unchanged(self, param: str) -> None:
        """Raise BadData (`file_changed`) if it is another file than when it was hashed; for those who read a part."""
        if self.state() != self.known_state:
            raise changed_error(self.name, param)

    def open(self, param: str) -> BufferedReader:
        """Raises BadData (`file_missing`, `file_unreadable`)."""
        with named_errors(self.path, self.name, param):
            return open(self.path, "rb")

    def state(self) -> object:
        """Which file it is, its size and the times of its last changes; None if it is gone."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class Source:
    """What `data.train` or `data.validation` stands for: one file, or the files of a hub data set's split, in order."""

    name: str
    """As in the job."""
    param: str
    """Dotted key of the job."""
    format: str
    """As in the job; `auto` goes by each file's name."""
    files: tuple[DataFile, ...]
    revision: str | None = None
    """Commit of a hub data set."""

    @property
    def hashes(self) -> list[str]:
        """sha256 of each file."""
        return [str(file.sha256) for file in self.files]


def find_file(data: Path, name: str, param: str) -> Path:
    """The regular, readable, not empty file `name` of the data directory, symbolic links resolved.

    Raises Rejected (`path_outside_data`) or BadData (`file_missing`, `file_empty`, `not_a_file`, `file_unreadable`).
    """
    path = find_path(data, name, param)
    with named_errors(path, name, param):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise BadData(f"{param}: {name} is {kind}", code="not_a_file", param=param, hint="name a file of rows")
        if status.st_size == 0:
            raise BadData(f"{param}: {name} is empty", code="file_empty", param=param, hint="was it copied completely?")
        with open(path, "rb"):
            pass
    return path


def find_path(data: Path, name: str, param: str) -> Path:
    """Where `name` (relative to the data directory, or absolute inside it) leads, symbolic links resolved; it exists.

    Raises Rejected (`path_outside_data`) or BadData (`file_missing`, `file_unreadable`).
    """
    root = data.resolve()
    with named_errors(root / name, name, param):
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise Rejected(
                f"{param}: {name} lies outside the data directory {root}",
                code="path_outside_data",
                param=param,
                hint="copy the file into the data directory (a symbolic link out of it does not count)",
            )
        path.stat()
    return path


class Hashing(io.RawIOBase):
    """An open file whose bytes are hashed as they are read, from the beginning."""

    def __init__(self, file: BufferedReader) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed: any writable buffer
        size = self._file.readinto(buffer)
        self._digest.update(buffer[:size])
        return size

    def tell(self) -> int:
        return self._file.tell()

    def hexdigest(self) -> str:
        """sha256 of the whole file: the rest of it is read first."""
        while block := self._file.read(_BLOCK):
            self._digest.update(block)
        return self._digest.hexdigest()


def refusal(file: RowFile, param: str) -> Refuse:
    """What refuses a file."""

    def refuse(code: str, what: str, hint: str) -> NoReturn:
        raise BadData(f"{param}: {file.name} {what}", code=code, param=param, hint=hint)

    return refuse


def changed_error(name: str, param: str) -> BadData:
    """The error for a file that is not what it was."""
    return BadData(
        f"{param}: {name} changed while it was read", code="file_changed", param=param,
        hint="submit again when it is complete",
    )  # fmt: skip


@contextmanager
def named_errors(path: Path, name: str, param: str) -> Iterator[None]:
    """Turn what the file system says about `path` into BadData (`file_missing`, `file_unreadable`)."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise BadData(
            f"{param}: there is no {name} in the data directory",
            code="file_missing",
            param=param,
            hint="is the name spelt the same? It is relative to the data directory; `longhaul datasets add FILE` "
            "uploads a file from elsewhere, and says what a job calls it",
        ) from None
    except PermissionError:
        raise BadData(
            f"{param}: {name} cannot be read by the user this runs as (uid {os.geteuid()})",
            code="file_unreadable",
            param=param,
            hint=f"in the data directory: {_chmod(path, name)}",
        ) from None
    except (ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        raise BadData(f"{param}: {name!r} leads nowhere: {error}", code="file_missing", param=param) from None


def _chmod(path: Path, name: str) -> str:
    """The command that helps: for the file, or for the first folder on the way that cannot be entered."""
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return f"chmod a+rx {shlex.quote(str(folder))}"
    return f"chmod a+r{'x' if path.is_dir() else ''} {shlex.quote(name)}"
