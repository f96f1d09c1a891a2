"""What was traced of a model before, on disk: tracing takes seconds, and a sweep's trials ask the same of one model.

One file a model in a folder (`LONGHAUL_TRACES`), named after all that decides the answers, the trainer's code
included. Its first line is the SHA-256 of the rest: an answer that was changed would fail jobs, or plan them
wrongly. It may be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from jobs.disk.files import read_regular, write_atomically
from worker.training.store import content_key

log = logging.getLogger("longhaul.trainer")

MOST_FILES = 500
"""The ones not used for longest go first."""
Answer = TypeVar("Answer", list[int], str | None)
_TRACED_WITH = ("torch", "transformers", "peft", "torchao")


class TraceCache:
    """Question → answer, for one model. Without a folder it lives as long as this object."""

    def __init__(self, folder: Path | None, facts: Sequence[Any]) -> None:
        """`facts`: all that decides an answer, besides question and code."""
        self._file = None if folder is None else folder / f"{content_key([code(), *facts])}.json"
        self._known: dict[str, list[int] | str | None] = {}
        self._on_disk = 0
        if self._file is not None:
            self._read(self._file)

    @property
    def empty(self) -> bool:
        """Nothing is known."""
        return not self._known

    def answer(self, question: str, find: Callable[[], Answer]) -> Answer:
        """The answer that is known, else what `find` returns, from now on."""
        if question not in self._known:
            self._known[question] = find()
        return cast(Answer, self._known[question])

    def keep(self) -> None:
        """Write what has been added, if there is a folder; a file that cannot be written costs time only."""
        if self._file is None or len(self._known) == self._on_disk:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self._known).encode()
            write_atomically(self._file, digest(content) + b"\n" + content)
            self._on_disk = len(self._known)
            files = sorted(self._file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.info("traces are not kept in %s: %s", self._file.parent, error.strerror)

    def _read(self, file: Path) -> None:
        try:
            written, _, content = read_regular(file).partition(b"\n")
            if written != digest(content):
                raise ValueError("it is not as it was written")
            self._known = dict(json.loads(content))
            os.utime(file)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            log.info("%s is of no use: %s", file.name, error)
        self._on_disk = len(self._known)


def digest(content: bytes) -> bytes:
    """SHA-256, in hex."""
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def code() -> list[str]:
    """Versions of the libraries that are traced, what the CPU can do, and a hash of the trainer's code."""
    import torch

    own = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        own.update(file.read_bytes())
    versions = [importlib.metadata.version(name) for name in _TRACED_WITH]
    return [own.hexdigest(), *versions, torch.backends.cpu.get_cpu_capability()]
