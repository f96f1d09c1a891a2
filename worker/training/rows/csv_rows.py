"""CSV with a header line; fields are divided by whichever of , ; tab | divides the header into most (.tsv: by tabs).

Quoting is RFC 4180's: a field in double quotes may hold delimiters, newlines and doubled quotes. What does not keep to
it is set aside as "bad CSV", not guessed at.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn

from worker.training.rows.lines import BLOCK_BYTES, MAX_LINE_BYTES, Lines, OverLong
from worker.training.rows.reading import Row
from worker.training.rows.sources import RowFile

DELIMITERS = ",;\t|"
_HEADER = "the first line names the columns, such as: input,target"


@dataclass(frozen=True)
class Record:
    """One row that was divided into fields, or the text of one that could not be."""

    number: int
    fields: tuple[str, ...] | None
    defect: str | None = None
    text: str = ""


@dataclass(frozen=True)
class CsvBlock:
    """Consecutive records."""

    file: str
    first: int
    header: tuple[str, ...]
    delimiter: str
    records: tuple[Record, ...]

    def rows(self) -> Iterator[Row]:
        """The rows."""
        for record in self.records:
            if record.fields is None:
                yield Row(record.number, None, record.defect, record.text)
                continue
            text = self.delimiter.join(record.fields)
            if len(record.fields) != len(self.header):
                yield Row(record.number, None, "wrong number of fields", text)
            else:
                columns = {name: field for name, field in zip(self.header, record.fields, strict=True) if name}
                yield Row(record.number, columns, None, text)


class CsvReader:
    """A CSV file. `param` is the dotted key of the job, for errors; `delimiter` None is found out by the header.

    Divided into fields here and not in the block: where a row ends is known only once it has been.
    """

    def __init__(self, file: RowFile, param: str, delimiter: str | None = None) -> None:
        self._lines, self._name, self._delimiter = Lines(file, param), file.name, delimiter
        self.blank_lines = 0

    @property
    def fraction(self) -> float:
        """Share of the file's bytes read so far."""
        return self._lines.fraction

    def blocks(self, size: int) -> Iterator[CsvBlock]:
        """At most `size` rows each, and little more than BLOCK_BYTES.

        Raises BadData as `Lines`, and `bad_header`, `unclosed_quote`, `wrong_encoding`.
        """
        # The one limit of the whole process; a record of ours is never longer than that.
        csv.field_size_limit(MAX_LINE_BYTES)
        with closing(iter(self._lines)) as lines:
            feed = _Feed(lines, self._lines)
            while (first_line := feed.look_ahead()) is not None and first_line.isspace():
                self.blank_lines += 1
            if first_line is None:
                return
            delimiter = self._delimiter or _sniff(first_line)
            records = self._records(feed, delimiter)
            header = self._header(next(records), delimiter)
            held: list[Record] = []
            total = 0
            for record in records:
                held.append(record)
                total += feed.record_bytes
                if len(held) >= size or total >= BLOCK_BYTES:
                    yield CsvBlock(self._name, held[0].number, header, delimiter, tuple(held))
                    held, total = [], 0
            if held:
                yield CsvBlock(self._name, held[0].number, header, delimiter, tuple(held))

    def _records(self, feed: _Feed, delimiter: str) -> Iterator[Record]:
        reader = csv.reader(feed, delimiter=delimiter, strict=True)
        while True:
            number = feed.begin_record()
            try:
                fields = next(reader)
            except StopIteration:
                return
            except _LineTooLong as error:
                yield Record(number, None, "over-long line", str(error))
            except csv.Error:
                # The reader begins anew with the next line.
                if feed.ended:
                    feed.refuse_unclosed()
                yield Record(number, None, "bad CSV", feed.record_text())
            else:
                if fields:
                    yield Record(number, tuple(fields))
                else:
                    self.blank_lines += 1

    def _header(self, record: Record, delimiter: str) -> tuple[str, ...]:
        """Names of the columns, white space around them removed."""
        if record.fields is None:
            if "\r" in record.text:
                what, hint = "has lines that end in CR alone", f"tr '\\r' '\\n' < {self._name} > rows.csv"
            else:
                what, hint = f"has a header line that is no CSV: {record.text[:80]!r}", _HEADER
            self._refuse_header(what, hint)
        names = tuple(field.strip() for field in record.fields)
        for place, name in enumerate(names, start=1):
            # The first may go without: pandas writes its row numbers so. No template can name it.
            if not name and place > 1:
                self._refuse_header(
                    f"has no name for column {place} of {len(names)} in its header (line {record.number}: "
                    f"{delimiter.join(names)[:80]!r})",
                    "the first line names every column (the first alone may go without a name, and is then left out)",
                )
            if names.index(name) + 1 != place:
                self._refuse_header(f"has two columns called {name!r}", "rename one of them in the header line")
        return names

    def _refuse_header(self, what: str, hint: str) -> NoReturn:
        self._lines.refuse("bad_header", what, hint)


class _LineTooLong(Exception):
    """Its message is the beginning of the line."""


class _Feed:
    """The lines as text, one by one, for csv.reader; remembers those of the present record."""

    def __init__(self, source: Iterator[bytes], lines: Lines) -> None:
        self._source, self._lines = source, lines
        self._waiting: str | None = None
        self._record: list[str] = []
        self._start = 1
        self.record_bytes = 0
        self.ended = False

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        if self._waiting is not None:
            text, self._waiting = self._waiting, None
        else:
            text = self._next()
        self._record.append(text)
        return text

    def look_ahead(self) -> str | None:
        """The next line, which will be the first one given out (what was looked at before is not); None at the end."""
        self._record, self._waiting = [], None
        try:
            self._waiting = next(self, None)
        except _LineTooLong:
            limit = f"{MAX_LINE_BYTES >> 20} MiB"
            self._lines.refuse(
                "bad_header", f"has no header: line {self._lines.number} is longer than {limit}", _HEADER
            )
        return self._waiting

    def begin_record(self) -> int:
        """Forget the lines of the last record; the number of the line on which the next begins."""
        waits = self._waiting is not None
        self._record, self._start = [], self._lines.number + (0 if waits else 1)
        self.record_bytes = len(self._waiting or "")
        return self._start

    def record_text(self) -> str:
        """The lines of the present record."""
        return "".join(self._record)

    def refuse_unclosed(self) -> NoReturn:
        """Raise BadData about the present record."""
        self._lines.refuse(
            "unclosed_quote",
            f"has a quote in the row that begins on line {self._start} that is not closed within "
            f"{MAX_LINE_BYTES >> 20} MiB or before the file ends",
            'close it, or write a quote inside a quoted field twice ("")',
        )

    def _next(self) -> str:
        line = next(self._source, None)
        if line is None:
            self.ended = True
            raise StopIteration
        if isinstance(line, OverLong) and not self._record:
            raise _LineTooLong(line.decode("utf-8", "replace"))
        self.record_bytes += len(line)
        if isinstance(line, OverLong) or self.record_bytes > MAX_LINE_BYTES:
            self.refuse_unclosed()
        try:
            return line.decode()
        except UnicodeDecodeError:
            self._lines.refuse(
                "wrong_encoding",
                f"is not UTF-8 (line {self._lines.number})",
                f"convert it from whatever it is in: iconv -f WINDOWS-1252 -t UTF-8 {self._lines.name} > rows.csv",
            )


def _sniff(line: str) -> str:
    """The delimiter that gives the line most fields; the first of DELIMITERS among equals."""
    line = line.partition("\r")[0]  # where lines end in CR alone, that is for others to say
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([line], delimiter=delimiter))))
