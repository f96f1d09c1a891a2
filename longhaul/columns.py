"""Tables that cut no cell: where the terminal is too narrow, columns go, and then texts are folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
FOLDED = 8
"""Characters of a line of a folded text, at least."""
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


def print_table(columns: Sequence[Column], rows: Sequence[Row], console: Console) -> None:
    """One line a row, or more where a text is folded. Where nothing else helps, lines are wider than the terminal."""
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
        table.add_row(*(row[each.title] for each in shown))
    console.print(table, crop=False)


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
