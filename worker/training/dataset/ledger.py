"""Files that grow together, by appending; only what was committed survives a kill.

The log has one line per commit: how large each file was then, and a note. After a kill, the next process cuts the files
back to the last line, and continues. A file that is smaller than its last line says means that the disk lost something:
then everything starts over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from jobs.disk.files import sync_folder, whole_lines


class Ledger:
    """The files `names` of a folder, opened for appending. `notes`: those of earlier commits, in order."""

    def __init__(self, folder: Path, log: str, names: Sequence[str]) -> None:
        lines = _committed(folder, log, names)
        last = json.loads(lines[-1])["sizes"] if lines else {}
        self.sizes: dict[str, int] = {name: last.get(name, 0) for name in names}
        """Bytes in each file, those not committed yet included."""
        self.notes: list[Any] = [json.loads(line)["note"] for line in lines]
        self._files: dict[str, IO[bytes]] = {name: open(folder / name, "ab") for name in names}  # noqa: SIM115 - see close
        self._log = open(folder / log, "ab")  # noqa: SIM115
        for name, file in self._files.items():
            file.truncate(self.sizes[name])
        self._log.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            sync_folder(folder)

    def append(self, name: str, content: bytes) -> None:
        """Write at the end of one file."""
        self._files[name].write(content)
        self.sizes[name] += len(content)

    def commit(self, note: Mapping[str, Any]) -> None:
        """Make everything appended so far permanent: files first, then the line of the log."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._log.write(json.dumps({"sizes": self.sizes, "note": note}).encode() + b"\n")
        self._log.flush()
        os.fsync(self._log.fileno())

    def close(self) -> None:
        """Close the files; buffered data is written first. May be called twice."""
        with ExitStack() as stack:
            for file in (*self._files.values(), self._log):
                stack.callback(file.close)


def _committed(folder: Path, log: str, names: Sequence[str]) -> list[bytes]:
    """The lines of the log; none if there is no log that fits these files."""
    try:
        lines = whole_lines((folder / log).read_bytes())
        sizes = [json.loads(line)["sizes"] for line in lines][-1]
        complete = all((folder / name).stat().st_size >= sizes[name] for name in names)
    except (FileNotFoundError, ValueError, LookupError):
        return []
    return lines if complete else []
