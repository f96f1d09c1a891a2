"""What can be downloaded of a run directory: a file; or a folder, as a tar that is made as it is sent.

The tar is uncompressed and, but for the content, a function of names, sizes and times: so its length is known before
its first byte, any range of it can be made by itself, and a download resumes where it broke off.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path, PurePosixPath

from service.files.confined import Found, files_below, open_inside, reopen
from service.files.download import DownloadSource, Gone

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
