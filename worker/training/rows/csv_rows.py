"""CSV with a header line; fields are divided by whichever of , ; tab | divides the header into most, and the lines
behind it into as many (.tsv: by tabs).

Quoting is RFC 4180's: a field in double quotes may hold delimiters, newlines and doubled quotes. What does not keep to
it is rejected as "bad CSV", not guessed at.
"""

from __future__ import annotations

import csv
import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
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
    end_in_lf,
    reencode,
)
from worker.training.rows.sources import RowFile
from worker.training.rows.text import list_in
from worker.training.rows.windows_1252 import WINDOWS_1252, Recoded

# -- stray quotes ------------------------------------------------------------------------------------------------------
# A quote that opens a field of a table by mistake makes the lines behind it part of that field, up to the next quote.
#
# Whether that happened to a row of several lines cannot be seen in the row alone. A text with line breaks has
# delimiters here and there; lines that are rows have one less than the table has columns, and so do the row's first
# line and its last: those of a table *inside* a field mostly have not. A row that could be several is decided by the
# table (`QuoteCounts`): by all records before it and by those of the next MiB. Where fields of several lines are the
# rule it is kept whole; where it is a rare exception its lines are rows. Anything between is rejected, line by line.

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


# -- csv records -------------------------------------------------------------------------------------------------------
# The records of a CSV file: its lines, joined by RFC 4180; quotes that break it are detected.
#
# A quote that opens a field by mistake costs its own record and no other: the lines that it took for part of the field
# are read again. Where such a record keeps to RFC 4180, what is said of stray quotes decides.

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
        """Whether it is an empty line, or one of delimiters alone, as Excel leaves them below a table."""
        return self.defect is None and not any(map(str.strip, self.fields))


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
            if not record.blank:
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


# -- csv rows ----------------------------------------------------------------------------------------------------------

DELIMITERS = ",;\t|"
_LOOKED_AT = 50
"""Lines by which the delimiter is told."""
HEADER_AGAIN = "the header again"
"""Why a row is rejected that another file began with, where somebody joined the two."""
_HEADER = "the first line names the columns, such as: input,target"
_JSON = re.compile(r'\s*(?:\{\s*"|\[\s*\{|[\[{]\s*$)')
_SEP = re.compile(r'"?sep=([^\r\n])"?\s*', re.IGNORECASE)


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
            if tuple(map(str.strip, record.fields)) == self.header:
                yield Row(record.number, None, HEADER_AGAIN, text)
            elif not named <= len(record.fields) <= len(self.header) or any(record.fields[named:]):
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
        self._feed: CsvLines | None = None
        self.blank_lines = 0

    @property
    def fraction(self) -> float:
        """Share of the file's bytes read so far."""
        return self._lines.fraction * (1.0 if self._feed is None else self._feed.given)

    @property
    def reading(self) -> str | None:
        """As of Lines."""
        return self._lines.reading

    def blocks(self, size: int) -> Iterator[CsvBlock]:
        """At most `size` rows each, and little more than BLOCK_BYTES.

        Raises BadData as `Lines`, and `bad_header`, `wrong_encoding`.
        """
        # The one limit of the whole process; a record of ours is never longer than that.
        csv.field_size_limit(MAX_LINE_BYTES)
        with closing(iter(self._lines)) as lines:
            self._feed = feed = CsvLines(lines)
            if (first_line := self._first_line(feed)) is None:
                return
            if _JSON.match(first_line):
                self._reject_header("holds JSON, whatever its name says", "end its name in .jsonl, or set data.format")
            delimiter = self._delimiter or _sniff(first_line, feed.peek(_LOOKED_AT), self._quoting)
            if (found := _SEP.fullmatch(first_line)) is not None:  # as Excel does
                delimiter = found.group(1)
                next(feed)
                feed.begin_record()
                if (first_line := self._first_line(feed)) is None:
                    return
            reader = csv.reader(feed, delimiter=delimiter, strict=True, quoting=self._quoting)
            header = self._header(next_record(reader, feed), delimiter)
            header_lines = list(feed.record)
            held: list[Record] = []
            total = 0
            table = TableLines(delimiter, len(header), ", " in first_line)
            for record in read_records(reader, feed, table, "".join(map(decoded, header_lines)), self._format.quoting):
                if record.blank:
                    self.blank_lines += 1
                    continue
                held.append(record)
                total += len(record.text) + sum(map(len, record.fields))
                if len(held) >= size or total >= BLOCK_BYTES:
                    yield CsvBlock(self._name, held[0].number, header, delimiter, self._format.lists, tuple(held))
                    held, total = [], 0
            if held:
                yield CsvBlock(self._name, held[0].number, header, delimiter, self._format.lists, tuple(held))

    def _first_line(self, feed: CsvLines) -> str | None:
        """The first that is not blank, which is given again; None: there is none."""
        try:
            for line in feed:
                if not line.isspace():
                    feed.push_back(0)
                    return line
                self.blank_lines += 1
                feed.begin_record()
        except LineTooLong:
            limit = format_bytes(MAX_LINE_BYTES)
            self._reject_header(f"has no header: line {feed.number} is longer than {limit}", _HEADER)
        return None

    @property
    def _quoting(self) -> Literal[0, 3]:
        return csv.QUOTE_NONE if self._format.quoting == "none" else csv.QUOTE_MINIMAL

    def _header(self, record: Record | None, delimiter: str) -> tuple[str, ...]:
        """Names of the columns, white space around them removed."""
        assert record is not None  # there is a line that is not blank
        if record.defect == NOT_UTF8:
            self._lines.refuse("wrong_encoding", f"is not UTF-8 (line {record.number})", reencode(self._name))
        if record.defect is not None:
            if "\r" in record.text:
                what, hint = "has lines that end in CR alone", end_in_lf(self._name)
            else:
                what, hint = f"has a header line that is no CSV: {record.text[:SHOWN]!r}", _HEADER
            self._reject_header(what, hint)
        names = tuple(field.strip() for field in record.fields)
        if not (named := _named(names)):
            self._reject_header(f"names no column in its header (line {record.number})", _HEADER)
        for place, name in enumerate(names[:named], start=1):
            # The first may go without: pandas writes its row numbers so. No template can name it.
            if not name and place > 1:
                self._reject_header(
                    f"has no name for column {place} of {len(names)} in its header (line {record.number}: "
                    f"{delimiter.join(names)[:SHOWN]!r})",
                    "the first line names every column (the first alone may go without a name, and is then left out)",
                )
            if names.index(name) + 1 != place:
                self._reject_header(f"has two columns called {name!r}", "rename one of them in the header line")
        return names

    def _reject_header(self, what: str, hint: str) -> NoReturn:
        self._lines.refuse("bad_header", what, hint)


def _named(header: tuple[str, ...]) -> int:
    """Columns up to the last that has a name: Excel writes delimiters for empty ones behind, and not in every line."""
    return max((place for place, name in enumerate(header, start=1) if name), default=0)


def _sniff(line: str, lines: Sequence[bytes], quoting: Literal[0, 3]) -> str:
    """The delimiter that gives the first of the lines most fields, and nine in ten of those behind it as many, if there
    is one; the first of DELIMITERS among equals. A header or a row may have commas in its texts.
    """
    line = line.partition("\r")[0]  # where lines end in CR alone, that is for others to say
    behind = [text for each in lines[1:] if "\r" not in (text := decoded(each)).rstrip("\r\n")]

    def is_better(delimiter: str) -> tuple[bool, int]:
        fields = len(next(csv.reader([line], delimiter=delimiter, quoting=quoting)))
        alike = others = 0
        with suppress(csv.Error):
            for record in csv.reader(behind, delimiter=delimiter, quoting=quoting):
                alike, others = alike + (len(record) == fields), others + (len(record) not in (0, fields))
        return fields > 1 and alike >= 9 * others, fields

    return max(DELIMITERS, key=is_better)
