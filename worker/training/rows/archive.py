"""A zip archive that holds one file of rows: found, and unpacked as it is read."""

from __future__ import annotations

import zipfile
from io import BufferedReader
from pathlib import PurePosixPath
from typing import IO, cast

from jobs.data_names import data_format, workbook_suffix
from worker.training.rows.row import in_shell
from worker.training.rows.sources import Refuse

ZIP = b"PK\x03\x04"
EMPTY_ZIP = b"PK\x05\x06"
DAMAGED = (zipfile.BadZipFile, NotImplementedError)
"""What zipfile raises for an archive that cannot be unpacked."""
_ENCRYPTED = 0x1
_LARGEST_READ = 1 << 20
"""zipfile reads the list of files at once: this is room for some 10,000."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SHOWN = 5
_OF_WINDOWS = ("thumbs.db", "desktop.ini")


class _BoundedReads:
    """A file of which no more is read at once than a list of files may need."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _LARGEST_READ:
            raise zipfile.BadZipFile("its list of files is too long")
        return self._file.read(_LARGEST_READ if size < 0 else size)


class Archive:
    """An open zip archive. `name` of it, as in the job; `refuse` raises BadData about it.

    Raises BadData: `damaged_archive`, `encrypted`, `several_files`, `no_rows`, `not_supported`.
    """

    def __init__(self, raw: BufferedReader, name: str, refuse: Refuse) -> None:
        self._name, self._refuse = name, refuse
        raw.seek(0)
        try:
            self._zip = zipfile.ZipFile(cast(IO[bytes], _BoundedReads(raw)))
        except (*DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            refuse("damaged_archive", f"is damaged: {error}", "copy or pack it again")

    @property
    def is_workbook(self) -> bool:
        """Whether it is one of Excel or OpenDocument."""
        return workbook_suffix(self._zip.NameToInfo) is not None

    def member(self) -> zipfile.ZipInfo:
        """The one file of rows in it."""
        files = [each for each in self._zip.infolist() if not each.is_dir() and _is_file_of_people(each.filename)]
        rows = [each for each in files if data_format(each.filename) is not None] or files
        unpack = f"unpack it: python3 -m zipfile -e {in_shell(self._name)} ."
        if len(rows) > 1:
            named = ", ".join(each.filename for each in rows[:_SHOWN]) + (", …" if len(rows) > _SHOWN else "")
            self._refuse(
                "several_files", f"holds {len(rows)} files ({named}), and an archive is read where it holds one",
                f"{unpack}; data.train takes a list of several files",
            )  # fmt: skip
        if not rows:
            self._refuse("no_rows", "holds no file", "was it packed in full?")
        [member] = rows
        if member.flag_bits & _ENCRYPTED:
            self._refuse("encrypted", "is protected by a password", "pack its file again without one")
        if member.compress_type not in _METHODS:
            self._refuse("not_supported", "is packed by a method other than deflate", "pack it again, or unpack it")
        if data_format(member.filename) in ("parquet", "workbook", "zip"):
            kind = PurePosixPath(member.filename).suffix
            self._refuse("not_supported", f"holds {member.filename}, and a file {kind} is read by itself", unpack)
        return member

    def open(self, member: zipfile.ZipInfo) -> IO[bytes]:
        """What is packed in it, from the beginning."""
        return self._zip.open(member)


def _is_file_of_people(name: str) -> bool:
    """Whether it is none that a system adds by itself, such as `__MACOSX/._rows.csv` or `.DS_Store`."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and parts[0] != "__MACOSX"
        and not parts[-1].startswith(".")
        and parts[-1].lower() not in _OF_WINDOWS
    )
