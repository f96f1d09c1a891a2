"""A tail of a JSON-lines file: whole new lines since the last look, by byte offset."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

Row = TypeVar("Row", bound=BaseModel)


class Tail(Generic[Row]):
    """Remembers how far it has read; a look without news costs one stat."""

    def __init__(self, file: Path, kind: type[Row], offset: int = 0) -> None:
        self._file = file
        self._kind = kind
        self.offset = offset
        """Bytes taken: always the end of a whole line."""

    def read(self) -> list[Row]:
        """Rows of the whole lines written since; none while there is no file."""
        try:
            size = self._file.stat().st_size
        except FileNotFoundError:
            return []
        if size < self.offset:
            # A torn last line is cut by the next writer, but what was read here were whole lines. So this is another
            # file (copied back by hand, say): its rows are new to us.
            self.offset = 0
        if size == self.offset:
            return []
        with open(self._file, "rb") as file:
            file.seek(self.offset)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        rows = [self._kind.model_validate_json(line) for line in whole.split(b"\n")[:-1]]
        self.offset += len(whole)
        return rows
