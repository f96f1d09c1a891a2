"""Long lists of a job in parts: its files by folder, its events by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.events import Event
from service.files.confined import Found

EventKind = Literal["", "warnings", "job", "attempts", "evaluations", "checkpoints", "memory"]
KINDS: Mapping[EventKind, str] = {
    "": "all", "warnings": "warnings and errors", "job": "job", "attempts": "attempts", "evaluations": "evaluations",
    "checkpoints": "checkpoints", "memory": "memory and disk",
}  # fmt: skip
"""With their titles."""
_SUBJECTS: Mapping[str, EventKind] = {
    "job": "job", "steps": "job", "attempt": "attempts", "task": "attempts", "device": "attempts", "model": "attempts",
    "update": "attempts", "evaluation": "evaluations", "checkpoint": "checkpoints", "memory": "memory", "oom": "memory",
    "disk": "memory",
}  # fmt: skip
"""The kind of each first part of a type."""


@dataclass(frozen=True)
class ListedFile:
    """A file of the run directory."""

    path: str
    """Relative to the run directory."""
    bytes: int
    changed_at: float

    @property
    def name(self) -> str:
        """Without its folder."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class FileFolder:
    """The files of one folder, without those of folders in it."""

    path: str
    """Relative to the run directory; empty: the run directory itself."""
    files: tuple[ListedFile, ...]

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(each.bytes for each in self.files)


def folders_of(files: Iterable[Found]) -> list[FileFolder]:
    """The files by folder, the run directory's own first, the others in order of path."""
    found: dict[str, list[ListedFile]] = {}
    for file in files:
        listed = ListedFile(file.path, file.status.st_size, file.status.st_mtime)
        found.setdefault(file.path.rpartition("/")[0], []).append(listed)
    return [FileFolder(path, tuple(found[path])) for path in sorted(found)]


def kind_of(event_type: str) -> EventKind:
    """Of a type of event, such as `checkpoint.saved`. KeyError: there is no such type."""
    return _SUBJECTS[event_type.partition(".")[0]]


def newest_of(kind: EventKind, events: Sequence[Event], limit: int) -> tuple[list[Event], int | None]:
    """The newest events of a kind, newest first; and the number before which there are more, if there are any."""
    found = [
        event
        for event in reversed(events)
        if not kind or (event.fact.level != "info" if kind == "warnings" else kind_of(event.type) == kind)
    ]
    return found[:limit], found[limit - 1].number if len(found) > limit else None
