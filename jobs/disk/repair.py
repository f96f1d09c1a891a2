"""How a damaged run directory is made readable again: what is whole continues, what is not is kept beside it."""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from jobs.disk.event_log import event_line, event_log, read_event, restore_hint
from jobs.disk.files import sync_folder, whole_lines, write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import Damaged, NewerFormat
from jobs.events import Event, JobRepaired
from jobs.record import JobRecord, fold
from jobs.state import Status

log = logging.getLogger("longhaul.repair")


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
    log.warning("%s", "; ".join(notes))
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
