"""JSON lines: one JSON object a line; all of them in one JSON array; or the rows of a sheet, made into such lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from worker.training.rows.lines import BLOCK_BYTES, Lines, OverLong
from worker.training.rows.row import NOT_UTF8, Row
from worker.training.rows.sources import RowFile
from worker.training.rows.windows_1252 import WINDOWS_1252, Recoded


@dataclass(frozen=True)
class JsonBlock:
    """Consecutive lines, blank ones included; or items of an array."""

    file: str
    first: int
    lines: tuple[bytes, ...]

    def rows(self) -> Iterator[Row]:
        """The rows, blank lines left out."""
        for number, line in enumerate(self.lines, start=self.first):
            if isinstance(line, OverLong):
                yield Row(number, None, "over-long line", line.decode("utf-8", "replace"))
            elif not line.isspace():
                yield _row(number, line)


class JsonReader:
    """A file of JSON lines, or a JSON array. `param` is the dotted key of the job, for errors."""

    def __init__(self, file: RowFile, param: str) -> None:
        self._lines, self._name = Lines(file, param, json=True), file.name
        self.blank_lines = 0

    @property
    def fraction(self) -> float:
        """Share of the file's bytes read so far."""
        return self._lines.fraction

    @property
    def reading(self) -> str | None:
        """As of Lines."""
        return self._lines.reading

    def blocks(self, size: int) -> Iterator[JsonBlock]:
        """At most `size` lines or items each, and little more than BLOCK_BYTES. Raises BadData as `Lines`."""
        held: list[bytes] = []
        total = 0
        with closing(iter(self._lines)) as lines:
            for line in lines:
                if line.isspace():
                    self.blank_lines += 1
                held.append(line)
                total += len(line)
                if len(held) >= size or total >= BLOCK_BYTES:
                    yield self._block(held)
                    held, total = [], 0
        if held:
            yield self._block(held)

    def _block(self, lines: list[bytes]) -> JsonBlock:
        return JsonBlock(self._name, self._lines.number - len(lines) + 1, tuple(lines))


def _row(number: int, line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return Row(number, None, NOT_UTF8, line.decode("utf-8", "backslashreplace"))
    try:
        columns: Any = json.loads(text)  # NaN too, as pandas writes it: a missing value
    except (ValueError, RecursionError):
        return Row(number, None, "bad JSON", text)
    if not isinstance(columns, dict):
        return Row(number, None, "not a JSON object", text)
    return Row(number, columns, None, text, WINDOWS_1252 if isinstance(line, Recoded) else None)
