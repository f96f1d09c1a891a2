"""Objects in a bucket, or in a folder that stands for one. fsspec reaches it; what it needs for S3 and others is
installed by whoever has such a bucket.

An object is there whole or not at all. No listing is ever asked for: who wrote says what there is.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from worker.engines.engine import EngineUnavailable

Answer = TypeVar("Answer")
LONGEST = 16 * 2**20
"""Bytes of an object that is read into memory."""


class Bucket:
    """What lies under a URL, such as `s3://bucket/folder`. All calls raise EngineUnavailable. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Nothing is asked of it yet. Raises ValueError: nothing that is installed reads such a URL."""
        self._url = url
        local = {"auto_mkdir": True} if url.startswith("file://") else {}
        self._fs: Any  # each protocol has a class of its own
        try:
            self._fs, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **local)
        except ImportError as error:
            raise ValueError(f"{url}: {error}, with pip, here and on the node") from None
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from None

    def read(self, name: str) -> bytes | None:
        """A small object; None: there is none."""
        try:
            content: bytes = self._asked(name, lambda: self._fs.cat_file(self._path(name), start=0, end=LONGEST + 1))
        except FileNotFoundError:
            return None
        if len(content) > LONGEST:
            raise EngineUnavailable(f"{self._url}: {name} is larger than {LONGEST} bytes")
        return content

    def size(self, name: str) -> int | None:
        """Bytes of an object; None: there is none."""
        try:
            size: int = self._asked(name, lambda: self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None
        return size

    def write(self, name: str, content: bytes) -> None:
        """A small object."""
        self._write(name, lambda path: self._fs.pipe_file(path, content))

    def put(self, file: Path, name: str) -> None:
        """The content of a file becomes an object. Raises FileNotFoundError: the file is gone."""
        try:
            self._write(name, lambda path: self._fs.put_file(os.fspath(file), path))
        except FileNotFoundError as error:
            if not file.exists():
                raise
            raise EngineUnavailable(f"{self._url} is no bucket: {error}") from error

    def get(self, name: str, file: Path) -> None:
        """The content of an object becomes a file. Raises FileNotFoundError: there is no such object."""
        self._asked(name, lambda: self._fs.get_file(self._path(name), os.fspath(file)))

    def remove(self, name: str) -> None:
        """An object, if it is there."""
        try:
            self._asked(name, lambda: self._fs.rm_file(self._path(name)))
        except FileNotFoundError:
            return

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        path = self._path(name)
        if not isinstance(self._fs, LocalFileSystem):
            self._asked(name, lambda: write(path))
            return
        temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"  # in a folder a file is seen before it is whole
        self._asked(name, lambda: write(temporary))
        self._asked(name, lambda: os.replace(temporary, path))

    def _path(self, name: str) -> str:
        path = f"{self._root}/{name}"
        if isinstance(self._fs, LocalFileSystem) and os.path.realpath(path) != f"{os.path.realpath(self._root)}/{name}":
            raise EngineUnavailable(f"{self._url}: {name} is a link, or lies behind one")
        return path

    def _asked(self, name: str, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except FileNotFoundError:
            raise
        except Exception as error:  # each protocol has errors of its own
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EngineUnavailable(f"{self._url}: {name}: {why}") from error
