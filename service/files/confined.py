"""What clients may download from a run directory: regular files inside it, except those for internal use.

No `..` in any spelling, no symbolic link anywhere on the way, no device or pipe. Each folder is opened relative to the
one before and without following links, so that whoever can write there leads no reader out either, not even by putting
a link in a folder's place meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import stat
import tarfile
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from jobs.errors import NotFound
from service.errors import error_response

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,254}")
"""Names that are the same everywhere: in an address, in a header, in a tar, on any file system. We write no others."""
# The trainer's own words can be read at /logs, where what looks like a secret is taken out.
_OURS = frozenset({"lock", "events.lock", "sinks", "trainer.log", "attempts"})
# Opening a pipe would wait for its other end.
_ANY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_THERE = {
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.ENAMETOOLONG,
}  # fmt: skip


class NoFile(NotFound):
    """The run directory has no such file, or none that people may have."""

    code = "no_file"


@dataclass(frozen=True)
class Found:
    """A regular file."""

    path: str
    """Relative to the folder that was looked through."""
    status: os.stat_result


def open_inside(run: Path, path: str) -> int:
    """A handle, to read from, of a regular file or a folder of a run directory. Raises NoFile."""
    parts = path.removesuffix("/").split("/")
    if not all(_may_be_had(part) for part in parts) or parts[0] in _OURS:
        raise _none(run, path)
    handle = _open_run(run)
    try:
        for part in parts:
            handle = _step(handle, part)
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise _none(run, path) from None
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        os.close(handle)
        raise _none(run, path)
    return handle


def content(run: Path, path: str) -> bytes:
    """A file of a run directory, whole. Raises NoFile."""
    handle = open_inside(run, path)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _none(run, path)
    with open(handle, "rb") as file:
        return file.read()


def reopen(folder: int, file: Found) -> int:
    """A handle of a file found below this open folder. Raises FileNotFoundError when another one is there now."""
    handle = os.dup(folder)
    for part in file.path.split("/"):
        handle = _step(handle, part)
    now = os.fstat(handle)
    if (now.st_dev, now.st_ino) != (file.status.st_dev, file.status.st_ino):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", file.path)
    return handle


def files_of(run: Path) -> list[Found]:
    """All that people may have of a run directory, in order of path. Raises NoFile if it is no directory itself."""
    handle = _open_run(run)
    try:
        return [file for file in files_below(handle) if file.path.partition("/")[0] not in _OURS]
    finally:
        os.close(handle)


def files_below(folder: int) -> list[Found]:
    """The regular files in an open folder and in its folders, in order of path."""
    return sorted(_walk(folder, ""), key=lambda file: file.path)


def _walk(folder: int, prefix: str) -> Iterator[Found]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _may_be_had(entry.name)]
    for name in names:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield Found(prefix + name, status)
            elif stat.S_ISDIR(status.st_mode):
                below = os.open(name, _ANY | os.O_DIRECTORY, dir_fd=folder)
                try:
                    yield from _walk(below, f"{prefix}{name}/")
                finally:
                    os.close(below)
        except OSError as error:  # a checkpoint that is pruned meanwhile; a folder that may not be entered
            if error.errno not in _NOT_THERE:
                raise


def _open_run(run: Path) -> int:
    try:
        return os.open(run, _ANY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise NoFile(f"there is no folder of job {run.name}, or it is a link to elsewhere") from None
        raise


def _step(folder: int, name: str) -> int:
    """From an open folder, which is closed, to what it has under this name."""
    try:
        return os.open(name, _ANY, dir_fd=folder)
    finally:
        os.close(folder)


def _may_be_had(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.startswith("tmp-")


def _none(run: Path, path: str) -> NoFile:
    return NoFile(f"job {run.name} has no file {path[:200]!r} that can be had: GET /jobs/{run.name}/files lists them")


# -- download ----------------------------------------------------------------------------------------------------------
# Streams a file to a client: whole, or a range of it, so that an interrupted download resumes.
#
# A pool thread reads a block, then the block is sent; a slow client blocks no thread. Memory: one block per download.

BLOCK = 256 * 1024
log = logging.getLogger("longhaul.service")


class Gone(Exception):
    """What was announced cannot be read any more."""


class DownloadSource(Protocol):
    """What is downloaded. Everything but `read` is known before the first byte is sent."""

    name: str
    """Name that the client may save it under."""
    media_type: str
    size: int
    etag: str
    """Strong: the same only if every byte is the same."""
    modified: float

    def read(self, offset: int, most: int) -> bytes:
        """At least one byte from `offset` (below `size`) on. Raises Gone, OSError."""

    def close(self) -> None:
        """Let go of open files."""


def answer(request: Request, source: DownloadSource) -> Response:
    """200, 206 for a range, 416 for one beyond the end; for HEAD the headers of the whole. Closes the source."""
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{source.name}"',
        "Content-Type": source.media_type,
        "ETag": source.etag,
        "Last-Modified": formatdate(source.modified, usegmt=True),
    }
    if request.method == "HEAD":
        source.close()
        return Response(headers=headers | {"Content-Length": str(source.size)})
    wanted = request.headers.get("Range", "")
    same = request.headers.get("If-Range", source.etag) == source.etag
    part = _part(wanted, source.size) if same else None
    start, stop = part or (0, source.size)
    if part and start >= stop:
        source.close()
        message = f"{wanted} is beyond the end: there are {source.size} bytes"
        beyond = {"Content-Range": f"bytes */{source.size}"}
        return error_response(416, "range_not_satisfiable", message, param="Range", headers=beyond)
    headers["Content-Length"] = str(stop - start)
    if part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{source.size}"
    return _Download(source, start, stop, 206 if part else 200, headers)


def _part(wanted: str, size: int) -> tuple[int, int] | None:
    """First byte and the one behind the last; none of them if `wanted` begins beyond the end. None: all is sent.

    That is what RFC 9110 has for a header that is malformed, in other units, or for several ranges at once.
    """
    given = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", wanted.strip(), re.ASCII | re.IGNORECASE)
    if given is None or not (given[1] or given[2]):
        return None
    if not given[1]:
        return max(0, size - int(given[2])), size
    first, behind = int(given[1]), int(given[2]) + 1 if given[2] else size
    if given[2] and behind <= first:
        return None
    return first, min(behind, size)


class _Download(StreamingResponse):
    def __init__(self, source: DownloadSource, start: int, stop: int, status: int, headers: dict[str, str]) -> None:
        super().__init__(_blocks(source, start, stop), status, headers)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except (Gone, OSError) as error:
            # Without its last bytes the connection is closed, and the client knows that it has not got everything.
            log.warning("the download of %s is broken off: %s", self._source.name, error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._source.close()


async def _blocks(source: DownloadSource, start: int, stop: int) -> AsyncIterator[bytes]:
    while start < stop:
        block = await run_in_threadpool(source.read, start, min(BLOCK, stop - start))
        start += len(block)
        yield block


# -- results -----------------------------------------------------------------------------------------------------------
# What can be downloaded of a run directory: a file; or a folder, as a tar that is made as it is sent.
#
# The tar is uncompressed and, but for the content, a function of names, sizes and times: so its length is known before
# its first byte, any range of it can be made by itself, and a download resumes where it broke off.

_MEDIA_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".png": "image/png",
    ".log": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}


def find(run: Path, path: str) -> DownloadSource:
    """A file or a folder that people may have. Raises NoFile."""
    handle = open_inside(run, path)
    status = os.fstat(handle)
    name = PurePosixPath(path).name
    if stat.S_ISREG(status.st_mode):
        return PlainFile(handle, name, status)
    return Tar(handle, name, f"{run.name}-{name}.tar")


class PlainFile:
    """A file as long as it was when it was asked for. Being open it stays, even if it is removed meanwhile."""

    def __init__(self, handle: int, name: str, status: os.stat_result) -> None:
        self._handle = handle
        self.name = name
        self.media_type = _MEDIA_TYPES.get(PurePosixPath(name).suffix, "application/octet-stream")
        self.size = status.st_size
        self.etag = f'"{_version(status)}"'
        self.modified = status.st_mtime

    def read(self, offset: int, most: int) -> bytes:
        """Raises Gone when it has become shorter."""
        block = os.pread(self._handle, most, offset)
        if not block:
            raise Gone(f"{self.name} has been cut to less than {offset + 1} bytes")
        return block

    def close(self) -> None:
        """Once."""
        os.close(self._handle)


class Tar:
    """A folder's files below the folder's own name. Each is opened in its turn: if it has gone, the tar ends."""

    media_type = "application/x-tar"

    def __init__(self, folder: int, top: str, name: str) -> None:
        self._folder = folder
        self.name = name
        pieces = list(_pieces(files_below(folder), top))
        self._pieces = [piece for piece, _ in pieces]
        self._ends = list(accumulate(size for _, size in pieces))
        self._open: tuple[Found, int] | None = None
        self.size = self._ends[-1]
        self.modified = max((each.status.st_mtime for each in self._pieces if isinstance(each, Found)), default=0.0)
        digest = hashlib.sha256()
        for piece in self._pieces:
            digest.update(piece if isinstance(piece, bytes) else _version(piece.status).encode())
        self.etag = f'"{digest.hexdigest()[:32]}"'

    def read(self, offset: int, most: int) -> bytes:
        """Raises Gone when a file is not what the tar's headers say any more."""
        number = bisect_right(self._ends, offset)
        piece = self._pieces[number]
        start = offset - (self._ends[number - 1] if number else 0)
        if isinstance(piece, bytes):
            return piece[start : start + most]
        block = os.pread(self._handle_of(piece), min(most, self._ends[number] - offset), start)
        if not block:
            raise Gone(f"{piece.path} is shorter now")
        return block

    def _handle_of(self, file: Found) -> int:
        if self._open is None or self._open[0] is not file:
            if self._open is not None:
                os.close(self._open[1])
                self._open = None
            self._open = file, reopen(self._folder, file)
        return self._open[1]

    def close(self) -> None:
        """Once."""
        os.close(self._folder)
        if self._open is not None:
            os.close(self._open[1])


def _pieces(files: list[Found], top: str) -> Iterator[tuple[bytes | Found, int]]:
    """What a tar is put together from, with sizes: headers and padding as they are, and files. None is empty."""
    padding = 0
    for file in files:
        about = tarfile.TarInfo(f"{top}/{file.path}")
        about.size, about.mtime, about.mode = file.status.st_size, int(file.status.st_mtime), 0o644
        header = bytes(padding) + about.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
        yield header, len(header)
        if about.size:
            yield file, about.size
        padding = -about.size % tarfile.BLOCKSIZE
    end = bytes(padding + 2 * tarfile.BLOCKSIZE)
    yield end, len(end)


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
