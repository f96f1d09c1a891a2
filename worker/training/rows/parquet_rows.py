"""Parquet: read batch by batch, page by page; only the columns that are needed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import BadData
from worker.training.rows.lines import BLOCK_BYTES, LFS, MAX_LINE_BYTES, NO_FILE
from worker.training.rows.row import NOT_UTF8, Row, in_shell
from worker.training.rows.sources import Hashing, RowFile, changed_error

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_NARROW, _PAGE_BYTES = 16, 1 << 12
"""Bytes of a row in a narrow column, and of the headers and the dictionary of it."""
_UNREADABLE = (ValueError, OverflowError, KeyError)
"""What Arrow raises of text that is not UTF-8, of a time beyond Python's, and of a map with a key twice."""
_PAGES_BYTES = 1 << 20
"""Bytes read ahead per column; without a limit whole column chunks are read, which may be gigabytes."""


@dataclass(frozen=True)
class ParquetBlock:
    """Consecutive rows, as a stream of Arrow's."""

    file: str
    first: int
    stream: bytes

    def rows(self) -> Iterator[Row]:
        """The rows."""
        with pa.ipc.open_stream(self.stream) as stream:
            yield from rows_of(stream.read_next_batch(), self.first)


class ParquetReader:
    """A Parquet file. `param` is the dotted key of the job, for errors; `columns` are read (None: all)."""

    blank_lines = 0
    reading = None

    def __init__(self, file: RowFile, param: str, columns: Collection[str] | None = None) -> None:
        self._file, self._param = file, param
        self._columns = None if columns is None else sorted(columns)
        self.names: list[str] = []
        """Of all columns, once the first row was read."""
        self.fields: list[str] = []
        """Of what is inside columns, such as `translation.en` or `messages[0].content`."""
        self.narrow: list[str] = []
        """Of columns that take few bytes a row: numbers, truth values, and the few different texts of a category."""
        self.fraction = 0.0
        """Share of the rows read so far."""

    def blocks(self, size: int) -> Iterator[ParquetBlock]:
        """At most `size` rows each; fewer where they are so large that a block would outgrow BLOCK_BYTES by far.

        Raises BadData: `file_missing`, `file_unreadable`, `not_parquet`, `damaged_file`, `bad_header`, `file_changed`.
        """
        with self._file.open(self._param) as raw:
            before, known = self._file.state(), self._file.sha256
            if known is not None and known != Hashing(raw).hexdigest():  # of the open file: it is not read in order
                raise changed_error(self._file.name, self._param)
            raw.seek(0)
            magic = raw.read(len(_MAGIC))
            if magic != _MAGIC:
                if LFS.startswith(magic):
                    self._refuse("not_parquet", *NO_FILE)
                what = "is encrypted Parquet" if magic == _ENCRYPTED else "is read as Parquet, and is something else"
                self._refuse("not_parquet", what, f"see what it is with: file {in_shell(self._file.name)}")
            done = 0
            try:
                for batch in self._batches(raw, size):
                    first, done = done + 1, done + batch.num_rows
                    yield ParquetBlock(self._file.name, first, _stream(batch))
            except MemoryError:  # Arrow's is an ArrowException as well
                raise
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                reason = str(error).splitlines()[0]
                self._refuse("damaged_file", f"is damaged (after row {done}): {reason}", "copy or write it again")
            if self._file.state() != before:
                raise changed_error(self._file.name, self._param)
        self.fraction = 1.0

    def _batches(self, raw: BufferedReader, size: int) -> Iterator[pa.RecordBatch]:
        # pre_buffer would fetch whole row groups first, whatever buffer_size says.
        options = {"buffer_size": _PAGES_BYTES, "pre_buffer": False, "page_checksum_verification": True}
        with pq.ParquetFile(raw, **options) as file:
            self.names = file.schema_arrow.names
            self.fields = [field for column in file.schema_arrow for field in _fields_of(column)]
            self._check_names(self.names)
            self.narrow = _narrow_columns(file.metadata)
            done = 0
            for batch in file.iter_batches(_batch_rows(file.metadata, size), columns=self._columns, use_threads=False):
                done += batch.num_rows
                self.fraction = done / file.metadata.num_rows
                yield batch

    def _check_names(self, names: list[str]) -> None:
        for name in names:
            if names.count(name) > 1:
                self._refuse("bad_header", f"has two columns called {name!r}", "write it with one of them renamed")

    def _refuse(self, code: str, what: str, hint: str) -> NoReturn:
        raise BadData(f"{self._param}: {self._file.name} {what}", code=code, param=self._param, hint=hint)


def _fields_of(column: pa.Field) -> list[str]:
    """As `check._fields_of`, for a struct or a list of them."""
    kind, inside = column.type, "."
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind, inside = kind.value_type, "[0]."
    return [f"{column.name}{inside}{inner.name}" for inner in kind] if pa.types.is_struct(kind) else []


def _stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def rows_of(batch: pa.RecordBatch, first: int) -> Iterator[Row]:
    """The rows of a batch, numbered from `first`; a map is an object, and what JSON has no type for is as in Python."""
    try:
        all_columns: list[Any] = batch.to_pylist(maps_as_pydicts="strict")
    except _UNREADABLE:  # row by row
        all_columns = [None] * batch.num_rows
    for place, columns in enumerate(all_columns):
        number, defect = first + place, None
        if columns is None:
            columns, defect = _one_by_one(batch, place)
        text = json.dumps(columns, ensure_ascii=False, default=lambda value: f"({type(value).__name__})")
        if len(text) > MAX_LINE_BYTES:
            defect = "over-long row"
        yield Row(number, columns if defect is None else None, defect, text)


def _one_by_one(batch: pa.RecordBatch, place: int) -> tuple[dict[str, object], str | None]:
    columns, defect = {}, None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column[place].as_py(maps_as_pydicts="strict")
        except UnicodeDecodeError:
            defect = NOT_UTF8
        except _UNREADABLE:
            columns[name] = column[place]  # no text, and not taken for one
    return columns, defect


def _narrow_columns(metadata: pq.FileMetaData) -> list[str]:
    """By the first rows that are stored together."""
    if not metadata.num_row_groups:
        return []
    group = metadata.row_group(0)
    columns = (group.column(place) for place in range(group.num_columns))
    most = _NARROW * group.num_rows + _PAGE_BYTES
    return [one.path_in_schema for one in columns if one.total_uncompressed_size <= most]


def _batch_rows(metadata: pq.FileMetaData, size: int) -> int:
    """Rows of a batch, by the size of the mean row (all columns, unpacked)."""
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    mean = sum(group.total_byte_size for group in groups) / max(1, metadata.num_rows)
    return max(1, min(size, int(BLOCK_BYTES / max(mean, 1.0))))
