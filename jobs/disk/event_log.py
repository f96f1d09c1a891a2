"""events.jsonl: an event a line, each with its CRC; read once, appended to under a lock.

A process keeps the sum of the lines that it has read (`EventLog`), so the cost of an append depends on what any process
has appended since the last one, not on the size of the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from pydantic import BaseModel, ValidationError

from jobs.disk.files import START, FilePosition, regular, whole_lines, write_whole
from jobs.errors import Conflict, Damaged, NewerFormat, NotFound
from jobs.events import AnyFact, AttemptStarted, Event, JobSubmitted
from jobs.process.secrets import redact
from jobs.record import JobRecord, apply
from jobs.version import FORMAT, VERSION

log = logging.getLogger("longhaul.rundir")
Decision = Callable[[JobRecord], Sequence[AnyFact]]
MOST_KEPT = 256
"""Jobs of which a process keeps what it has read."""
_CRC = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')


def event_line(event: BaseModel) -> bytes:
    """The line of an event. Its last key is the CRC of what the line is without that key."""
    body = event.model_dump_json().encode()
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def checked(line: bytes) -> bytes:
    """The JSON of a line, without its CRC. Raises Damaged where that does not match."""
    if found := _CRC.search(line):
        line = line[: found.start()] + b"}"
        if zlib.crc32(line) != int(found[1], 16):
            raise Damaged("its CRC does not match")
    return line


def read_event(line: bytes) -> Event:
    """The event of a line. Raises Damaged, and NewerFormat where its CRC fits and this version cannot read it."""
    found = _CRC.search(line)
    line = checked(line)
    try:
        event = Event.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"there is no event {first['ctx']['tag']}" if first["type"] == "union_tag_invalid" else first["msg"]
        raise _newer(why, _version(line)) if found else Damaged(why) from error
    if isinstance(event.fact, JobSubmitted) and event.fact.format_version > FORMAT:
        raise _newer(f"the run directory has format {event.fact.format_version}", event.fact.version)
    return event


def _version(line: bytes) -> str:
    """The version of Longhaul that wrote this first event; '' for any other event."""
    fact = json.loads(line).get("fact")
    return str(fact.get("version", "")) if isinstance(fact, dict) else ""


def _newer(why: str, version: str = "") -> NewerFormat:
    return NewerFormat(
        f"a newer version of Longhaul wrote it ({why}); this is {VERSION}, which reads up to format {FORMAT}",
        hint=f"run Longhaul {version or 'in the version that wrote it'}: nothing is lost",
    )


@dataclass(frozen=True)
class _Read:
    """The lines of a file up to a place, and what they add up to."""

    state: tuple[int, int, int]
    """inode, bytes and mtime (ns) of the file then: while they are the same, nothing needs to be read."""
    place: FilePosition
    record: JobRecord


class EventLog:
    """The events of one job, for any thread. Raises NotFound when the file is missing, and Damaged."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.job = file.parent.name
        self._read: _Read | None = None

    def events(self, after: int = 0) -> list[Event]:
        """Events with numbers above `after`; a torn last line is not one."""
        with self._open() as file:
            lines = whole_lines(self._rest(file))
        try:
            return [self._event(line, number) for number, line in enumerate(lines[after:], after + 1)]
        except Damaged:
            self.forget()
            raise

    def forget(self) -> None:
        """The next read begins at the first line: one that continues sees no damage before its position."""
        self._read = None

    def record(self, *, from_server: bool = False) -> JobRecord:
        """The sum of the events. `from_server`: opened as if to write, for which a client of NFS asks its server."""
        with self._open("r+b" if from_server else "rb") as file:
            return self._read_on(file).record

    def whole(self) -> tuple[JobRecord, int]:
        """What the events before the first damage add up to, and where in the file they end."""
        record, end = JobRecord(id=self.job), 0
        try:
            with self._open() as file:
                for line in whole_lines(self._rest(file)):
                    record, end = self._followed(record, line), end + len(line) + 1
        except Damaged:
            self.forget()
        return record, end

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While nobody else can append, or remove the directory."""
        try:
            lock = open(self.file.with_name("events.lock"), "ab", opener=regular)  # noqa: SIM115 - its own errors alone are ours
        except FileNotFoundError:
            raise self._missing() from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.file.parent.exists():  # taken away while we waited
                raise self._missing()
            yield

    def append(
        self,
        decide: Decision | Sequence[AnyFact],
        attempt: int | None,
        project: Callable[[JobRecord, list[Event]], None] | None,
    ) -> tuple[JobRecord, list[Event]]:
        """As `RunDir.append` says."""
        with self.locked(), self._open("r+b") as file:
            # Of a file whose lock it has lost, a client of NFS refuses what it had still to write.
            fcntl.flock(file, fcntl.LOCK_EX)
            read = self._read_on(file)
            record = read.record
            facts = decide(record) if callable(decide) else decide
            new: list[Event] = []
            for fact in facts:
                on_behalf = record.attempt if attempt is None else attempt
                if isinstance(fact, AttemptStarted) and attempt is None:
                    on_behalf = record.attempt + 1
                event = Event(number=record.number + 1, job=self.job, at=time.time(), attempt=on_behalf, fact=fact)
                event = _clean(event)
                record = apply(record, event)
                new.append(event)
            if new:
                if _state(file) != read.state:
                    raise Conflict(f"job {self.job}: this box was cut off, and another one has written events since")
                lines = b"".join(map(event_line, new))
                file.truncate(file.seek(read.place.offset))  # a torn last line
                write_whole(file, lines, sync=True)
                self._read = _Read(_state(file), read.place.after(lines), record)
                if project is not None:
                    try:
                        project(record, new)
                    except Exception:  # the events are on disk, whatever happens now: no error may say otherwise
                        log.exception("job %s: events up to %d wait for reconcile", self.job, record.number)
            return record, new

    @contextlib.contextmanager
    def _open(self, mode: str = "rb") -> Iterator[FileIO]:
        try:
            file = FileIO(self.file, mode, opener=regular)
        except FileNotFoundError:
            raise self._missing() from None
        except OSError as error:
            raise unreadable(self.file, error) from None
        with file:
            yield file

    def _rest(self, file: FileIO) -> bytes:
        try:
            return file.readall()
        except OSError as error:
            raise unreadable(self.file, error) from None

    def _read_on(self, file: FileIO) -> _Read:
        """Read the whole lines behind those that are known; all of them, where those are not there any more."""
        known, state = self._read, _state(file)
        if known is not None and known.state == state:
            return known
        # A file that has changed and has not grown was edited, or cut.
        grown = known is not None and known.state[0] == state[0] and known.state[1] < state[1]
        if known is None or not grown or known.place.found_in(file) == START:
            known = _Read(state, START, JobRecord(id=self.job))
            file.seek(0)
        raw = self._rest(file)
        whole = raw[: raw.rfind(b"\n") + 1]
        place, record = known.place, known.record
        if whole:
            place = place.after(whole)
            for line in whole_lines(whole):
                record = self._followed(record, line)
        self._read = read = _Read(state, place, record)
        return read

    def _followed(self, record: JobRecord, line: bytes) -> JobRecord:
        number = record.number + 1
        event = self._event(line, number)
        try:
            return apply(record, event)
        except (Conflict, Damaged) as error:
            raise Damaged(f"line {number} of events.jsonl cannot follow: {error}", hint=self._hint(number)) from error

    def _event(self, line: bytes, number: int) -> Event:
        try:
            event = read_event(line)
        except NewerFormat as error:
            raise NewerFormat(f"line {number} of events.jsonl cannot be read: {error}", hint=error.hint) from error
        except Damaged as error:
            raise Damaged(f"line {number} of events.jsonl is not an event: {error}", hint=self._hint(number)) from error
        if event.job != self.job:
            raise Damaged(f"it is a copy: its events are those of {event.job}", hint=self._hint(1))
        return event

    def _hint(self, number: int) -> str:
        """What to do when this line is damaged."""
        if number == 1:
            return f"nothing before it is left to resume from: {restore_hint(self.job, 'events.jsonl')}"
        return f"`longhaul repair {self.job}` keeps the {number - 1} events before it, after a backup"

    def _missing(self) -> NotFound | Damaged:
        if self.file.with_name("spec.json").exists():
            return Damaged("events.jsonl is gone", hint=restore_hint(self.job, "events.jsonl"))
        return NotFound(f"there is no job {self.job}")


def restore_hint(job: str, name: str) -> str:
    """What to do when a file cannot be repaired."""
    delete = f"`longhaul delete {job}` (first stop the worker that holds it)"
    return f"put {name} back from a backup, or remove the job: {delete}"


OF_ALL_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a full or read-only disk, or of a process at its limits: no file is damaged."""


def unreadable(file: Path, error: OSError) -> Damaged | OSError:
    """What an error of a file that is there means for its job: damage, unless every other file would have it, too."""
    if error.errno in OF_ALL_FILES:
        return error
    job = file.parent.name
    return Damaged(
        f"{file.name} cannot be opened or read: {error.strerror}",
        hint=f"give it back to the user that Longhaul runs as, or {restore_hint(job, file.name)}",
    )


def _state(file: FileIO) -> tuple[int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(MOST_KEPT)
def event_log(file: Path) -> EventLog:
    """The log of this file: the same object as long as it is in use."""
    return EventLog(file)


def _clean(event: Event) -> Event:
    """Without secrets, which a library may have put into a message: events are kept, and sent to every sink."""
    text = event.model_dump_json()
    clean = redact(text)
    return event if clean == text else Event.model_validate_json(clean)
