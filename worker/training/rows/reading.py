"""Rows of a source, whatever its format: read in blocks, so that pool workers can do the parsing.

    origin.find_source(…) ──▶ open_source ──▶ Reader ──blocks──▶ Block (cheap to make, picklable) ──rows()──▶ Row

A reader never holds a whole file in memory. Blocks are a pure function of the files' bytes and the block size: a
preparation that was killed finds the same ones again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from jobs.data_names import data_format
from jobs.errors import BadData
from worker.training.rows.archive import EMPTY_ZIP, ZIP, Archive
from worker.training.rows.csv_rows import CsvFormat, CsvReader
from worker.training.rows.json_lines import JsonReader
from worker.training.rows.row import Block, Reader
from worker.training.rows.sources import RowFile, Source, refusal
from worker.training.rows.workbook import OLE


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
