"""A quote that opens a field of a table by mistake makes the lines behind it part of that field, up to the next quote.

Whether that happened to a row of several lines cannot be seen in the row alone. A text with line breaks has
delimiters here and there; lines that are rows have one less than the table has columns, and so do the row's first line
and its last: those of a table *inside* a field mostly have not. A row that could be several is decided by the table
(`QuoteCounts`): by all records before it and by those of the next MiB. Where fields of several lines are the rule it is
kept whole; where it is a rare exception its lines are rows. Anything between is rejected, line by line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_ALIKE = 0.95
"""Share of the lines between a row's first and its last that read as rows, where it could be several."""
_FEW = 2
"""Pairs of stray quotes that happen to keep to RFC 4180 in one table: of more, some would have broken it."""
_RARE = 20
"""Rows of a single line for each row that could be several, where such a row is an exception."""
_BROKEN = 10
"""Rows with quotes that keep to RFC 4180 for each that breaks it, where a table keeps to it."""
_CHANCE = 1e-3
Kind = Literal["plain", "quoted", "long", "doubtful", "broken"]


@dataclass
class QuoteCounts:
    """How the records of a table use quotes, as read by RFC 4180."""

    plain: int = 0
    """On one line, with no field that needs quotes."""
    plain_characters: int = 0
    quoted: int = 0
    """On one line, with fields that need their quotes, or with quotes around every field."""
    long: int = 0
    """Of several lines that do not read as rows."""
    doubtful: int = 0
    """Of several lines that could be rows."""
    broken: int = 0
    """With quotes that RFC 4180 forbids."""

    def count(self, kind: Kind, characters: int) -> None:
        """One record more, of so many characters."""
        vars(self)[kind] += 1
        if kind == "plain":
            self.plain_characters += characters

    def __add__(self, later: QuoteCounts) -> QuoteCounts:
        return QuoteCounts(*(mine + its for mine, its in zip(vars(self).values(), vars(later).values(), strict=True)))

    def reading(self, lines: Sequence[str]) -> Literal["whole", "rows", "undecided"]:
        """What the lines of a record are that could be rows; the record itself is among those counted."""
        several = self.long + self.doubtful
        if _BROKEN * self.broken <= several + self.quoted:
            others = several + self.quoted - 1
            unquoted = sum('"' not in line for line in lines)
            if (
                self.doubtful > _FEW
                or (self.long > _FEW and _RARE * self.long >= self.plain)
                or (others and (self.plain / (self.plain + others)) ** max(1, unquoted) < _CHANCE)  # rows have quotes
            ):
                return "whole"
        elif self.broken >= self.doubtful:
            return "rows"
        exception = self.doubtful <= _FEW and self.plain >= _RARE * several
        mean, usual = sum(map(len, lines)) / len(lines), self.plain_characters / max(1, self.plain)
        return "rows" if exception and usual / 2 <= mean <= 2 * usual else "undecided"


class TableLines:
    """What a row of a table looks like on a line of its own.

    `spaced`: whether this table writes spaces behind delimiters; where it does not, they are a text's own commas.
    """

    def __init__(self, delimiter: str, columns: int, spaced: bool) -> None:
        self.delimiter, self.columns, self.spaced = delimiter, columns, spaced
        self.last_blank = False
        """Whether the last field of a row may be empty; where it never is, a line that ends with a delimiter is no
        row."""
        mark, quoted = re.escape(delimiter), r'"[^"]*(?:""[^"]*)*"'
        self._all_quoted = re.compile(rf"{quoted}(?:{mark}{quoted})*")
        either = rf'(?:{quoted}|[^"\r\n{mark}]*)'
        self._legal = re.compile(rf"{either}(?:{mark}{either})*")

    def kind(self, lines: Sequence[str], fields: Sequence[str]) -> Kind:
        """Of a record with quotes; `fields` are none where it is no CSV."""
        if fields and len(lines) > 1 and self.could_be_rows(lines, len(fields)):
            return "doubtful"
        text = "".join(lines).rstrip("\r\n")
        if not fields or not self._legal.fullmatch(text):
            return "broken"
        if len(lines) > 1:
            return "long"
        return "quoted" if self.needs_quotes(text, len(fields)) or self.is_quoted(text) else "plain"

    def needs_quotes(self, line: str, fields: int) -> bool:
        """Whether a record on one line, divided into so many fields, would be another without its quotes."""
        return '""' in line or line.count(self.delimiter) != fields - 1

    def is_quoted(self, line: str) -> bool:
        """Whether there are quotes around every field of a record on one line."""
        return self._all_quoted.fullmatch(line.rstrip("\r\n")) is not None

    def begins_row(self, line: str) -> bool:
        """Whether a row may begin with this line: it has all fields, or a quote that is open at its end."""
        reader = csv.reader([line, '"'], delimiter=self.delimiter)
        try:
            fields = next(reader, [])
        except csv.Error:
            return False
        if reader.line_num > 1:
            return len(fields) <= self.columns
        return len(fields) == self.columns and self._unspaced(fields)

    def where_rows_go_on(self, lines: Sequence[str]) -> int | None:
        """Place, in the lines of a row that is no CSV, of the first line that may begin another; None: of none."""
        return next((place for place, line in enumerate(lines) if place and self._may_begin_row(line)), None)

    def could_be_rows(self, lines: Sequence[str], fields: int) -> bool:
        """Whether the lines of a record that was divided into so many fields read as rows of their own."""
        inner = len(lines) - 2
        alike = sum(map(self._is_row, lines[1:-1]))
        last_too = self._ends_a_row(lines[-1]) or self.begins_row(lines[-1])
        if fields != self.columns:  # it cannot be used in any case
            return 2 * (alike + last_too) >= len(lines) - 1
        return self.columns > 1 and alike >= _ALIKE * inner and last_too and self._begins_as_row(lines[0])

    def _may_begin_row(self, line: str) -> bool:
        return self.begins_row(line) or self._is_row(line)

    def _is_row(self, line: str) -> bool:
        """Whether it reads as a row, if the quotes around it mean nothing."""
        return self._are_cells(line.rstrip("\r\n").split(self.delimiter))

    def _begins_as_row(self, line: str) -> bool:
        """The same of a line at whose end a quote is open."""
        *before, open_field = next(csv.reader([line, '"'], delimiter=self.delimiter))
        return self._are_cells([*before, *open_field.rstrip("\r\n").split(self.delimiter)])

    def _ends_a_row(self, line: str) -> bool:
        """The same of a line at whose beginning a quote is open."""
        open_field, *behind = next(csv.reader(['"' + line], delimiter=self.delimiter))
        return self._are_cells([*open_field.split(self.delimiter), *behind])

    def _are_cells(self, cells: Sequence[str]) -> bool:
        return len(cells) == self.columns and (self.last_blank or bool(cells[-1].strip())) and self._unspaced(cells)

    def _unspaced(self, fields: Sequence[str]) -> bool:
        return self.spaced or not any(field[:1] == " " for field in fields[1:])
