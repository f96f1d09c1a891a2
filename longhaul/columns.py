"""Tables: where the terminal is too narrow, ids get short, then columns go, and then texts are folded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GAP, INDENT = 2, 2
FOLDED = 8
"""Characters of a line of a folded text, at least."""
SHORT_ID = 8
"""Digits of an id: those of its second, more or less."""
Row = Mapping[str, str | Text]


@dataclass(frozen=True)
class Column:
    """A column, and what becomes of it where there is no room for all of them."""

    title: str
    right: bool = False
    goes: int = 0
    """Its turn to be left out, from 1; 0: never."""
    folds: int | None = None
    """Folded to as many characters before another column goes."""
    short: Callable[[Sequence[str]], Sequence[str]] | None = None
    """Shorter cells, for where there is no room for all columns."""


def print_table(columns: Sequence[Column], rows: Sequence[Row], console: Console) -> None:
    """One line a row, or more where a text is folded. Where nothing else helps, lines are wider than the terminal."""
    if _total(min(width, each.folds or width) for each, width in _widths(columns, rows)) > console.width:
        rows = _shortened(columns, rows)
    for shown in _choices(columns):
        if _total(min(width, each.folds or width) for each, width in _widths(shown, rows)) <= console.width:
            break
    least = _total(min(width, FOLDED) if each.folds else width for each, width in _widths(shown, rows))
    table = Table(box=None, pad_edge=False, width=least if least > console.width else None)
    spare = console.width - _total(min(width, each.folds or width) for each, width in _widths(shown, rows))
    for each, width in _widths(shown, rows):
        side: Literal["left", "right"] = "right" if each.right else "left"
        if each.folds:  # the first of them gets what is left, or gives what is missing
            folded = min(width, max(FOLDED, each.folds + spare))
            spare -= folded - min(width, each.folds)
            table.add_column(each.title, overflow="fold", justify=side, width=folded)
        else:
            table.add_column(each.title, no_wrap=True, justify=side)
    for row in rows:
        cells = zip(shown, table.columns, strict=True)
        table.add_row(*(_broken(row[each.title], column.width) for each, column in cells))
    console.print(table, crop=False)


def short_ids(ids: Sequence[str]) -> list[str]:
    """Of each the first digits, as many as tell all of them apart, `SHORT_ID` at least."""
    digits = [each.partition("-")[2] for each in ids]
    most = max(map(len, digits), default=0)
    short = next((n for n in range(SHORT_ID, most) if len({each[:n] for each in digits}) == len(digits)), most)
    return [each[:short] for each in digits]


def _shortened(columns: Sequence[Column], rows: Sequence[Row]) -> Sequence[Row]:
    for column in columns:
        if column.short:
            cells = column.short([str(row[column.title]) for row in rows])
            rows = [{**row, column.title: cell} for row, cell in zip(rows, cells, strict=True)]
    return rows


def _broken(cell: str | Text, width: int | None) -> str | Text:
    """A text whose lines are no wider, broken after a space or a mark between words where there is one."""
    if width is None or cell_len(str(cell)) <= width:
        return cell
    lines, rest = [], cell if isinstance(cell, Text) else Text(cell)
    while cell_len(rest.plain) > width:
        fits = next(at for at in range(len(rest), 0, -1) if cell_len(rest.plain[:at]) <= width)
        last = re.match(r".*\s", rest.plain[:fits]) or re.match(r".*[-_./:]", rest.plain[:fits])
        line, rest = rest.divide([last.end() if last else fits])
        lines.append(line)
    return Text("\n").join([*lines, rest])


def print_facts(facts: Sequence[tuple[str, str | Text]], console: Console) -> None:
    """A name and a value in each line. A value wraps between words; one with too long a word starts below its name."""
    label = max((cell_len(name) for name, _ in facts), default=0)
    for name, value in facts:
        text = value if isinstance(value, Text) else Text(value)
        longest = max(map(cell_len, text.plain.split()), default=0)
        if label + GAP + longest <= console.width:
            line = Table.grid(padding=(0, GAP))
            line.add_column(width=label)
            line.add_row(Text(name, style="dim"), text)
            console.print(line)
            continue
        console.print(Text(name, style="dim"))
        whole = INDENT + longest > console.width  # the terminal breaks it, and copies it whole
        console.print(text if whole else Padding(text, (0, 0, 0, INDENT)), soft_wrap=whole)


def width_of(columns: Sequence[Column], rows: Sequence[Row]) -> int:
    """Characters of a line in which nothing is folded."""
    return _total(width for _, width in _widths(columns, rows))


def _choices(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """All columns, then ever fewer."""
    for turn in range(1 + max(each.goes for each in columns)):
        yield [each for each in columns if not 0 < each.goes <= turn]


def _widths(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[tuple[Column, int]]:
    for each in columns:
        yield each, max(map(cell_len, (each.title, *(str(row[each.title]) for row in rows))))


def _total(widths: Iterable[int]) -> int:
    every = list(widths)
    return sum(every) + GAP * (len(every) - 1)
