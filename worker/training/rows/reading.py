"""Rows of a source, whatever its format: read in blocks, so that pool workers can do the parsing.

    origin.find_source(…) ──▶ open_source ──▶ Reader ──blocks──▶ Block (cheap to make, picklable) ──rows()──▶ Row

A reader never holds a whole file in memory. Blocks are a pure function of the files' bytes and the block size: a
preparation that was killed finds the same ones again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jobs.data_names import data_format
from worker.training.rows.sources import DataFile, RowFile, Source


@dataclass(frozen=True)
class Row:
    """One row of a source. `columns` is None when it cannot be read, and `defect` says why."""

    number: int
    """JSON lines and CSV: the line on which it begins, counted from 1, as an editor shows it; Parquet: its place."""
    columns: Mapping[str, Any] | None
    defect: str | None
    text: str
    """As it stands in the file, or near enough: for the report of what was set aside."""


class Block(Protocol):
    """Some consecutive rows of one file, not parsed yet. Picklable."""

    @property
    def file(self) -> str:
        """Name of the file, for errors and the report of what was set aside."""

    @property
    def first(self) -> int:
        """Number of the first row (or blank line)."""

    def rows(self) -> Iterator[Row]:
        """The rows, blank lines left out."""


class Reader(Protocol):
    """A source that is read once, from its beginning."""

    @property
    def fraction(self) -> float:
        """Share of the source's bytes (Parquet: rows) read so far."""

    @property
    def blank_lines(self) -> int:
        """Passed over so far."""

    def blocks(self, size: int) -> Iterator[Block]:
        """All rows, in order, at most `size` in a block, fewer where they are large. Raises BadData."""


def open_rows(
    path: Path, name: str, param: str, format: str = "auto", columns: Collection[str] | None = None
) -> Reader:
    """A reader for one file at hand; `name` and `param` are what errors call it. Raises BadData, when read."""
    return _open_file(DataFile(path, name, path.stat().st_size), param, format, columns)


def open_source(source: Source, columns: Collection[str] | None = None) -> Reader:
    """A reader for all files of a source, one after the other; row numbers begin anew in each. Raises BadData."""
    return open_files(source.files, source.param, source.format, columns)


def open_files(
    files: Sequence[RowFile], param: str, format: str = "auto", columns: Collection[str] | None = None
) -> Reader:
    """The same for files wherever they are.

    Of the columns, formats that can leave out some read only those in `columns` (None: all).
    """
    readers = [_open_file(file, param, format, columns) for file in files]
    return readers[0] if len(readers) == 1 else _Several(readers, [file.bytes for file in files])


def format_of(file: RowFile, format: str) -> str:
    """jsonl, csv, tsv or parquet: `format`, or what the file's name says if that is auto (JSON lines: if nothing)."""
    if format != "auto":
        return format
    return "tsv" if ".tsv" in file.name.lower()[-8:] else data_format(file.name) or "jsonl"


def _open_file(file: RowFile, param: str, format: str, columns: Collection[str] | None) -> Reader:
    # Imported here: formats know rows, rows need no format; and pyarrow takes its time.
    format = format_of(file, format)
    if format == "parquet":
        from worker.training.rows.parquet_rows import ParquetReader

        return ParquetReader(file, param, columns)
    if format in ("csv", "tsv"):
        from worker.training.rows.csv_rows import CsvReader

        return CsvReader(file, param, delimiter="\t" if format == "tsv" else None)
    from worker.training.rows.json_lines import JsonReader

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
        """In all files so far."""
        return sum(reader.blank_lines for reader in self._readers)

    def blocks(self, size: int) -> Iterator[Block]:
        """Those of the first file, then those of the second, and so on: none goes over a file's end."""
        for reader in self._readers:
            yield from reader.blocks(size)
