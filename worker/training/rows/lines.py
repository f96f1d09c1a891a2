"""Lines of a text file, whatever it is packed in: decompressed, as UTF-8, bounded, never the whole file in memory.

Packing and encoding are recognized by content, not name: gzip and zstd (also several of them one after the other), a
zip archive of one file, a workbook; UTF-8, or UTF-16 or UTF-32 with a byte order mark, UTF-16 without one where text
begins with two characters of ASCII, or Windows-1252 where text is not UTF-8 and looks like it. Other encodings cannot
be distinguished, and are not guessed.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import IO, cast

from worker.training.rows.archive import EMPTY_ZIP, ZIP, Archive
from worker.training.rows.sources import Hashing, RowFile, changed_error, refusal
from worker.training.rows.windows_1252 import WINDOWS_1252, Recoder
from worker.training.rows.workbook import OLE, Workbook

MAX_LINE_BYTES = 4 << 20
"""A longer line is no training row: 4 MiB is a million tokens, and it bounds the memory of a reader."""
BLOCK_BYTES = 1 << 20
"""A block of rows ends with the row that makes it as large as this."""
_PIECE = 1 << 16
_SMALL_READ = 1 << 12
"""Bytes of a zstd archive unpacked at a time: the less is read ahead, the better is the guess of the rows to come."""
_EXCERPT = 1000
_LITERAL = 16
"""Characters of the longest word or escape of JSON, or more."""
_BRACKETS, _IN_STRING = re.compile(r'["\[\]{}]'), re.compile(r'"|\\.', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = rb'(?:"(?:[^"\\]|\\.)*"|[^\s"\[\]{},]+)'
_WRAPPED = re.compile(rb'\s*\{(?:\s*"[^"\\]*"\s*:\s*' + _SCALAR + rb'\s*,)*\s*"(data|rows|examples)"\s*:\s*(?=\[\s*\{)')
"""The beginning of an object whose first array is one of objects, as annotation tools and `datasets` write rows."""
_LINES = re.compile(r"\.(jsonl|ndjson)(\.\w+)?$", re.IGNORECASE)
"""Names of files with an object a line, whatever they begin with."""
_GZIP = b"\x1f\x8b"
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))  # frame, skippable frames
LFS, NO_FILE = b"version https://git-lfs", ("is a pointer of Git LFS, not the file itself", "fetch it: git lfs pull")
_TAR = slice(257, 262), b"ustar"
_FOREIGN = {
    b"BZh": ("is a bzip2 archive", "pack it with gzip or zstd, or not at all"),
    b"\xfd7zXZ\x00": ("is an xz archive", "pack it with gzip or zstd, or not at all"),
    ZIP: ("is an archive or a workbook inside an archive", "unpack the outer one"),
    b"\x89PNG": ("is a picture", "give a file of rows: JSON lines, CSV or Parquet"),
    b"\xff\xd8\xff": ("is a picture", "give a file of rows: JSON lines, CSV or Parquet"),
    b"%PDF": ("is a PDF document", "give a file of rows: JSON lines, CSV or Parquet"),
    LFS: NO_FILE,
    b"PAR1": ("is a Parquet file", "name it .parquet, or say data.format: parquet"),
}
_MARKS = {
    # UTF-32 first: its little-endian mark begins like that of UTF-16.
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_WITHOUT_MARK: dict[tuple[bool, ...], str] = {
    (True, False, True, False): "utf-16-le",
    (False, True, False, True): "utf-16-be",
}
"""By which of the first four bytes are not 0."""
UNMARKED = "text without a byte order mark, read as UTF-16"


class OverLong(bytes):
    """The beginning of a line that is longer than MAX_LINE_BYTES."""


class Lines:
    """The lines of a file, with their newlines, byte order mark removed; `param` is the dotted key of the job.

    `json`: a file that begins with `[` is one JSON array, whose items come out instead, and so do those of
    `{"data": […]}`; and a workbook comes out as an object for each row, an empty line for those that hold none.

    Iterating raises BadData: `file_missing`, `file_unreadable`, `damaged_archive`, `file_changed`, `not_supported`,
    `damaged_array`, and as Archive and Workbook do. A line that is no Unicode comes out as bytes that are not UTF-8.
    """

    def __init__(self, file: RowFile, param: str, *, json: bool = False) -> None:
        self._file, self._param, self._json = file, param, json
        self._raw: io.BufferedReader | None = None
        self._read = 0
        self._rows: int | None = None
        self._inside: str | None = None
        self._unmarked: str | None = None
        self._recoder = Recoder()
        self.refuse = refusal(file, param)
        self.number = 0
        """Lines read so far: the number, counted from 1, of the one read last."""

    @property
    def name(self) -> str:
        """Of the file."""
        return self._file.name

    @property
    def fraction(self) -> float:
        """Share of the file's bytes (of a workbook, rows) read so far."""
        if self._rows is not None:
            return min(1.0, self.number / max(1, self._rows))
        if self._raw is not None and not self._raw.closed:
            self._read = self._raw.tell()
        return min(1.0, self._read / max(1, self._file.bytes))

    @property
    def reading(self) -> str | None:
        """What of the file is read so far, and how, where its name does not say: a file in it, a sheet, an encoding."""
        return (
            "; ".join(filter(None, (self._inside, self._unmarked, WINDOWS_1252 if self._recoder.recodes else None)))
            or None
        )

    def __iter__(self) -> Generator[bytes, None, None]:
        self._raw = self._file.open(self._param)
        with ExitStack() as opened:
            opened.enter_context(self._raw)
            before, known = self._file.state(), self._file.sha256
            hashing = Hashing(self._raw)
            source = self._raw
            inside = source.peek(8).startswith((ZIP, EMPTY_ZIP, OLE))
            if known is not None and inside:  # of the open file: it is not read in order
                if known != hashing.hexdigest():
                    raise changed_error(self._file.name, self._param)
                known = None
                source.seek(0)
            elif known is not None:
                source = io.BufferedReader(cast(io.RawIOBase, hashing), _PIECE)
            try:
                plain = self._opened(source, opened) if inside else self._unpacked(source)
                for line in self._split(plain):
                    self.number += 1
                    yield line
                if inside:
                    self._raw.seek(0, os.SEEK_END)
            except _NoArray as error:
                self.refuse(
                    "damaged_array", f"is a JSON array that cannot be read after item {self.number}: {error}",
                    "write it again, or one object a line",
                )  # fmt: skip
            except (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, _Damaged) as error:
                self.refuse("damaged_archive", f"is damaged after line {self.number}: {error}", "copy or pack it again")
            finally:
                self._read = self._raw.tell()
            if self._file.state() != before or (known is not None and known != hashing.hexdigest()):
                raise changed_error(self._file.name, self._param)

    def _split(self, packed: io.BufferedReader) -> Iterator[bytes]:
        file, marked = self._decoded(packed)
        head, (place, magic) = file.peek(_PIECE), _TAR
        if head[place] == magic and b"\0" in head[: place.start]:
            self.refuse("not_supported", "is a tar archive", "unpack it, and give the files of rows in it")
        start = file.peek(_PIECE)[:_PIECE] if self._json else b""
        if (wrapped := _WRAPPED.match(start)) and not _LINES.search(self._file.name) and not _is_lines(start):
            array = f"the array {wrapped[1].decode()!r} of one JSON object"
            self._inside = "; ".join(filter(None, (self._inside, array)))
            file.read(wrapped.end())
            lines = _items(file, wrapped=True)
        else:
            lines = _items(file) if start.lstrip().startswith(b"[") else _bounded(file)
        return lines if marked else self._recoder.lines(lines)

    def _decoded(self, plain: io.BufferedReader) -> tuple[io.BufferedReader, bool]:
        """Its bytes as UTF-8, and whether a mark says that they are."""
        start = plain.peek(4)[:4]
        for mark, encoding in _MARKS.items():
            if start.startswith(mark):
                return io.BufferedReader(_AsUtf8(plain, encoding), _PIECE), True
        if encoding := _WITHOUT_MARK.get(tuple(map(bool, start)), ""):
            self._unmarked = UNMARKED
            return io.BufferedReader(_AsUtf8(plain, encoding), _PIECE), True
        if marked := start.startswith(codecs.BOM_UTF8):
            plain.read(len(codecs.BOM_UTF8))
        return plain, marked

    def _opened(self, raw: io.BufferedReader, opened: ExitStack) -> io.BufferedReader:
        """What is in an archive or a workbook."""
        archive = None if raw.peek(8).startswith(OLE) else Archive(raw, self._file.name, self.refuse)
        if archive is not None and not archive.is_workbook:
            member = archive.member()
            self._inside = f"file {member.filename!r} of the archive"
            return self._unpacked(io.BufferedReader(cast(io.RawIOBase, archive.open(member)), _PIECE))
        if not self._json:
            self.refuse("not_supported", "is a workbook", "let its name say so: end it in .xlsx, .ods or .xls")
        book = opened.enter_context(Workbook(raw, self.refuse))
        self._inside, self._rows = book.text, book.about.rows
        return book.lines()

    def _unpacked(self, packed: io.BufferedReader) -> io.BufferedReader:
        start = packed.peek(8)
        if start.startswith(_GZIP):
            return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=packed, mode="rb")), _PIECE)
        if start.startswith(_ZSTD):
            return io.BufferedReader(_Zstd(packed), _PIECE)
        for magic, (what, hint) in _FOREIGN.items():
            if start.startswith(magic):
                self.refuse("not_supported", what, hint)
        return packed


class _Damaged(Exception):
    """A zstd archive that cannot be unpacked."""


class _NoArray(Exception):
    """What begins like a JSON array is invalid."""


class _SmallReads:
    """A file that is read in little pieces, however much is asked for."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, _SMALL_READ))

    def close(self) -> None:
        """The caller closes the file that it opened."""


class _Zstd(io.RawIOBase):
    """What is packed in a zstd archive."""

    def __init__(self, packed: IO[bytes]) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(_SmallReads(packed), mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed: any writable buffer
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:  # of pyarrow's own; what the disk says has a number
            if error.errno is not None:
                raise
            raise _Damaged(str(error)) from error
        buffer[: len(data)] = data
        return len(data)


class _AsUtf8(io.RawIOBase):
    """Text of another encoding as UTF-8; what is no Unicode there is none here either."""

    def __init__(self, source: io.BufferedReader, encoding: str) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._ready = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed: any writable buffer
        while not self._ready and not self._ended:
            self._ready = self._next()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _next(self) -> bytes:
        piece = self._source.read(1 << 16)
        self._ended = not piece
        try:
            return self._decoder.decode(piece, final=self._ended).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # half a character at the end, or beyond U+10FFFF: nothing behind it can be trusted
            self._ended = True
            return b"\xff"


def _bounded(file: io.BufferedReader) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        start = OverLong(line[:_EXCERPT])
        while line and not line.endswith(b"\n"):
            line = file.readline(_PIECE)
        yield start


def _is_lines(start: bytes) -> bool:
    """Whether a file that begins so has an object on its first line, and another line behind it."""
    first, _, behind = start.lstrip().partition(b"\n")
    if not behind.strip():
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _items(file: io.BufferedReader, *, wrapped: bool = False) -> Iterator[bytes]:
    """The items of the JSON array that the file is, each as it is written there. Raises _NoArray.

    `wrapped`: behind the array an object ends.
    """
    decode = json.JSONDecoder(strict=False, parse_int=str).raw_decode  # what else is wrong costs only its own row
    held, place, ended = "", 0, False

    def fill() -> None:
        """Drop what was read and add the next piece. As Latin-1: JSON's syntax is ASCII, and every byte is kept."""
        nonlocal held, place, ended
        piece = file.read(BLOCK_BYTES)
        held, place, ended = held[place:] + piece.decode("latin-1"), 0, not piece

    def passed_over() -> bytes:
        """The item that begins at `place`, by its quotes and brackets alone; of one that is too long, its beginning."""
        nonlocal place
        kept, size, depth, in_string, at = "", 0, 0, False, place
        while True:
            found = (_IN_STRING if in_string else _BRACKETS).search(held, at)
            if found is None:
                if ended:
                    raise _NoArray("it ends within an item")
                end = len(held) - (at < len(held) and held[-1] == "\\")  # half an escape
                kept, size, place = (kept + held[place:end])[: MAX_LINE_BYTES + 1], size + end - place, end
                fill()
                at = 0
                continue
            at = found.end()
            in_string ^= found[0] == '"'
            depth += (found[0] in "[{") - (found[0] in "]}")
            if depth == 0 and not in_string:
                item, size, place = kept + held[place:at], size + at - place, at
                whole = item.encode("latin-1")
                return whole if size <= MAX_LINE_BYTES else OverLong(whole[:_EXCERPT])

    def next_character() -> str:
        nonlocal place
        while True:
            place = _SPACE.match(held, place).end()  # type: ignore[union-attr]  # it matches nothing as well
            if place < len(held) or ended:
                return held[place : place + 1]
            fill()

    next_character()
    place += 1
    first = True
    while (character := next_character()) != "]":
        if not character:
            raise _NoArray("it does not end")
        if not first:
            if character != ",":
                raise _NoArray("no comma")
            place += 1
            if next_character() == "]":
                raise _NoArray("a comma without an item behind it")
        first = False
        while True:
            try:
                _, end = decode(held, place)
                if end < len(held) or ended:  # a number may go on
                    break
            except RecursionError:
                end = place
                break
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated") and error.pos < len(held) - _LITERAL:
                    raise _NoArray("an item is no JSON") from error
                if ended:
                    raise _NoArray("it ends within an item") from error
                if len(held) - place > MAX_LINE_BYTES:
                    end = place
                    break
            fill()
        if end == place:
            yield passed_over()
            continue
        fits = end - place <= MAX_LINE_BYTES
        yield held[place:end].encode("latin-1") if fits else OverLong(held[place:][:_EXCERPT].encode("latin-1"))
        place = end
    place += 1
    if wrapped:
        if (character := next_character()) != "}":
            raise _NoArray("something follows it in its object" if character else "its object does not end")
        place += 1
    if next_character():
        raise _NoArray("something follows the array")
