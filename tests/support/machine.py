"""A clock and a disk that obey a test."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections import namedtuple
from collections.abc import Iterator

import pytest


class Clock:
    """Seconds; callable like `time.monotonic`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


Usage = namedtuple("Usage", "total used free")


def free_bytes(patch: pytest.MonkeyPatch, free: int) -> None:
    """Every disk has so many bytes left."""
    patch.setattr(shutil, "disk_usage", lambda path: Usage(10**15, 10**15 - free, free))


@contextlib.contextmanager
def longest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: writes fall short, then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
