"""The directory of a sweep, `runs/.sweeps/<sweep>/`: sweep.json and events.jsonl, which are the truth about it."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from io import BufferedReader, FileIO
from pathlib import Path

from pydantic import ValidationError

from jobs.disk.event_log import checked, event_line
from jobs.disk.files import read_regular, regular, sync_folder, whole_lines, write_synced, write_whole
from jobs.errors import Conflict, Damaged, NotFound
from jobs.sweeps.events import SweepEvent, SweepFact, SweepSubmitted
from jobs.sweeps.record import SweepRecord, fold
from jobs.sweeps.spec import SweepSpec

FOLDER = ".sweeps"
"""Of the runs directory."""
_ID = re.compile(r"sweep-[a-z0-9_-]{1,60}")
Decision = Callable[[SweepRecord], Sequence[SweepFact]]


class SweepDir:
    """The directory of one sweep. Cheap to make; holds no open file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    @property
    def events_file(self) -> Path:
        """Its events."""
        return self.path / "events.jsonl"

    @property
    def sinks(self) -> Path:
        """Cursors of the sinks that report it."""
        return self.path / "sinks"

    def spec(self) -> SweepSpec:
        """What the user asked for. Raises Damaged, NotFound."""
        try:
            return _parsed(read_regular(self.path / "sweep.json"))
        except FileNotFoundError:
            raise NotFound(f"there is no sweep {self.id}") from None
        except (OSError, ValueError) as error:
            raise Damaged(f"sweep.json of sweep {self.id} cannot be read: {error}") from error

    def state(self) -> tuple[int, int, int]:
        """inode, bytes and mtime (ns) of its events: while they are the same, so is its record. Raises NotFound."""
        try:
            found = self.events_file.stat()
        except FileNotFoundError:
            raise NotFound(f"there is no sweep {self.id}") from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def submitted(self) -> SweepSubmitted:
        """Its first event, without reading the others. Raises Damaged, NotFound."""
        with BufferedReader(self._open("rb")) as file:
            first = _event(file.readline().rstrip(b"\n"), self.id, 1).fact
        if not isinstance(first, SweepSubmitted):
            raise Damaged(f"sweep {self.id} begins with {first.type}")
        return first

    def record(self) -> SweepRecord:
        """The sum of its events: a copy for the caller. Raises Damaged, NotFound."""
        return fold(self.id, self.events())

    def events(self) -> list[SweepEvent]:
        """In order; a torn last line is not one."""
        with self._open("rb") as file:
            return self._events(file.readall())

    def append(self, decide: Decision | Sequence[SweepFact]) -> SweepRecord:
        """Append facts, on disk when this returns, and return the record with them.

        `decide`: the facts, or a function of the record as it stands, called under the lock of the file. Raises
        Conflict when the sweep has ended, and OSError, with nothing written, when the disk does not take them.
        """
        with self._open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            raw = file.readall()
            record, new = fold(self.id, self._events(raw)), list[SweepEvent]()
            for fact in decide(record) if callable(decide) else decide:
                if record.ended is not None:
                    raise Conflict(f"sweep {self.id} has ended")
                event = SweepEvent(number=record.number + 1, sweep=self.id, at=time.time(), fact=fact)
                record.apply(event)
                new.append(event)
            if new:
                file.truncate(file.seek(raw.rfind(b"\n") + 1))  # a torn last line
                write_whole(file, b"".join(map(event_line, new)), sync=True)
            return record

    def _events(self, raw: bytes) -> list[SweepEvent]:
        return [_event(line, self.id, number) for number, line in enumerate(whole_lines(raw), 1)]

    def _open(self, mode: str) -> FileIO:
        try:
            return FileIO(self.events_file, mode, opener=regular)
        except FileNotFoundError:
            raise NotFound(f"there is no sweep {self.id}") from None
        except OSError as error:
            raise Damaged(f"events.jsonl of sweep {self.id} cannot be read: {error}") from error


def create(runs: Path, sweep: str, spec: SweepSpec, first: SweepFact) -> SweepDir:
    """Make the directory of a new sweep: as `tmp-…`, complete and on disk, then renamed into place."""
    folder = runs / FOLDER
    folder.mkdir(exist_ok=True)
    temporary = folder / f"tmp-{sweep}-{uuid.uuid4().hex[:8]}"
    event = SweepEvent(number=1, sweep=sweep, at=time.time(), fact=first)
    try:
        temporary.mkdir()
        write_synced(
            temporary / "sweep.json",
            _holding_out(spec, "auto").model_dump_json(indent=1, by_alias=True).encode() + b"\n",
        )
        write_synced(temporary / "events.jsonl", event_line(event))
        sync_folder(temporary)
        os.rename(temporary, folder / sweep)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder)
    return SweepDir(folder / sweep)


def find(runs: Path, sweep: str) -> SweepDir:
    """An existing sweep. The id is checked before it becomes part of a path. Raises NotFound."""
    found = SweepDir(runs / FOLDER / sweep) if _ID.fullmatch(sweep) else None
    if found is None or not found.events_file.exists():
        raise NotFound(f"there is no sweep {sweep[:80]}")
    return found


def list_sweeps(runs: Path) -> list[SweepDir]:
    """All sweeps, oldest first."""
    try:
        names = sorted(name for name in os.listdir(runs / FOLDER) if _ID.fullmatch(name))
    except FileNotFoundError:
        return []
    return [SweepDir(runs / FOLDER / name) for name in names]


@functools.lru_cache(maxsize=64)
def _parsed(raw: bytes) -> SweepSpec:
    return _holding_out(SweepSpec.model_validate_json(raw), 0.01)


def _holding_out(spec: SweepSpec, validation: float | str) -> SweepSpec:
    """With this `data.validation`, where the sweep says nothing of it: trials are compared on the same rows, also when
    another version, with another default, starts the next. Those that stored no value held out 1 %."""
    data = spec.job.get("data", {})
    if "validation" in data or "kind" in spec.space or spec.job.get("kind") == "evaluate":
        return spec
    return spec.model_copy(update={"job": {**spec.job, "data": {**data, "validation": validation}}})


@functools.lru_cache(maxsize=20_000)
def _read(line: bytes) -> SweepEvent:
    return SweepEvent.model_validate_json(checked(line))


def _event(line: bytes, sweep: str, number: int) -> SweepEvent:
    try:
        event = _read(line)
    except (Damaged, ValidationError) as error:
        raise Damaged(f"sweep {sweep}: line {number} of events.jsonl cannot be read: {error}") from error
    if event.sweep != sweep:
        raise Damaged(f"sweep {sweep}: line {number} of events.jsonl is of sweep {event.sweep}")
    return event
