"""The run directory: everything a job leaves on disk, and the truth about it (architecture.md: Truth).

Appends to events.jsonl go through `RunDir.append`: under `events.lock`, with a torn last line cut, legality checked
against the events before, numbered without gap, fsynced. What callers decide, they decide inside the lock. The last
part sets a directory right that cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from jobs.attempt import Finished, Heartbeat, Noted, parse_line
from jobs.disk.event_log import Decision, event_line, event_log, read_event, restore_hint, unreadable
from jobs.disk.files import (
    NO_FILE,
    read_regular,
    regular,
    sync_folder,
    whole_lines,
    write_atomically,
    write_synced,
)
from jobs.errors import Damaged, NewerFormat, NotFound
from jobs.events import AnyFact, Event, JobRepaired, JobSubmitted
from jobs.metrics import MetricRow
from jobs.plan import Plan
from jobs.preview import FILE as PREVIEW
from jobs.preview import DataPreview
from jobs.record import JobRecord, apply, fold
from jobs.spec import JobSpec, canonical_sha256
from jobs.state import Status
from jobs.version import VERSION

# -- metrics file ------------------------------------------------------------------------------------------------------
# metrics.jsonl as a file.

log = logging.getLogger("longhaul.metrics")


def parse_row(line: bytes, file: Path) -> MetricRow | None:
    """The row in a line of `file`; None, with a warning in the log, where the line is damaged: readers pass it over."""
    try:
        return MetricRow.model_validate_json(line)
    except ValidationError as error:
        log.warning("%s has a line that is no row of metrics: %s", file, error.errors()[0]["msg"])
        return None


def read_metrics(file: Path) -> list[MetricRow]:
    """The rows, in order of step; of two for a step the later one. None where there is no file."""
    try:
        lines = whole_lines(read_regular(file))
    except FileNotFoundError:
        return []
    by_step = {row.step: row for line in lines if (row := parse_row(line, file)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def last_metrics(file: Path, reach: int = 65_536) -> MetricRow | None:
    """The last row, looked for in the last `reach` bytes. Raises OSError."""
    with open(file, "rb", opener=regular) as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - reach))
        lines = whole_lines(handle.read())
    return next((row for line in reversed(lines) if (row := parse_row(line, file)) is not None), None)


def truncate_metrics(file: Path, step: int) -> None:
    """Remove the rows after `step`, which the attempt that begins there writes again, and damaged lines.

    The file is always replaced: a reader gets the old rows or the new ones, never a mixture, and a row that an attempt
    which is over was writing goes into the old file. Where the disk has no room for that the rows stay, and the later
    row of a step counts.
    """
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return
    kept: dict[int, bytes] = {}
    for line in whole_lines(raw):
        row = parse_row(line, file)
        if row is not None and row.step <= step:
            kept[row.step] = line + b"\n"
    try:
        write_atomically(file, b"".join(kept[each] for each in sorted(kept)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        log.error("%s keeps its rows after step %d: there is no room on the disk to replace it", file, step)


# -- rundir ------------------------------------------------------------------------------------------------------------

Parsed = TypeVar("Parsed")


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
        """Whether the job exists, intact or damaged."""
        return self.events_file.exists() or self.spec_file.exists()

    def has_model(self) -> bool:
        """Whether the weights that the job delivered are there: not before its end, and not once they are removed."""
        return self.model.is_dir()

    def has_trained(self, record: JobRecord) -> bool:
        """Whether an attempt has begun: by the events, or by the files it left if a repair has cut the events off."""
        return max(record.attempt, self.newest_attempt()) > 0

    def newest_attempt(self) -> int:
        """The newest attempt that left a file, even if a repair has cut it off the events; 0: none."""
        names = [file.stem for file in self.path.glob("attempts/*.jsonl")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def held(self) -> bool:
        """Whether a trainer holds the directory's lock: then the job is running, whatever its lease says."""
        try:
            with open(self.lock_file, "rb", opener=regular) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
        return False

    def spec(self) -> JobSpec:
        """What the user asked for."""
        return self._parsed(self.spec_file, JobSpec.model_validate_json)

    def spec_json(self) -> object:
        """What the user asked for, whatever version wrote it."""
        return self._parsed(self.spec_file, from_json)

    def spec_sha256(self) -> str:
        """What checkpoints are bound to: spec.json as it was written, without the keys of later versions."""
        return canonical_sha256(self.spec_json())

    def plan(self) -> Plan:
        """plan.json as written by check and prepare."""
        return self._parsed(self.plan_file, Plan.model_validate_json)

    def plan_is_final(self) -> bool:
        """Whether an attempt has used plan.json: its checkpoints continue, and nothing is decided again."""
        return self.plan_file.exists() and self.plan().data.complete and self.has_trained(self.record())

    def write_plan(self, plan: Plan) -> None:
        """Replace plan.json atomically."""
        write_atomically(self.plan_file, plan.model_dump_json(indent=1).encode() + b"\n")

    def preview(self) -> DataPreview:
        """preview.json as written by check and prepare."""
        return self._parsed(self.path / PREVIEW, DataPreview.model_validate_json)

    def write_preview(self, preview: DataPreview) -> None:
        """Replace preview.json atomically."""
        write_atomically(self.path / PREVIEW, preview.model_dump_json(indent=1).encode() + b"\n")

    def spec_text(self) -> str:
        """spec.json as it is; '' if it cannot be read."""
        try:
            self.spec()
            return read_regular(self.spec_file).decode()
        except (Damaged, NotFound):
            return ""

    def _parsed(self, file: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
        try:
            return parse(read_regular(file))
        except FileNotFoundError:
            if file == self.plan_file or not self.exists():
                raise NotFound(f"there is no {file.name} of job {self.id}") from None
            raise Damaged(f"{file.name} is gone", hint=restore_hint(self.id, file.name)) from None
        except OSError as error:
            raise unreadable(file, error) from None
        except ValueError as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            json = isinstance(error, ValidationError) and error.errors()[0]["type"] != "json_invalid"
            if json and (version := self._version()) not in ("", VERSION):
                raise NewerFormat(
                    f"{file.name} cannot be read: {why}; Longhaul {version} made the job, this is {VERSION}",
                    hint=f"run Longhaul {version}, or put {file.name} back from a backup",
                ) from error
            raise Damaged(f"{file.name} cannot be read: {why}", hint=restore_hint(self.id, file.name)) from error

    def _version(self) -> str:
        """The version of Longhaul that made the directory; '' if its first event does not say."""
        try:
            first = read_event(read_regular(self.events_file).partition(b"\n")[0]).fact
        except (Damaged, OSError):
            return ""
        return first.version if isinstance(first, JobSubmitted) else ""

    # -- whether it is intact -----------------------------------------------------------------------------------

    def verified(self) -> JobRecord:
        """The sum of the events. Raises Damaged where any of the three files that a job needs cannot be read."""
        record = self.record()
        self.verify_files(record)
        return record

    def verify_files(self, record: JobRecord) -> None:
        """Raise Damaged if spec.json or plan.json cannot be read. Once a job is over they only have to be JSON.

        A missing plan.json is damage once an attempt has used it; before that, check and prepare write it.
        """
        over = record.status.terminal
        self._parsed(self.spec_file, from_json if over else JobSpec.model_validate_json)
        if self.plan_file.exists():
            self._parsed(self.plan_file, from_json if over else Plan.model_validate_json)
        elif not over and self.newest_attempt():
            raise Damaged("plan.json is gone", hint=restore_hint(self.id, "plan.json"))

    def state(self) -> object:
        """A value that changes when one of the three files does; costs three stats."""
        found = []
        for file in (self.events_file, self.spec_file, self.plan_file):
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                found.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns))
        return found

    # -- events ----------------------------------------------------------------------------------------------

    def events(self, after: int = 0) -> list[Event]:
        """Events with numbers above `after`; a torn last line is not one."""
        return event_log(self.events_file).events(after)

    def record(self, *, from_server: bool = False) -> JobRecord:
        """The sum of the events. Reads those that are new to this process; `from_server` as in `EventLog.record`."""
        return event_log(self.events_file).record(from_server=from_server)

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
        Raises Conflict, with nothing written, when a fact may not follow, and OSError, with nothing written, when the
        disk does not take it. Once it is on disk nothing is raised: what `project` could not do is left to reconcile.
        """
        return event_log(self.events_file).append(decide, attempt, project)

    @contextlib.contextmanager
    def locked(self) -> Iterator[list[Event]]:
        """The events, while nobody can append to them or remove the directory."""
        with event_log(self.events_file).locked():
            yield self.events()

    # -- metrics ---------------------------------------------------------------------------------------------

    def metrics(self) -> list[MetricRow]:
        """Rows in order of step; where a step was logged twice, the later one."""
        return read_metrics(self.metrics_file)

    # -- what a trainer says ---------------------------------------------------------------------------------

    def attempt_lines(self, name: int | str) -> list[Heartbeat | Noted | Finished]:
        """What the trainer of that attempt has written so far."""
        file = self.attempt_file(name)
        lines = whole_lines(read_regular(file)) if file.exists() else []
        return [parsed for line in lines if (parsed := parse_line(line, file)) is not None]


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
        write_synced(temporary.events_file, event_line(event))
        sync_folder(temporary.path)
        os.rename(temporary.path, final.path)
    except OSError:
        shutil.rmtree(temporary.path, ignore_errors=True)
        if final.exists():
            return final, False
        raise
    sync_folder(runs)
    return final, True


def submitted_under(runs: Path, key: str) -> tuple[str, str] | None:
    """(id, body hash) of the job that was submitted with this Idempotency-Key. Reads the first event of every job."""
    for run in list_runs(runs):
        with contextlib.suppress(OSError, Damaged), open(run.events_file, "rb", opener=regular) as file:
            first = read_event(file.readline())
            fact = first.fact
            if isinstance(fact, JobSubmitted) and fact.idempotency_key == key and first.job == run.id:
                return run.id, fact.body_sha256 or ""
    return None


def list_runs(runs: Path) -> list[RunDir]:
    """All run directories, oldest id first. Folders that cannot be entered are left out."""
    found = [RunDir(entry.path) for entry in os.scandir(runs) if not entry.name.startswith((".", "tmp-"))]
    return sorted(
        (run for run in found if os.access(run.events_file, os.R_OK) or os.access(run.spec_file, os.R_OK)),
        key=lambda run: run.id,
    )


# -- repair --------------------------------------------------------------------------------------------------


repair_log = logging.getLogger("longhaul.repair")


@dataclass(frozen=True)
class Repair:
    """What was done."""

    message: str
    """For people: what was damaged, what is lost."""
    backups: list[str]
    """Names of the copies of damaged files, beside these."""


def repair(run: RunDir) -> Repair:
    """Cut events.jsonl back to its last whole event, and take away a plan.json that can be made again; with backups.

    A job whose plan.json is damaged before it has trained is checked and prepared again: it is cut back to its first
    event. Of an open job `job.repaired` takes the place of what is cut off. Raises Damaged, with nothing changed, where
    what is left is not enough to resume from. Raises NotFound.
    """
    events = event_log(run.events_file)
    with events.locked():
        events.forget()
        try:
            run.verified()
        except NewerFormat as error:
            raise _beyond(run, error) from None
        except Damaged as error:
            why = error
        else:
            return Repair(f"job {run.id} is whole: nothing was changed", [])
        record, end = events.whole()
        if not record.number or not run.spec_text():
            raise _beyond(run, why)
        plan: Damaged | None = None
        try:
            run.verify_files(record)
        except Damaged as error:
            plan = error
            if not record.status.terminal:
                if run.has_trained(record):
                    hint = restore_hint(run.id, "plan.json")
                    raise _beyond(run, Damaged(f"{plan}, and the job has trained by it", hint=hint)) from None
                first = whole_lines(run.events_file.read_bytes())[0]
                record, end = fold(run.id, [read_event(first)]), len(first) + 1
        backups, notes = [], [f"job {run.id} was damaged: {why}"]
        if (size := run.events_file.stat().st_size) > end:
            backups.append(_backup(run.events_file))
            cut = _cut(run, record, end)
            notes.append(
                f"events.jsonl is cut back to event {record.number}: {cut} lines ({size - end:,} bytes) are lost"
            )
        if plan is not None:
            backups.append((copy := _free(run.plan_file)).name)
            os.rename(run.plan_file, copy)  # whatever it is: a folder as well
            notes.append("plan.json is taken away" + ("" if record.status.terminal else ": it is made again"))
        sync_folder(run.path)
        status = events.record().status
    notes.append(f"the job is {status} now")
    if status in (Status.VALIDATING, Status.QUEUED):
        notes[-1] += f", and a worker will take it (`longhaul cancel {run.id}` if it is not to continue)"
    notes.append(f"copies of what was damaged: {' and '.join(backups)}")
    repair_log.warning("%s", "; ".join(notes))
    return Repair("; ".join(notes), backups)


def _beyond(run: RunDir, why: Damaged) -> Damaged:
    return type(why)(f"job {run.id} cannot be repaired: {why}", hint=why.hint)


def _free(file: Path) -> Path:
    """`NAME.damaged-1`, or the next number that is free."""
    number = 1
    while os.path.lexists(copy := file.with_name(f"{file.name}.damaged-{number}")):
        number += 1
    return copy


def _backup(file: Path) -> str:
    """Copy a file; returns the copy's name."""
    copy = _free(file)
    shutil.copyfile(file, copy)
    with open(copy, "rb") as handle:
        os.fsync(handle.fileno())
    sync_folder(file.parent)
    return copy.name


def _cut(run: RunDir, record: JobRecord, end: int) -> int:
    """Cut the events back to `record`, which ends there; returns the number of lines that are gone, with a torn one."""
    content = run.events_file.read_bytes()
    content, gone = content[:end], len(content[end:].splitlines())
    if not record.status.terminal:
        attempt = max(record.attempt, run.newest_attempt())
        fact = JobRepaired(lines_lost=gone)
        content += event_line(Event(number=record.number + 1, job=run.id, at=time.time(), attempt=attempt, fact=fact))
    write_atomically(run.events_file, content)
    return gone
