"""A workbook (Excel, OpenDocument), read as the JSON lines that `sheet.py` makes of it in a process of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from io import BufferedReader
from typing import cast

from jobs.text.units import format_duration
from worker.training.rows import sheet
from worker.training.rows.sources import Refuse

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""How workbooks of Excel 97 begin, and those with a password."""
_SHOWN = 5
KEPT_BYTES = 16 << 20
"""Of the lines of a workbook, kept for those who open it again; and of how many workbooks."""
_KEPT = 4
_beginnings: dict[tuple[int, ...], tuple[bytes, bool]] = {}
"""By file and its times: the first lines, and whether they are all. A stage opens a workbook several times, and is a
process of its own."""


class Workbook:
    """An open workbook. `raw`: a file of the system; `refuse` raises BadData about it.

    Raises BadData: `encrypted`, `damaged_file`, `no_rows`, `bad_header`, `too_large`.
    """

    def __init__(self, raw: BufferedReader, refuse: Refuse) -> None:
        self._raw, self._refuse = raw, refuse
        self._process: subprocess.Popen[bytes] | None = None
        status = os.fstat(raw.fileno())
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        try:
            if key not in _beginnings:
                kept = self._begin()
                while len(_beginnings) >= _KEPT:
                    del _beginnings[next(iter(_beginnings))]
                _beginnings[key] = kept
            beginning, self._whole = _beginnings[key]
            self._beginning = io.BytesIO(beginning)
            first = json.loads(self._beginning.readline())
            if "refused" in first:
                refuse(*first["refused"])
            self.about = sheet.About(**first)
        except BaseException:
            self.close()
            raise

    def _start(self) -> BufferedReader:
        command = [sys.executable, "-m", sheet.__name__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=self._raw, stdout=subprocess.PIPE)
        return cast(BufferedReader, self._process.stdout)

    def _begin(self) -> tuple[bytes, bool]:
        """The first lines, and whether they are all. Those that follow are then at hand, or the process has ended."""
        lines = self._start()
        beginning = lines.readline()
        beginning += lines.read(max(0, KEPT_BYTES - len(beginning)))
        if whole := len(beginning) < KEPT_BYTES and not lines.peek(1):
            self._check_end()
        return beginning, whole

    def __enter__(self) -> Workbook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            cast(BufferedReader, self._process.stdout).close()

    @property
    def text(self) -> str:
        """What of it is read, in words."""
        about = self.about
        said = about.header > 1 or about.unnamed
        header = f", whose row {about.header:,} names the columns" if said else ""
        left = [f"sheet {name!r}" for name in about.other_sheets] + [f"column {name}" for name in about.unnamed]
        more = ", …" if len(left) > _SHOWN else ""
        text = f"sheet {about.sheet!r}{header}" + (f"; not read: {', '.join(left[:_SHOWN])}{more}" if left else "")
        for column, count in about.without_result.items():
            lacks = f"column {column!r} has {count:,} formulas whose result the file does not hold"
            text += f"; {lacks}: open it in a spreadsheet program and save it"
        return text

    def lines(self) -> BufferedReader:
        """JSON lines, with the numbers of the rows."""
        return BufferedReader(_Checked(self))

    def read(self, size: int) -> bytes:
        """The next bytes of them; none at the end."""
        if (data := self._beginning.read(size)) or self._whole:
            return data
        if self._process is None:  # the lines that were kept are read
            rest, left = self._start(), self._beginning.tell()
            while left and (again := rest.read1(left)):
                left -= len(again)
        assert self._process is not None
        if not (data := cast(BufferedReader, self._process.stdout).read1(size)):
            self._check_end()
        return data

    def _check_end(self) -> None:
        """Refuse what its process was ended by."""
        assert self._process is not None
        if (code := self._process.wait()) == 0:
            return
        if code > 0:  # it has written why
            raise RuntimeError(f"the process that reads a workbook ended with exit code {code}")
        if code == -signal.SIGXCPU:
            what = f"takes more than {format_duration(sheet.MOST_SECONDS)} to unpack"
        else:
            what = sheet.too_large()
        self._refuse("too_large", what, sheet.AS_CSV)


class _Checked(io.RawIOBase):
    """The lines of a workbook, as a file."""

    def __init__(self, book: Workbook) -> None:
        self._book = book

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed: any writable buffer
        data = self._book.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
