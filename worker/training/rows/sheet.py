"""A workbook as JSON lines: python -m worker.training.rows.sheet PARENT_PID < rows.xlsx

A process of its own, with limits that the kernel keeps: a workbook of a few hundred bytes may stand for gigabytes of
cells, and the library that reads it ends its process where memory is short.

The first line is an object: `About`, or `{"refused": [code, what, hint]}`. Then a line for each row of the sheet, from
its first on, so that lines have the numbers of rows: an object of its cells by the names of their columns, or an empty
line for a row without cells, and for all down to the header.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, time, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, TextIO

from jobs.process.lifeline import tie_to_parent
from jobs.text.units import format_bytes
from worker.training.rows.row import NO_RESULT_CELL
from worker.training.rows.sheet_xml import Range, completed, merged_in

if TYPE_CHECKING:
    from python_calamine import CalamineSheet, CalamineWorkbook

MOST_BYTES, MOST_SECONDS = 2 << 30, 60
"""Of memory, and of processor time."""
_HEAD = 100
"""Rows among which the header is looked for."""
_EXACT = 1 << 53
"""Whole numbers beyond are not exact as cells have them."""

_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
"""In the directory of an OLE file that holds a workbook with a password."""

_NUMBER, _DATE = re.compile(r"[+-]?\d[\d.,]*\s?%?"), re.compile(r"\d{4}-\d\d-\d\d\b|-?\d+:\d\d:\d\d")
_NAMES, _TITLE, _ROWS = 2, 10, 3
"""Rows below the first one that names of columns may have besides; that a title may have; and rows by which texts that
are longer than their name are told."""

Cell = int | float | str | bool | None


@dataclass(frozen=True)
class About:
    """What of a workbook is read."""

    sheet: str
    header: int
    """Row of the header, counted from 1."""
    rows: int
    """Of the sheet, with the header and empty ones."""
    other_sheets: list[str]
    """That are not read."""
    unnamed: list[str]
    """Columns with values and no name in the header, which are not read."""
    without_result: dict[str, int]
    """By column, formulas whose result the file does not hold."""


class Refused(Exception):
    """Code, what is wrong with the workbook, hint."""


AS_CSV = "save the sheet that holds the rows as CSV (UTF-8) in the program that wrote it"


class Sheet:
    """A sheet with a header and rows. `rows` are its rows from its first on."""

    def __init__(self, name: str, left: int, rows: Iterator[list[Cell]], merged: Sequence[Range]) -> None:
        self.name, self._left, self._rows = name, left, rows
        self._head = list(islice(rows, _HEAD))
        filled = sorted(count for row in self._head if (count := _filled(row)))
        self._usual = filled[len(filled) // 2] if filled else 0
        places = (place for place, row in enumerate(self._head) if 2 * _filled(row) > self._usual)
        first = next(places, -1)
        self.header = first if first < 0 else self._names_from(first, merged)
        """Place of the row that names the columns: the first one that fills more than half as many cells as rows
        usually do, or one that `_names_from` finds below it; -1: all are empty."""

    @property
    def has_rows(self) -> bool:
        """Whether there is a row below the header."""
        return self.header >= 0 and any(map(_filled, self._head[self.header + 1 :]))

    def names(self) -> list[str]:
        """Of the columns; empty of those without. Raises Refused."""
        names = ["" if cell is None else str(cell).strip() for cell in self._head[self.header]]
        for place, name in enumerate(names):
            if name and names.index(name) != place:
                what = f"has two columns called {name!r} in sheet {self.name!r}"
                raise Refused("bad_header", what, "rename one of them in the row that names the columns")
        return names

    def _names_from(self, first: int, merged: Sequence[Range]) -> int:
        """`first`, or the row that names the columns where `first` has a title or names of groups: the last that its
        own cells are merged down to; or one below that fills more cells, all of them texts, and is no row itself."""
        down = max((last for (top, _), (last, _) in merged if top == first), default=first)
        if first < down <= first + _NAMES:
            return down
        top = self._head[first]
        grouped = any(row == first and last > column for (row, column), (_, last) in merged)
        doubtful = not all(cell is None or (_may_name(cell) and not str(cell)[0].isdigit()) for cell in top)
        for place in range(first + 1, min(first + 1 + _TITLE, len(self._head))):
            row = self._head[place]
            wider = _filled(row) > _filled(top) or (doubtful and _filled(row) == _filled(top))
            sure = grouped and place == first + 1
            if wider and _filled(row) >= self._usual and self._are_names(place, sure=sure, doubtful=doubtful):
                return place
            doubtful |= not _filled(row) and _filled(top) < self._usual
        return first

    def _are_names(self, place: int, *, sure: bool, doubtful: bool) -> bool:
        """Whether a row is of texts that do not occur below it, and rows below are of another kind: numbers in a
        column, or, where the row above is `doubtful`, texts of other lengths in all; or that is `sure`."""
        row, kinds, lengths, alike = self._head[place], list[bool](), list[bool](), False
        names = [cell for cell in row if cell is not None]
        if not all(map(_may_name, names)) or len(set(names)) < len(names):
            return False
        for column, cell in enumerate(row):
            below = [under[column] for under in self._head[place + 1 :] if under[column] is not None]
            if cell is None or not below:
                continue
            if cell in below:
                return False
            texts = [value for value in below if isinstance(value, str) and not _DATE.match(value)]
            kinds.append(not texts)
            enough, size = doubtful and len(texts) >= _ROWS, len(str(cell))
            longer = enough and all(len(text) >= 2 * size for text in texts)
            shorter = enough and all(2 * len(text) <= size for text in texts)
            lengths.append(longer)
            alike |= bool(texts) and not (longer or shorter)
        return sure or any(kinds) or (any(lengths) and not alike)

    def unnamed(self, names: list[str]) -> list[str]:
        """Letters of the columns with values, but no name."""
        below = self._head[self.header + 1 :]
        return [
            _letters(self._left + place)
            for place, name in enumerate(names)
            if not name and any(row[place] is not None for row in below)
        ]

    def write(self, names: list[str], to: TextIO) -> None:
        """A line for each row."""
        for place, row in enumerate(chain(self._head, self._rows)):
            if place > self.header and _filled(row):
                cells = {name: "" if cell is None else cell for name, cell in zip(names, row, strict=True) if name}
                to.write(json.dumps(cells, ensure_ascii=False))
            to.write("\n")


def too_large() -> str:
    """What is wrong with a workbook that needs more than it may."""
    return f"cannot be unpacked in {format_bytes(MOST_BYTES)} of memory"


def convert(content: bytes, to: TextIO) -> None:
    """Write the first visible sheet that has a header and rows. Raises Refused."""
    import python_calamine as calamine

    try:
        whole = completed(content)
        _convert(calamine.load_workbook(io.BytesIO(whole)), to, merged_in(content), marked=whole is not content)
    except calamine.CalamineError as error:
        if isinstance(error, calamine.PasswordError) or _ENCRYPTED in content:
            hint = "take the password off in the program that wrote it, or " + AS_CSV
            raise Refused("encrypted", "is protected by a password", hint) from None
        raise Refused("damaged_file", f"cannot be read as a workbook: {error}", "copy it again, or " + AS_CSV) from None


def _convert(book: CalamineWorkbook, to: TextIO, merged: Mapping[str, list[Range]], *, marked: bool) -> None:
    """`merged`: by sheet, where the library does not know it; `marked`: there may be formulas without a result."""
    import python_calamine as calamine

    visible = [
        each.name
        for each in book.sheets_metadata
        if each.typ == calamine.SheetTypeEnum.WorkSheet and each.visible == calamine.SheetVisibleEnum.Visible
    ]
    for name in visible:
        cells = book.get_sheet_by_name(name)
        if cells.start is None or cells.end is None:
            continue
        left = cells.start[1]
        ranges = cells.merged_cell_ranges or merged.get(name, [])
        sheet = Sheet(name, left, _rows(cells, left, ranges), ranges)
        if sheet.has_rows:
            names = sheet.names()
            others = [each for each in book.sheet_names if each != name]
            lacking = Counter(
                names[place]
                for row in (cells.iter_rows() if marked else ())
                for place, cell in enumerate(row)
                if cell == NO_RESULT_CELL and names[place]
            )
            about = About(name, sheet.header + 1, cells.end[0] + 1, others, sheet.unnamed(names), dict(lacking))
            to.write(json.dumps(asdict(about)) + "\n")
            sheet.write(names, to)
            return
    raise Refused(
        "no_rows", "has no sheet with rows below a row that names the columns",
        "write the names of the columns, such as input and target, into the first row of the sheet",
    )  # fmt: skip


def _rows(cells: CalamineSheet, left: int, merged: Sequence[Range]) -> Iterator[list[Cell]]:
    """The cells of each row, counted from the first row and the column `left`; those merged downwards all have the
    value."""
    downwards = sorted((first, last) for first, last in merged if last[0] > first[0])
    waiting, open_ranges = deque(downwards), dict[int, tuple[int, Cell]]()
    for number, row in enumerate(cells.iter_rows()):
        values = [_value(cell) for cell in row]
        for column in [column for column, (last, _) in open_ranges.items() if last < number]:
            del open_ranges[column]
        for column, (_, value) in open_ranges.items():
            values[column] = value
        while waiting and waiting[0][0][0] <= number:
            (_, first_column), (last_row, _) = waiting.popleft()
            if 0 <= (column := first_column - left) < len(values):
                open_ranges[column] = last_row, values[column]
        yield values


def _value(cell: object) -> Cell:
    """As it is learned from: whole numbers as such, dates as ISO 8601; None: empty, or an error such as #N/A."""
    match cell:
        case "" | None:
            return None
        case bool() | int() | str():
            return cell
        case float():
            return int(cell) if cell.is_integer() and abs(cell) < _EXACT else cell
        case datetime():
            whole_day = cell.time() == time()
            return cell.date().isoformat() if whole_day else cell.isoformat(" ", "seconds")
        case date() | time():
            return cell.isoformat()
        case timedelta():
            return _duration(cell)
    return str(cell)


def _duration(cell: timedelta) -> str:
    """Such as 26:03:04, as a spreadsheet shows it."""
    seconds, part = divmod(abs(cell) // timedelta(microseconds=1), 1_000_000)
    hours, seconds = divmod(seconds, 3600)
    shown = f"{hours}:{seconds // 60:02}:{seconds % 60:02}" + (f".{part:06}".rstrip("0") if part else "")
    return f"-{shown}" if cell < timedelta() else shown


def _may_name(cell: Cell) -> bool:
    """Whether it is a text, and neither a number nor a date."""
    if not isinstance(cell, str) or cell == NO_RESULT_CELL:
        return False
    return not _NUMBER.fullmatch(cell.strip()) and not _DATE.match(cell)


def _filled(row: list[Cell]) -> int:
    return sum(cell is not None for cell in row)


def _letters(column: int) -> str:
    """What a column is called, counted from 0: A, B, … Z, AA."""
    before, last = divmod(column, 26)
    return (_letters(before - 1) if before else "") + chr(ord("A") + last)


def main(parent_pid: int) -> None:
    """Convert standard input."""
    tie_to_parent(parent_pid)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads on
    limits = {resource.RLIMIT_DATA: MOST_BYTES, resource.RLIMIT_CPU: MOST_SECONDS, resource.RLIMIT_CORE: 0}
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    os.lseek(sys.stdin.fileno(), 0, os.SEEK_SET)
    with open(sys.stdout.fileno(), "w", encoding="utf-8", errors="surrogatepass") as to:
        try:
            convert(sys.stdin.buffer.read(), to)
        except Refused as refused:
            to.write(json.dumps({"refused": refused.args}) + "\n")
        except BaseException as error:  # PanicException, of the library in Rust, is no Exception
            if not isinstance(error, MemoryError) and type(error).__name__ != "PanicException":
                raise
            os.abort()


if __name__ == "__main__":
    main(int(sys.argv[1]))
