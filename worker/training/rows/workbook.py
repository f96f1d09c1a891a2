"""A workbook (Excel, OpenDocument), read as the JSON lines that `sheet.py` makes of it in a process of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from io import BufferedReader

from jobs.text.units import format_duration
from worker.training.rows import sheet
from worker.training.rows.sources import Refuse

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""How workbooks of Excel 97 begin, and those with a password."""
_SHOWN = 5


class Workbook:
    """An open workbook. `raw`: a file of the system; `refuse` raises BadData about it.

    Raises BadData: `encrypted`, `damaged_file`, `no_rows`, `bad_header`, `too_large`.
    """

    def __init__(self, raw: BufferedReader, refuse: Refuse) -> None:
        self._refuse = refuse
        command = [sys.executable, "-m", sheet.__name__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=raw, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        try:
            first = json.loads(self._lines.readline() or "null")
            if first is None:
                self._check_end()
            if "refused" in first:
                refuse(*first["refused"])
            self.about = sheet.About(**first)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workbook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()
        self._lines.close()

    @property
    def text(self) -> str:
        """What of it is read, in words."""
        about = self.about
        header = "" if about.header == 1 else f", whose row {about.header:,} names the columns"
        left = [f"sheet {name!r}" for name in about.other_sheets] + [f"column {name}" for name in about.unnamed]
        more = ", …" if len(left) > _SHOWN else ""
        return f"sheet {about.sheet!r}{header}" + (f"; not read: {', '.join(left[:_SHOWN])}{more}" if left else "")

    def lines(self) -> BufferedReader:
        """JSON lines, with the numbers of the rows."""
        return BufferedReader(_Checked(self))

    def read(self, size: int) -> bytes:
        """The next bytes of them; none at the end."""
        data = self._lines.read1(size)  # type: ignore[attr-defined]  # typeshed: of a pipe, which is buffered
        if not data:
            self._check_end()
        return bytes(data)

    def _check_end(self) -> None:
        """Refuse what its process was ended by."""
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
