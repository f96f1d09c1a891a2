"""What users can do to jobs: submit, clone, cancel, pause, resume, prioritise, delete; and how a job is found again.

What a state allows is decided under the lock of the run directory, in `jobs.store.append`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from jobs.errors import Conflict, Damaged, NotFound, StoreUnavailable
from jobs.events import AnyFact, JobCancelled, JobPaused, JobPrioritised, JobRequested, JobResumed
from jobs.queue import Tickets
from jobs.record import JobRecord
from jobs.removal import remove, set_aside
from jobs.rundir import Decision, RunDir
from jobs.spec import Part
from jobs.state import Request, Status
from jobs.store import Store, StoredJob
from jobs.wrong_spec import explain
from service.submissions import Submissions

log = logging.getLogger("longhaul.service")
_ID = re.compile(r"job-[a-z0-9_-]{1,60}")


class Change(Part):
    """What can be changed of a job that has not ended."""

    priority: Annotated[int, Field(ge=-100, le=100)]
    """Higher runs first."""


class Actions:
    """Everything that changes or finds a job. Raises the errors of `jobs.errors`."""

    def __init__(self, *, runs: Path, data: Path, uploads: Path, store: Store, tickets: Tickets) -> None:
        self.runs = runs
        self.store = store
        self._tickets = tickets
        self._submissions = Submissions(runs=runs, data=data, uploads=uploads, store=store, tickets=tickets)

    # -- submit, clone ------------------------------------------------------------------------------------------------

    def submit(self, body: object, *, key: str | None = None, dry_run: bool = False) -> StoredJob:
        """A new job; or, with an Idempotency-Key that came before with this body, the job of that time."""
        return self._stored(*self._submissions.submit(body, key=key, dry_run=dry_run))

    def clone(self, job: str, patch: object, *, key: str | None = None, dry_run: bool = False) -> StoredJob:
        """A new job like another, but for what the JSON merge patch says; the key as in `submit`."""
        return self._stored(*self._submissions.clone(self.run(job), patch, key=key, dry_run=dry_run))

    # -- cancel, pause, resume, prioritise, delete ---------------------------------------------------------------------

    def cancel(self, job: str) -> StoredJob:
        """At once, unless it runs: then the trainer is asked (once). Conflict when the job has ended."""

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            if record.status.terminal:
                raise Conflict(f"job {job} is {record.status} already: there is nothing to cancel")
            if record.status is Status.RUNNING:
                return [] if record.request is Request.CANCEL else [JobRequested(request="cancel")]
            return [JobCancelled(checkpoint=record.checkpoint)]

        return self._append(job, decide)

    def pause(self, job: str) -> StoredJob:
        """A queued job leaves the order; a running one is asked to checkpoint and stop. A paused one stays as it is."""

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            match record.status, record.request:
                case Status.QUEUED, _:
                    return [JobPaused()]
                case Status.RUNNING, Request.NONE:
                    return [JobRequested(request="pause")]
                case (Status.RUNNING, Request.PAUSE) | (Status.PAUSED, _):
                    return []
                case Status.RUNNING, _:
                    raise Conflict(f"job {job} is being cancelled: it cannot be paused any more")
                case Status.VALIDATING, _:
                    raise Conflict(f"job {job} is validating: it can be paused once it is queued")
            raise Conflict(f"job {job} is {record.status}: there is nothing to pause")

        return self._append(job, decide)

    def resume(self, job: str) -> StoredJob:
        """A paused job waits for a card again, at its old place; a pause that was only asked for is taken back."""

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            if record.status is Status.PAUSED:
                return [JobResumed()]
            if record.status is Status.RUNNING and record.request is Request.PAUSE:
                return [JobRequested(request="none")]
            raise Conflict(f"job {job} is {record.status} and not paused: there is nothing to resume")

        stored = self._append(job, decide)
        if stored.record.status is Status.QUEUED:
            self._tickets.add(stored.record.stage)
        return stored

    def change(self, job: str, body: object) -> StoredJob:
        """Give another priority: a waiting job moves in its order at once, a running one when it waits again."""
        try:
            priority = Change.model_validate(body).priority
        except ValidationError as error:
            raise explain(error, keys="the only key is `priority`, from -100 to 100") from None

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            if record.status.terminal:
                raise Conflict(f"job {job} is {record.status}: its priority means nothing any more")
            return [] if record.priority == priority else [JobPrioritised(priority=priority)]

        return self._append(job, decide)

    def delete(self, job: str) -> None:
        """Remove an ended job: its run directory, and all that Redis has of it, the Idempotency-Key too.

        The directory loses its name first: whoever dies in between leaves something that reconcile sweeps.
        """
        run = self.run(job)
        if self.store.upkeep.leased(job):
            raise Conflict(f"a worker has job {job} in hand: cancel it, or try again in a moment")
        try:
            aside = set_aside(run)
        except Damaged as error:
            raise Conflict(f"{error}; nobody can tell whether it has ended: remove its folder by hand") from None
        try:
            self.store.forget(job)
        except StoreUnavailable as error:
            log.warning("job %s is deleted, and reconcile will tell Redis: %s", job, error)
        remove(aside)
        log.info("job %s is deleted", job)

    def _append(self, job: str, decide: Decision) -> StoredJob:
        run = self.run(job)
        record, _ = self.store.append(run, decide)
        return self._stored(run, record)

    # -- find ---------------------------------------------------------------------------------------------------------

    def run(self, job: str) -> RunDir:
        """The run directory of an existing job. The id is checked before it becomes part of a path."""
        run = RunDir(self.runs / job) if _ID.fullmatch(job) else None
        if run is None or not run.exists():
            raise NotFound(f"there is no job {job[:80]}")
        return run

    def find(self, job: str) -> StoredJob:
        """What is known of a job; from its run directory while Redis has not heard of it yet."""
        if not _ID.fullmatch(job):
            raise NotFound(f"there is no job {job[:80]}")
        try:
            return self.store.get(job)
        except NotFound:
            run = self.run(job)
            return StoredJob(run.record(), run.spec().model_dump(mode="json"), None, None)

    def _stored(self, run: RunDir, record: JobRecord) -> StoredJob:
        """What Redis knows, but never less than `record`: the write to Redis may have failed."""
        try:
            stored = self.store.get(run.id)
        except (StoreUnavailable, NotFound):
            return StoredJob(record, run.spec().model_dump(mode="json"), None, None)
        return stored if stored.record.number >= record.number else replace(stored, record=record)
