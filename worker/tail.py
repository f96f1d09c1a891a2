"""A tail of a JSON-lines file: whole new lines since the last look, also when it was replaced or cut meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from jobs.disk.files import START, FilePosition, regular

Row = TypeVar("Row", bound=BaseModel)


class Tail(Generic[Row]):
    """Remembers how far it has read; a look without news costs one stat."""

    def __init__(self, file: Path, parse: Callable[[bytes], Row | None], place: FilePosition = START) -> None:
        self._file = file
        self._parse = parse
        self._state = (0, 0, 0)
        self.place = place
        """Behind the last row that was read."""

    def read(self) -> list[Row]:
        """Rows of the whole lines written since, without those that `parse` takes for none; none without a file.

        All rows, where those that were read are not all there any more: the caller knows which of them are new.
        """
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return []
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if state == self._state:
            return []
        with open(self._file, "rb", opener=regular) as file:
            place = self.place.found_in(file)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        rows = [row for line in whole.split(b"\n")[:-1] if (row := self._parse(line)) is not None]
        self.place = place.after(whole) if whole else place
        self._state = state
        return rows
