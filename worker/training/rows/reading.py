"""Rows of a source, whatever its format: read in blocks, so that pool workers can do the parsing.

    origin.find_source(…) ──▶ open_source ──▶ Reader ──blocks──▶ Block (cheap to make, picklable) ──rows()──▶ Row

A reader never holds a whole file in memory. Blocks are a pure function of the files' bytes and the block size: a
preparation that was killed finds the same ones again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from jobs.data_names import data_format
from jobs.errors import BadData
from worker.training.rows.archive import EMPTY_ZIP, ZIP, Archive
from worker.training.rows.csv_rows import CsvFormat, CsvReader
from worker.training.rows.lines import BLOCK_BYTES, Lines, OverLong
from worker.training.rows.row import NOT_UTF8, Block, Reader, Row
from worker.training.rows.sources import RowFile, Source, refusal
from worker.training.rows.windows_1252 import WINDOWS_1252, Recoded
from worker.training.rows.workbook import OLE

# -- json lines --------------------------------------------------------------------------------------------------------
# JSON lines: one JSON object a line; all of them in one JSON array; or the rows of a sheet, made into such lines.


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


class _KeyTwice(Exception):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _KeyTwice
    return found


KEY_TWICE = "a key twice in an object"
_DECODE = json.JSONDecoder(object_pairs_hook=_object).decode


def _row(number: int, line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return Row(number, None, NOT_UTF8, line.decode("utf-8", "backslashreplace"))
    try:
        columns = _DECODE(text.removeprefix("\ufeff"))  # NaN too, as pandas writes it: a missing value
    except _KeyTwice:
        return Row(number, None, KEY_TWICE, text)
    except (ValueError, RecursionError):
        return Row(number, None, "bad JSON", text)
    if not isinstance(columns, dict):
        return Row(number, None, "not a JSON object", text)
    return Row(number, columns, None, text, WINDOWS_1252 if isinstance(line, Recoded) else None)


# -- reading -----------------------------------------------------------------------------------------------------------


def open_source(source: Source, columns: Collection[str] | None = None, csv: CsvFormat | None = None) -> Reader:
    """A reader for all files of a source, one after the other; row numbers start over in each. Raises BadData."""
    return open_files(source.files, source.param, source.format, columns, csv)


def open_files(
    files: Sequence[RowFile],
    param: str,
    format: str = "auto",
    columns: Collection[str] | None = None,
    csv: CsvFormat | None = None,
) -> Reader:
    """The same for files wherever they are.

    Of the columns, formats that can leave out some read only those in `columns` (None: all).
    `csv`: what the job says about tables.
    """
    readers = [_open_file(file, param, format, columns, csv) for file in files]
    return readers[0] if len(readers) == 1 else _Several(readers, [file.bytes for file in files])


@contextmanager
def naming_part(files: Sequence[RowFile], param: str, format: str, csv: CsvFormat) -> Iterator[None]:
    """Has an error about rows name what of the files was read, such as a sheet, where their names do not say."""
    try:
        yield
    except BadData as error:
        with suppress(BadData, OSError):  # the first error is the one to tell
            reader = open_files(files, param, format, None, csv)
            next(reader.blocks(1), None)
            if reader.reading is not None:
                error.args = (f"{error} (from {reader.reading})",)
        raise


def format_of(file: RowFile, format: str, param: str) -> str:
    """jsonl, csv, tsv, parquet or workbook: `format`, or what the file's name says if that is auto (JSON lines: if
    nothing); of an archive, what the name of the file in it says. Raises BadData as Archive."""
    if format != "auto":
        return format
    name = file.name
    if data_format(name) == "zip":
        with file.open(param) as raw:
            archive = Archive(raw, name, refusal(file, param))
            name = "sheet.xlsx" if archive.is_workbook else archive.member().filename
    return "tsv" if ".tsv" in name.lower()[-8:] else data_format(name) or "jsonl"


def _open_file(
    file: RowFile, param: str, format: str, columns: Collection[str] | None, csv: CsvFormat | None
) -> Reader:
    format = format_of(file, format, param)
    if format == "parquet":
        # Imported here: pyarrow takes its time.
        from worker.training.rows.parquet_rows import ParquetReader

        return ParquetReader(file, param, columns)
    if format in ("csv", "tsv"):
        return CsvReader(file, param, delimiter="\t" if format == "tsv" else None, format=csv)
    if format == "workbook":
        with file.open(param) as raw:
            if not raw.peek(8).startswith((ZIP, EMPTY_ZIP, OLE)):
                hint = "let its name say what it holds: end it in .csv, .tsv or .jsonl, or set data.format"
                refusal(file, param)("damaged_file", "is no workbook, whatever its name says", hint)
    return JsonReader(file, param)


class _Several:
    """Several readers as one."""

    def __init__(self, readers: Sequence[Reader], sizes: Sequence[int]) -> None:
        self._readers, self._sizes = readers, sizes

    @property
    def fraction(self) -> float:
        """Share of the bytes of all files."""
        read = sum(reader.fraction * size for reader, size in zip(self._readers, self._sizes, strict=True))
        return read / max(1, sum(self._sizes))

    @property
    def blank_lines(self) -> int:
        """Blank lines in all files so far."""
        return sum(reader.blank_lines for reader in self._readers)

    @property
    def reading(self) -> str | None:
        """Of all files, each kind once."""
        return "; ".join(dict.fromkeys(filter(None, (reader.reading for reader in self._readers)))) or None

    def blocks(self, size: int) -> Iterator[Block]:
        """Those of the first file, then those of the second, and so on; no block spans two files."""
        for reader in self._readers:
            yield from reader.blocks(size)
