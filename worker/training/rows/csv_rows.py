"""CSV with a header line; fields are divided by whichever of , ; tab | divides the header into most, and the lines
behind it into as many (.tsv: by tabs).

Quoting is RFC 4180's: a field in double quotes may hold delimiters, newlines and doubled quotes. What does not keep to
it is rejected as "bad CSV", not guessed at (`csv_records.py`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal, NoReturn

from jobs.spec import CsvQuoting, DataSpec
from jobs.text.units import format_bytes
from worker.training.rows.csv_records import SHOWN, CsvLines, LineTooLong, Record, decoded, next_record, read_records
from worker.training.rows.lines import BLOCK_BYTES, MAX_LINE_BYTES, Lines
from worker.training.rows.row import (
    NOT_UTF8,
    Row,
    reencode,
)
from worker.training.rows.sources import RowFile
from worker.training.rows.stray_quotes import TableLines
from worker.training.rows.text import list_in

DELIMITERS = ",;\t|"
_LOOKED_AT = 50
"""Lines by which the delimiter is told."""
_HEADER = "the first line names the columns, such as: input,target"
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
                what, hint = "has lines that end in CR alone", f"tr '\\r' '\\n' < {self._name} > rows.csv"
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
