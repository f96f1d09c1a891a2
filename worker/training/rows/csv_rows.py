"""CSV with a header line; fields are divided by whichever of , ; tab | divides the header into most (.tsv: by tabs).

Quoting is RFC 4180's: a field in double quotes may hold delimiters, newlines and doubled quotes. What does not keep to
it is rejected as "bad CSV", not guessed at. A quote that opens a field by mistake costs its own row and no other: the
lines that it took for part of the field are read again. Where such a row keeps to RFC 4180, `stray_quotes.py` decides.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from jobs.spec import CsvQuoting, DataSpec
from jobs.text.units import format_bytes
from worker.training.rows.lines import BLOCK_BYTES, MAX_LINE_BYTES, Lines, OverLong
from worker.training.rows.row import (
    BAD_CSV,
    DOUBTFUL_QUOTES,
    NOT_UTF8,
    STRAY_QUOTE,
    UNCLOSED_QUOTE,
    Row,
    reencode,
)
from worker.training.rows.sources import RowFile
from worker.training.rows.stray_quotes import QuoteCounts, TableLines
from worker.training.rows.text import list_in

DELIMITERS = ",;\t|"
_HEADER = "the first line names the columns, such as: input,target"
_FIRST_ROWS = 100
"""These rows say whether the table writes a space behind its delimiters."""
_SEP = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)
_SHOWN = 80
_MOST_TEXT = 1000
_AMBIGUOUS = "fields of several lines that could be rows"
_LITERAL = "quotes in a field that does not begin with one, kept as text"
_UNNEEDED = "quotes around a field that does not need them, removed"


@dataclass(frozen=True)
class CsvFormat:
    """What a job says about its tables."""

    lists: bool = False
    """Fields that hold a JSON array of texts are lists."""
    quoting: CsvQuoting = "auto"

    @classmethod
    def of(cls, data: DataSpec) -> CsvFormat:
        """As in the job."""
        return cls(data.csv_lists, data.csv_quoting)


@dataclass(frozen=True)
class Record:
    """One row: its fields, or what is wrong with it and how it begins."""

    number: int
    fields: tuple[str, ...] = ()
    defect: str | None = None
    text: str = ""
    noticed: str | None = None


@dataclass(frozen=True)
class CsvBlock:
    """Consecutive records."""

    file: str
    first: int
    header: tuple[str, ...]
    delimiter: str
    lists: bool
    records: tuple[Record, ...]

    def rows(self) -> Iterator[Row]:
        """The rows."""
        named = _named(self.header)
        for record in self.records:
            if record.defect is not None:
                yield Row(record.number, None, record.defect, record.text)
                continue
            text = self.delimiter.join(record.fields)
            if not named <= len(record.fields) <= len(self.header) or any(record.fields[named:]):
                yield Row(record.number, None, "wrong number of fields", text)
            else:
                columns: dict[str, object] = {
                    name: field for name, field in zip(self.header[:named], record.fields[:named], strict=True) if name
                }
                if self.lists:
                    columns |= {name: items for name, field in columns.items() if (items := list_in(field)) is not None}
                yield Row(record.number, columns, None, text, record.noticed)


class CsvReader:
    """A CSV file. `param` is the dotted key of the job, for errors; `delimiter` None is found out by the header.

    Divided into fields here and not in the block: where a row ends is known only once it has been.
    """

    def __init__(
        self, file: RowFile, param: str, delimiter: str | None = None, format: CsvFormat | None = None
    ) -> None:
        self._format = format or CsvFormat()
        self._lines, self._name, self._delimiter = Lines(file, param), file.name, delimiter
        self._feed: _Feed | None = None
        self.blank_lines = 0

    @property
    def fraction(self) -> float:
        """Share of the file's bytes read so far."""
        return self._lines.fraction * (1.0 if self._feed is None else self._feed.given)

    def blocks(self, size: int) -> Iterator[CsvBlock]:
        """At most `size` rows each, and little more than BLOCK_BYTES.

        Raises BadData as `Lines`, and `bad_header`, `wrong_encoding`.
        """
        # The one limit of the whole process; a record of ours is never longer than that.
        csv.field_size_limit(MAX_LINE_BYTES)
        with closing(iter(self._lines)) as lines:
            self._feed = feed = _Feed(lines)
            if (first_line := self._first_line(feed)) is None:
                return
            delimiter = self._delimiter or _sniff(first_line, self._quoting)
            if (found := _SEP.fullmatch(first_line)) is not None:  # as Excel does
                delimiter = found.group(1)
                next(feed)
                feed.begin_record()
                if (first_line := self._first_line(feed)) is None:
                    return
            reader = csv.reader(feed, delimiter=delimiter, strict=True, quoting=self._quoting)
            header = self._header(_next(reader, feed), delimiter)
            header_lines = list(feed.record)
            held: list[Record] = []
            total = 0
            table = TableLines(delimiter, len(header), ", " in first_line)
            for record in self._records(reader, feed, table, "".join(map(_text, header_lines))):
                held.append(record)
                total += len(record.text) + sum(map(len, record.fields))
                if len(held) >= size or total >= BLOCK_BYTES:
                    yield CsvBlock(self._name, held[0].number, header, delimiter, self._format.lists, tuple(held))
                    held, total = [], 0
            if held:
                yield CsvBlock(self._name, held[0].number, header, delimiter, self._format.lists, tuple(held))

    def _first_line(self, feed: _Feed) -> str | None:
        """The first that is not blank, which is given again; None: there is none."""
        try:
            for line in feed:
                if not line.isspace():
                    feed.push_back(0)
                    return line
                self.blank_lines += 1
                feed.begin_record()
        except _LineTooLong:
            limit = format_bytes(MAX_LINE_BYTES)
            self._refuse_header(f"has no header: line {feed.number} is longer than {limit}", _HEADER)
        return None

    @property
    def _quoting(self) -> Literal[0, 3]:
        return csv.QUOTE_NONE if self._format.quoting == "none" else csv.QUOTE_MINIMAL

    def _records(self, reader: Iterator[list[str]], feed: _Feed, table: TableLines, header: str) -> Iterator[Record]:
        auto, quotes = self._format.quoting == "auto", self._format.quoting != "none"
        everywhere = table.is_quoted(header)  # each field so far is in quotes
        so_far = QuoteCounts(quoted=int(everywhere))
        looked_at, surveyed, counts = 0, 0, so_far
        while (record := _next(reader, feed)) is not None:
            if not record.fields and record.defect is None:
                self.blank_lines += 1
                continue
            if not (quotes and any(b'"' in line for line in feed.record)):
                so_far.count("plain", feed.record_bytes)
                everywhere = False
            else:
                lines = [_text(line) for line in feed.record]
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

    def _header(self, record: Record | None, delimiter: str) -> tuple[str, ...]:
        """Names of the columns, white space around them removed."""
        assert record is not None  # there is a line that is not blank
        if record.defect == NOT_UTF8:
            self._lines.refuse("wrong_encoding", f"is not UTF-8 (line {record.number})", reencode(self._name))
        if record.defect is not None:
            if "\r" in record.text:
                what, hint = "has lines that end in CR alone", f"tr '\\r' '\\n' < {self._name} > rows.csv"
            else:
                what, hint = f"has a header line that is no CSV: {record.text[:_SHOWN]!r}", _HEADER
            self._refuse_header(what, hint)
        names = tuple(field.strip() for field in record.fields)
        if not (named := _named(names)):
            self._refuse_header(f"names no column in its header (line {record.number})", _HEADER)
        for place, name in enumerate(names[:named], start=1):
            # The first may go without: pandas writes its row numbers so. No template can name it.
            if not name and place > 1:
                self._refuse_header(
                    f"has no name for column {place} of {len(names)} in its header (line {record.number}: "
                    f"{delimiter.join(names)[:_SHOWN]!r})",
                    "the first line names every column (the first alone may go without a name, and is then left out)",
                )
            if names.index(name) + 1 != place:
                self._refuse_header(f"has two columns called {name!r}", "rename one of them in the header line")
        return names

    def _refuse_header(self, what: str, hint: str) -> NoReturn:
        self._lines.refuse("bad_header", what, hint)


class _LineTooLong(Exception):
    """Its message is the beginning of the line."""


class _NotClosed(Exception):
    """A quote that is not closed within MAX_LINE_BYTES."""


class _Feed:
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

    @property
    def given(self) -> float:
        """Share of the bytes read that were handed out."""
        return self._given / max(1, self._given + sum(map(len, self._pushed_back)))

    def __iter__(self) -> _Feed:
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
            raise _LineTooLong(line.decode("utf-8", "replace"))
        self.number += 1
        self._given += len(line)
        self.record.append(line)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.damaged = True
            return _text(line)

    def push_back(self, place: int) -> None:
        """The lines of the current record from `place` on come next."""
        again = self.record[place:]
        self._pushed_back.extendleft(reversed(again))
        self.number -= len(again)
        self._given -= sum(map(len, again))
        del self.record[place:]
        self.record_bytes = sum(map(len, self.record))

    def peek(self) -> list[bytes]:
        """The lines of the next BLOCK_BYTES, without consuming them."""
        held = sum(map(len, self._pushed_back))
        while held < BLOCK_BYTES and (line := next(self._source, b"")):
            self._pushed_back.append(line)
            held += len(line)
        return list(self._pushed_back)


def _next(reader: Iterator[list[str]], feed: _Feed) -> Record | None:
    """The next record by the rules of CSV, a blank line too; None at the end."""
    feed.begin_record()
    number = feed.number + 1
    fields: tuple[str, ...] = ()
    try:
        fields = tuple(next(reader))
        if not feed.damaged:
            return Record(number, fields)
        defect = NOT_UTF8
    except StopIteration:
        return None
    except _LineTooLong as error:
        return Record(number, (), "over-long line", str(error))
    except _NotClosed:
        defect = UNCLOSED_QUOTE
    except csv.Error:  # the reader starts over with the next line
        defect = UNCLOSED_QUOTE if feed.ended else BAD_CSV
    text = ""
    for line in feed.record:
        text += _text(line)
        if len(text) > _MOST_TEXT:
            break
    return Record(number, fields, defect, text)


def _begin_again(record: Record, feed: _Feed, place: int | None) -> Record:
    """The first line of a record as a defect; rows follow from `place` of its lines on (None: it is one defect)."""
    if place is None:
        return record
    readings, first = _readings(record.number, feed.number, place), _text(feed.record[0]).rstrip()
    feed.push_back(place)
    return Record(record.number, (), STRAY_QUOTE, f"{first[:_SHOWN]} {readings}")


def _in_doubt(record: Record, lines: list[str]) -> Iterator[Record]:
    """Each line of a record as a defect."""
    readings = _readings(record.number, record.number + len(lines) - 1, 1)
    for number, line in enumerate(lines, start=record.number):
        if not line.isspace():
            text = line.rstrip()[:_MOST_TEXT]
            if number == record.number:
                text = f"{text[:_SHOWN]} {readings}"
            yield Record(number, (), DOUBTFUL_QUOTES, text)


def _readings(first: int, last: int, place: int) -> str:
    return (
        f"(as one row it takes lines {first} to {last}; as rows of their own, the next begins on line {first + place})"
    )


def _survey(lines: list[bytes], table: TableLines) -> QuoteCounts:
    """How the records in these lines use quotes; a last one that wants more lines is left out."""
    feed, found = _Feed(iter(lines)), QuoteCounts()
    reader = csv.reader(feed, delimiter=table.delimiter, strict=True)
    while (record := _next(reader, feed)) is not None and not feed.ended:
        if not any(b'"' in line for line in feed.record):
            if record.fields:
                found.count("plain", feed.record_bytes)
            continue
        text = [_text(line) for line in feed.record]
        found.count(table.kind(text, record.fields), feed.record_bytes)
        if not record.fields and (place := table.where_rows_go_on(text)) is not None:
            feed.push_back(place)
    return found


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


def _named(header: tuple[str, ...]) -> int:
    """Columns up to the last that has a name: Excel writes delimiters for empty ones behind, and not in every line."""
    return max((place for place, name in enumerate(header, start=1) if name), default=0)


def _sniff(line: str, quoting: Literal[0, 3]) -> str:
    """The delimiter that gives the line most fields; the first of DELIMITERS among equals."""
    line = line.partition("\r")[0]  # where lines end in CR alone, that is for others to say
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([line], delimiter=delimiter, quoting=quoting))))
