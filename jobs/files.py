"""Files that survive: JSON lines of which every whole one counts, contents that are replaced whole or not at all."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # the GPU benchmarks run where there is no pydantic
    from pydantic import BaseModel

log = logging.getLogger("longhaul.files")
Row = TypeVar("Row", bound="BaseModel")


def whole_lines(raw: bytes) -> list[bytes]:
    """The complete lines, without their newlines; what follows the last newline was torn."""
    return raw.split(b"\n")[:-1]


def read_rows(file: Path, kind: type[Row]) -> list[Row]:
    """The complete lines of a JSON-lines file, parsed; none if there is no file."""
    try:
        return [kind.model_validate_json(line) for line in whole_lines(file.read_bytes())]
    except FileNotFoundError:
        return []


def last_row(file: Path, kind: type[Row], reach: int = 65_536) -> Row | None:
    """The last complete line of a JSON-lines file, read from its end."""
    with open(file, "rb") as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - reach))
        lines = whole_lines(handle.read())
    return kind.model_validate_json(lines[-1]) if lines else None


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
        size = handle.seek(0, os.SEEK_END)
        if handle.write(line) != len(line):  # a full disk takes what it can
            handle.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


class LineWriter:
    """Appends rows to a JSON-lines file. What a full disk does not take is kept, and written before a later row."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._unsaid: list[BaseModel] = []

    def write(self, row: BaseModel, *, keep: bool = True) -> None:
        """Write it, after what could not be written before. `keep` False: leave it out where there is no room."""
        self._unsaid.append(row)
        if not self.flush() and not keep:
            self._unsaid.pop()

    def flush(self) -> bool:
        """Whether all is written now."""
        while self._unsaid:
            try:
                append_line(self._file, self._unsaid[0])
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.error("%d lines of %s wait for room on the disk", len(self._unsaid), self._file.name)
                return False
            self._unsaid.pop(0)
        return True

    def close(self) -> None:
        """Raise OSError (ENOSPC) if anything is still unwritten."""
        if not self.flush():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))


def write_atomically(file: Path, content: bytes) -> None:
    """Readers see the old content or the new, also after a power failure."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    write_synced(temporary, content)
    os.replace(temporary, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(file: Path, content: bytes) -> None:
    """Write a file and have it on disk."""
    with open(file, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
