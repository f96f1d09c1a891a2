"""The run directory: everything a job leaves on disk, and the truth about it (design §5, §6).

Appends to events.jsonl go through `RunDir.append`: under `events.lock`, with a torn last line cut, legality checked
against the events before, numbered without gap, fsynced. What callers decide, they decide inside the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from jobs.attempt import Finished, Heartbeat, Noted, readable
from jobs.errors import Damaged, NotFound
from jobs.events import AnyFact, AttemptStarted, Event, JobRequested, JobSubmitted
from jobs.files import read_rows, sync_folder, whole_lines, write_atomically, write_synced
from jobs.metrics import MetricRow
from jobs.plan import Plan, read_plan
from jobs.record import JobRecord, apply, fold
from jobs.secrets import redact
from jobs.spec import JobSpec
from jobs.state import Request, Status

log = logging.getLogger("longhaul.rundir")
Decision = Callable[[JobRecord], Sequence[AnyFact]]


class RunDir:
    """The directory of one job. Cheap to make; holds no open file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.id = self.path.name

    # fmt: off
    @property
    def spec_file(self) -> Path: return self.path / "spec.json"
    @property
    def plan_file(self) -> Path: return self.path / "plan.json"
    @property
    def events_file(self) -> Path: return self.path / "events.jsonl"
    @property
    def metrics_file(self) -> Path: return self.path / "metrics.jsonl"
    @property
    def trainer_log(self) -> Path: return self.path / "trainer.log"
    @property
    def request_file(self) -> Path: return self.path / "request"
    @property
    def checkpoints(self) -> Path: return self.path / "checkpoints"
    @property
    def model(self) -> Path: return self.path / "model"
    @property
    def sinks(self) -> Path: return self.path / "sinks"
    @property
    def lock_file(self) -> Path: return self.path / "lock"
    # fmt: on

    def attempt_file(self, name: int | str) -> Path:
        """What the trainer of attempt `name` (a number, or `check`, `prepare`) wrote."""
        return self.path / "attempts" / f"{name}.jsonl"

    def exists(self) -> bool:
        """Whether there is such a job."""
        return self.events_file.exists()

    def held(self) -> bool:
        """Whether a trainer holds the directory's lock: then the job is running, whatever its lease says."""
        try:
            with open(self.lock_file, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        except FileNotFoundError:
            pass
        return False

    def spec(self) -> JobSpec:
        """What the user asked for."""
        try:
            return JobSpec.model_validate_json(self.spec_file.read_bytes())
        except FileNotFoundError:
            raise NotFound(f"there is no job {self.id}") from None

    def plan(self) -> Plan:
        """plan.json as written by check and prepare."""
        return read_plan(self.plan_file)

    def write_plan(self, plan: Plan) -> None:
        """Replace plan.json atomically."""
        write_atomically(self.plan_file, plan.model_dump_json(indent=1).encode() + b"\n")

    # -- events ----------------------------------------------------------------------------------------------

    def events(self, after: int = 0) -> list[Event]:
        """Events with numbers above `after`; a torn last line is not one."""
        try:
            lines = whole_lines(self.events_file.read_bytes())
        except FileNotFoundError:
            raise NotFound(f"there is no job {self.id}") from None
        return self._parsed(lines, after)

    def record(self) -> JobRecord:
        """The sum of the events."""
        return fold(self.id, self.events())

    def append(
        self,
        decide: Decision | Sequence[AnyFact],
        *,
        attempt: int | None = None,
        project: Callable[[JobRecord, list[Event]], None] | None = None,
    ) -> tuple[JobRecord, list[Event]]:
        """Append facts; returns the record after them and the new events.

        `decide` is the facts, or a function of the record as it stands, called under the lock. `attempt` is the attempt
        on whose behalf the caller acts (Superseded is raised once a later one has started); None: the current one.
        `project` is called under the lock with the new record and events: order in Redis is order in the file.
        Raises Conflict, with nothing written, when a fact may not follow.
        """
        with self._events_open() as (file, events):
            record = fold(self.id, events)
            facts = decide(record) if callable(decide) else decide
            new: list[Event] = []
            for fact in facts:
                on_behalf = record.attempt if attempt is None else attempt
                if isinstance(fact, AttemptStarted) and attempt is None:
                    on_behalf = record.attempt + 1
                event = Event(number=record.number + 1, job=self.id, at=time.time(), attempt=on_behalf, fact=fact)
                event = _clean(event)
                record = apply(record, event)
                new.append(event)
            if new:
                file.write(b"".join(event.model_dump_json().encode() + b"\n" for event in new))
                file.flush()
                os.fsync(file.fileno())
                self._mirror_request(record, new)
                if project is not None:
                    project(record, new)
            return record, new

    def _mirror_request(self, record: JobRecord, new: list[Event]) -> None:
        # The trainer looks at this file between micro-batches. It is written and removed under events.lock, together
        # with the event that changes the request, so that no stale one can stop the next attempt.
        if record.status is Status.RUNNING and record.request is not Request.NONE:
            if any(isinstance(event.fact, JobRequested) for event in new):
                write_atomically(self.request_file, record.request.value.encode() + b"\n")
        else:
            self.request_file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[list[Event]]:
        """The events, while nobody can append to them, nor take the directory away."""
        with self._events_open() as (_, events):
            yield events

    @contextlib.contextmanager
    def _events_open(self) -> Iterator[tuple[BinaryIO, list[Event]]]:
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(open(self.path / "events.lock", "ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                file = stack.enter_context(open(self.events_file, "r+b"))
            except FileNotFoundError:  # never there, or taken away while we waited
                raise NotFound(f"there is no job {self.id}") from None
            raw = file.read()
            lines = whole_lines(raw)
            end = sum(len(line) + 1 for line in lines)
            if end < len(raw):
                file.truncate(end)
            file.seek(end)
            yield file, self._parsed(lines)

    def _parsed(self, lines: list[bytes], after: int = 0) -> list[Event]:
        try:
            events = [Event.model_validate_json(line) for line in lines[after:]]
        except ValidationError as error:
            raise Damaged(f"{self.events_file} has a line that is no event: {error.errors()[0]['msg']}") from error
        if events and events[0].job != self.id:
            raise Damaged(f"{self.path} is a copy: its events are those of {events[0].job}")
        return events

    # -- metrics ---------------------------------------------------------------------------------------------

    def metrics(self) -> list[MetricRow]:
        """Rows in order of step; where a step was logged twice, the later one."""
        by_step = {row.step: row for row in read_rows(self.metrics_file, MetricRow)}
        return [by_step[step] for step in sorted(by_step)]

    # -- what a trainer says ---------------------------------------------------------------------------------

    def attempt_lines(self, name: int | str) -> list[Heartbeat | Noted | Finished]:
        """What the trainer of that attempt has written so far."""
        file = self.attempt_file(name)
        lines = whole_lines(file.read_bytes()) if file.exists() else []
        return [said for line in lines if (said := readable(line, file)) is not None]


def create(runs: Path, job: str, spec: JobSpec, first: AnyFact) -> tuple[RunDir, bool]:
    """Make the directory of a new job: as `tmp-…`, complete and on disk, then renamed into place.

    Returns the directory and whether this call made it: of several calls for one id (a repeated POST), one wins.
    """
    final = RunDir(runs / job)
    if final.exists():
        return final, False
    temporary = RunDir(runs / f"tmp-{job}-{uuid.uuid4().hex[:8]}")
    event = Event(number=1, job=job, at=time.time(), fact=first)
    apply(JobRecord(id=job), event)
    try:
        for folder in (temporary.path, temporary.path / "attempts", temporary.checkpoints, temporary.sinks):
            folder.mkdir(parents=True)
        write_synced(temporary.spec_file, spec.model_dump_json(indent=1).encode() + b"\n")
        write_synced(temporary.events_file, event.model_dump_json().encode() + b"\n")
        sync_folder(temporary.path)
        os.rename(temporary.path, final.path)
    except OSError:
        shutil.rmtree(temporary.path, ignore_errors=True)
        if final.exists():
            return final, False
        raise
    sync_folder(runs)
    return final, True


def _clean(event: Event) -> Event:
    """Without secrets, which a library may have put into a message: an event is told to everybody, and kept."""
    told = event.model_dump_json()
    clean = redact(told)
    return event if clean == told else Event.model_validate_json(clean)


def submitted_under(runs: Path, key: str) -> tuple[str, str] | None:
    """(id, body hash) of the job that was submitted with this Idempotency-Key. Reads the first event of every job."""
    for run in list_runs(runs):
        with contextlib.suppress(OSError, ValidationError), open(run.events_file, "rb") as file:
            first = Event.model_validate_json(file.readline())
            fact = first.fact
            if isinstance(fact, JobSubmitted) and fact.idempotency_key == key and first.job == run.id:
                return run.id, fact.body_sha256 or ""
    return None


def list_runs(runs: Path) -> list[RunDir]:
    """All run directories, oldest id first. A folder that may not be entered is none of ours."""
    found = [RunDir(entry.path) for entry in os.scandir(runs) if not entry.name.startswith((".", "tmp-"))]
    return sorted((run for run in found if os.access(run.events_file, os.R_OK)), key=lambda run: run.id)
