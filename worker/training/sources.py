"""Files of rows: found inside the data directory, fingerprinted, and read line by line.

Errors name the dotted key of the job (`param`) and the path as the user wrote it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from jobs.errors import BadData, Refused

MAX_LINE_BYTES = 4 << 20
"""A longer line is no training row: 4 MiB is a million tokens, and it bounds the memory of a reader."""
_BLOCK = 8 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True)
class Line:
    """One line that is not blank. `text` is None when it cannot be read, and `defect` says why."""

    number: int
    """Counted from 1, blank lines included, as an editor shows it."""
    text: str | None
    defect: str | None = None


def find_file(data: Path, name: str, param: str) -> Path:
    """The regular, readable, not empty file `name` of the data directory, symbolic links resolved.

    Raises Refused (`path_outside_data`) or BadData (`file_missing`, `file_empty`, `not_a_file`, `file_unreadable`).
    """
    path = find_path(data, name, param)
    with _named_errors(path, name, param):
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

    Raises Refused (`path_outside_data`) or BadData (`file_missing`, `file_unreadable`).
    """
    root = data.resolve()
    with _named_errors(root / name, name, param):
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise Refused(
                f"{param}: {name} lies outside the data directory {root}",
                code="path_outside_data",
                param=param,
                hint="copy the file into the data directory (a symbolic link out of it does not count)",
            )
        path.stat()
    return path


def fingerprint(path: Path, progress: Callable[[], None]) -> str:
    """sha256 of the content, hexadecimal. `progress` is called at every 8 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress()
    return digest.hexdigest()


class LineReader:
    """The lines of a JSON-lines file, plain or gzip (told by content, not by name); never the whole file in memory.

    `fraction` is the share of the file's bytes read so far, `blank_lines` those passed over.
    Raises BadData (`damaged_archive`, `wrong_encoding`, `file_changed`, `not_supported_yet`).
    """

    def __init__(self, path: Path, name: str, param: str) -> None:
        self._path, self._name, self._param = path, name, param
        self.fraction = 0.0
        self.blank_lines = 0

    def __iter__(self) -> Iterator[Line]:
        with _named_errors(self._path, self._name, self._param):
            raw = open(self._path, "rb")  # noqa: SIM115 - closed by the next `with`
        with raw:
            before = os.fstat(raw.fileno())
            number = 0
            try:
                for number, line in enumerate(_bounded_lines(self._decoded(raw)), start=1):
                    self.fraction = raw.tell() / before.st_size if before.st_size else 1.0
                    if line is None:
                        yield Line(number, None, "over-long line")
                    elif line.isspace():
                        self.blank_lines += 1
                    else:
                        yield _decode(number, line)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                self._refuse("damaged_archive", f"is damaged after line {number}: {error}", "copy or compress it again")
            after = os.fstat(raw.fileno())
            if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                self._refuse("file_changed", "changed while it was read", "submit again when it is complete")
        self.fraction = 1.0

    def _decoded(self, raw: IO[bytes]) -> IO[bytes]:
        start = raw.read(4)
        raw.seek(0)
        if start.startswith(_ZSTD):
            self._refuse("not_supported_yet", "is a zstd archive, which is not supported yet", "use gzip or none")
        for mark, encoding in _OTHER_ENCODINGS.items():
            if start.startswith(mark):
                self._refuse("wrong_encoding", f"is {encoding}", f"write it as UTF-8: iconv -f {encoding} -t UTF-8")
        return gzip.open(raw, "rb") if start.startswith(_GZIP) else raw  # type: ignore[return-value]

    def _refuse(self, code: str, what: str, hint: str) -> NoReturn:
        raise BadData(f"{self._param}: {self._name} {what}", code=code, param=self._param, hint=hint)


def _bounded_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines, with their newlines; None in place of one longer than MAX_LINE_BYTES."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_BLOCK)
        yield None


def _decode(number: int, line: bytes) -> Line:
    try:
        # An editor's byte order mark is no part of the first row.
        return Line(number, line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        return Line(number, None, "not UTF-8")


@contextmanager
def _named_errors(path: Path, name: str, param: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise BadData(
            f"{param}: there is no {name} in the data directory",
            code="file_missing",
            param=param,
            hint="paths are relative to the data directory; is the file there, and is the name spelt the same?",
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
            return f"chmod a+rx {folder}"
    return f"chmod a+r{'x' if path.is_dir() else ''} {name}"
