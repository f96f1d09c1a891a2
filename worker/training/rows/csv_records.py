"""The records of a CSV file: its lines, joined by RFC 4180; quotes that break it are detected.

A quote that opens a field by mistake costs its own record and no other: the lines that it took for part of the field
are read again. Where such a record keeps to RFC 4180, `stray_quotes.py` decides.
"""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jobs.spec import CsvQuoting
from worker.training.rows.lines import BLOCK_BYTES, MAX_LINE_BYTES, OverLong
from worker.training.rows.row import BAD_CSV, DOUBTFUL_QUOTES, NOT_UTF8, STRAY_QUOTE, UNCLOSED_QUOTE
from worker.training.rows.stray_quotes import QuoteCounts, TableLines
from worker.training.rows.windows_1252 import WINDOWS_1252, Recoded

SHOWN = 80
"""Characters of a line in a message."""
_FIRST_ROWS = 100
"""Rows that decide whether the table writes a space after its delimiters."""
_MOST_TEXT = 1000
_AMBIGUOUS = "fields of several lines that could be rows"
_LITERAL = "quotes in a field that does not begin with one, kept as text"
_UNNEEDED = "quotes around a field that does not need them, removed"


@dataclass(frozen=True)
class Record:
    """One row: its fields, or what is wrong with it and how it begins."""

    number: int
    fields: tuple[str, ...] = ()
    defect: str | None = None
    text: str = ""
    noticed: str | None = None

    @property
    def blank(self) -> bool:
        """Whether it is an empty line."""
        return not self.fields and self.defect is None


class LineTooLong(Exception):
    """Its message is the beginning of the line."""


class _NotClosed(Exception):
    """A quote that is not closed within MAX_LINE_BYTES."""


class CsvLines:
    """The lines as text, one by one, for csv.reader; keeps those of the current record, and can hand them out again."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._pushed_back: deque[bytes] = deque()
        self.number = 0
        """Of the line that was handed out last."""
        self._given = 0
        self.begin_record()

    def begin_record(self) -> None:
        """Forget the lines of the last record."""
        self.record: list[bytes] = []
        self.record_bytes = 0
        self.damaged = self.ended = False  # a line is not UTF-8; the record wants more lines than there are
        self.recoded = False  # a line was in another encoding

    @property
    def given(self) -> float:
        """Share of the bytes read that were handed out."""
        return self._given / max(1, self._given + sum(map(len, self._pushed_back)))

    def __iter__(self) -> CsvLines:
        return self

    def __next__(self) -> str:
        line = self._pushed_back.popleft() if self._pushed_back else next(self._source, b"")
        if not line:
            self.ended = True
            raise StopIteration
        self.record_bytes += len(line)
        if isinstance(line, OverLong) or self.record_bytes > MAX_LINE_BYTES:
            if self.record:
                self._pushed_back.appendleft(line)
                raise _NotClosed
            self.number += 1
            raise LineTooLong(line.decode("utf-8", "replace"))
        self.number += 1
        self._given += len(line)
        self.record.append(line)
        self.recoded |= isinstance(line, Recoded)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.damaged = True
            return decoded(line)

    def push_back(self, place: int) -> None:
        """The lines of the current record from `place` on come next."""
        again = self.record[place:]
        self._pushed_back.extendleft(reversed(again))
        self.number -= len(again)
        self._given -= sum(map(len, again))
        del self.record[place:]
        self.record_bytes = sum(map(len, self.record))

    def peek(self, lines: float = math.inf) -> list[bytes]:
        """The lines of the next BLOCK_BYTES, and no more than so many, without consuming them."""
        held = sum(map(len, self._pushed_back))
        while held < BLOCK_BYTES and len(self._pushed_back) < lines and (line := next(self._source, b"")):
            self._pushed_back.append(line)
            held += len(line)
        return list(self._pushed_back)


def next_record(reader: Iterator[list[str]], feed: CsvLines) -> Record | None:
    """The next record by the rules of CSV, which may be a blank line; None at the end."""
    feed.begin_record()
    number = feed.number + 1
    fields: tuple[str, ...] = ()
    try:
        fields = tuple(next(reader))
        if not feed.damaged:
            return Record(number, fields, noticed=WINDOWS_1252 if feed.recoded else None)
        defect = NOT_UTF8
    except StopIteration:
        return None
    except LineTooLong as error:
        return Record(number, (), "over-long line", str(error))
    except _NotClosed:
        defect = UNCLOSED_QUOTE
    except csv.Error:  # the reader starts over with the next line
        defect = UNCLOSED_QUOTE if feed.ended else BAD_CSV
    text = ""
    for line in feed.record:
        text += decoded(line)
        if len(text) > _MOST_TEXT:
            break
    return Record(number, fields, defect, text)


def read_records(
    reader: Iterator[list[str]], feed: CsvLines, table: TableLines, header: str, quoting: CsvQuoting
) -> Iterator[Record]:
    """The records behind the header line, blank lines too, with their quotes decided as the job says.

    `reader` reads from `feed`; `header`: the lines of the header.
    """
    auto, quotes = quoting == "auto", quoting != "none"
    everywhere = table.is_quoted(header)  # each field so far is in quotes
    so_far = QuoteCounts(quoted=int(everywhere))
    looked_at, surveyed, counts = 0, 0, so_far
    while (record := next_record(reader, feed)) is not None:
        if record.blank:
            yield record
            continue
        if not (quotes and any(b'"' in line for line in feed.record)):
            so_far.count("plain", feed.record_bytes)
            everywhere = False
        else:
            lines = [decoded(line) for line in feed.record]
            kind = table.kind(lines, record.fields)
            if auto and kind == "doubtful" and feed.number > surveyed:
                ahead = feed.peek()
                surveyed = feed.number + len(ahead)
                counts = so_far + _survey([*feed.record, *ahead], table)
            so_far.count(kind, feed.record_bytes)
            if not record.fields and len(lines) > 1:
                record = _begin_again(record, feed, table.where_rows_go_on(lines))
            elif auto and kind == "doubtful":
                if (reading := counts.reading(lines)) == "undecided":
                    yield from _in_doubt(record, lines)
                    continue
                whole = reading == "whole"
                record = replace(record, noticed=_AMBIGUOUS) if whole else _begin_again(record, feed, 1)
            elif kind == "broken" and record.fields:
                record = replace(record, noticed=_LITERAL)
            elif len(lines) == 1:
                everywhere &= table.is_quoted(lines[0])
                if not everywhere and not table.needs_quotes(lines[0], len(record.fields)):
                    record = replace(record, noticed=_UNNEEDED)
        if looked_at < _FIRST_ROWS:
            looked_at += 1
            table.spaced |= any(field[:1] == " " for field in record.fields[1:])
            table.last_blank |= len(record.fields) == table.columns and not record.fields[-1].strip()
        yield record


def _begin_again(record: Record, feed: CsvLines, place: int | None) -> Record:
    """The first line of a record as a defect; rows follow from `place` of its lines on (None: it is one defect)."""
    if place is None:
        return record
    readings, first = _readings(record.number, feed.number, place), decoded(feed.record[0]).rstrip()
    feed.push_back(place)
    return Record(record.number, (), STRAY_QUOTE, f"{first[:SHOWN]} {readings}")


def _in_doubt(record: Record, lines: list[str]) -> Iterator[Record]:
    """Each line of a record as a defect."""
    readings = _readings(record.number, record.number + len(lines) - 1, 1)
    for number, line in enumerate(lines, start=record.number):
        if not line.isspace():
            text = line.rstrip()[:_MOST_TEXT]
            if number == record.number:
                text = f"{text[:SHOWN]} {readings}"
            yield Record(number, (), DOUBTFUL_QUOTES, text)


def _readings(first: int, last: int, place: int) -> str:
    return (
        f"(as one row it takes lines {first} to {last}; as rows of their own, the next begins on line {first + place})"
    )


def _survey(lines: list[bytes], table: TableLines) -> QuoteCounts:
    """How the records in these lines use quotes; a last one that wants more lines is left out."""
    feed, found = CsvLines(iter(lines)), QuoteCounts()
    reader = csv.reader(feed, delimiter=table.delimiter, strict=True)
    while (record := next_record(reader, feed)) is not None and not feed.ended:
        if not any(b'"' in line for line in feed.record):
            if record.fields:
                found.count("plain", feed.record_bytes)
            continue
        text = [decoded(line) for line in feed.record]
        found.count(table.kind(text, record.fields), feed.record_bytes)
        if not record.fields and (place := table.where_rows_go_on(text)) is not None:
            feed.push_back(place)
    return found


def decoded(line: bytes) -> str:
    """The line as text; bytes that are not UTF-8 as `\\x…`."""
    return line.decode("utf-8", "backslashreplace")
