"""Actions on jobs: submit, clone, cancel, pause, resume, prioritize, delete; and looking one up.

What a state allows is decided under the lock of the run directory, in `jobs.redis.store.append`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from jobs.disk.event_log import Decision, event_log
from jobs.disk.removal import move_away, remove
from jobs.disk.rundir import Repair, RunDir, last_metrics, repair
from jobs.errors import Conflict, Damaged, NotFound, Recovering, StoreUnavailable
from jobs.events import AnyFact, Event, JobPaused, JobPauseRequested, JobPauseWithdrawn, JobPriorityChanged, JobResumed
from jobs.frozen import Part
from jobs.record import JobRecord, cancellation
from jobs.redis.connection import Tickets
from jobs.redis.store import RawJob, Store, StoredJob, damage, read_spec
from jobs.state import Requested, Status
from jobs.sweeps.directory import find as find_sweep
from jobs.wrong_spec import explain
from service.files.confined import NoFile, content
from service.jobs.submissions import Submissions

Model = TypeVar("Model", bound=BaseModel)
log = logging.getLogger("longhaul.service")
_ID = re.compile(r"job-[a-z0-9_-]{1,60}")


class Change(Part):
    """What can be changed of a job that has not ended."""

    priority: Annotated[int, Field(ge=-100, le=100)]
    """Higher runs first."""


class Resumption(Part):
    """How a paused job is resumed."""

    from_scratch: bool = False
    """At step 0, without the checkpoints that it has: they are removed."""


class Actions:
    """Everything that changes or finds a job. Raises the errors of `jobs.errors`."""

    def __init__(self, *, runs: Path, data: Path, uploads: Path, store: Store, tickets: Tickets) -> None:
        self.runs = runs
        self.store = store
        self._tickets = tickets
        self.submissions = Submissions(runs=runs, data=data, uploads=uploads, store=store, tickets=tickets)

    # -- submit, clone ------------------------------------------------------------------------------------------------

    def submit(self, body: object, *, key: str | None = None, dry_run: bool = False) -> StoredJob:
        """A new job; or, with an Idempotency-Key that came before with this body, the job of that time."""
        return self._stored(*self.submissions.submit(body, key=key, dry_run=dry_run))

    def clone(self, job: str, patch: object, *, key: str | None = None, dry_run: bool = False) -> StoredJob:
        """A new job like another, but for what the JSON merge patch says; the key as in `submit`."""
        return self._stored(*self.submissions.clone(self.run(job), patch, key=key, dry_run=dry_run))

    # -- cancel, pause, resume, prioritise, delete ---------------------------------------------------------------------

    def cancel(self, job: str) -> StoredJob:
        """At once, unless it runs: then the trainer is asked (once). Conflict when the job has ended."""

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            if record.status.terminal:
                raise Conflict(f"job {job} has already ended ({record.status}): there is nothing to cancel")
            return cancellation(record)

        return self._append(job, decide)

    def pause(self, job: str) -> StoredJob:
        """A queued job leaves the order; a running one is asked to checkpoint and stop. A paused one stays as it is."""

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            match record.status, record.requested:
                case Status.QUEUED, _:
                    return [JobPaused()]
                case Status.RUNNING, Requested.NONE:
                    return [JobPauseRequested()]
                case (Status.RUNNING, Requested.PAUSE) | (Status.PAUSED, _):
                    return []
                case Status.RUNNING, _:
                    raise Conflict(f"job {job} is being cancelled: it can no longer be paused")
                case Status.VALIDATING, _:
                    raise Conflict(f"job {job} is validating: it can be paused once it is queued")
            raise Conflict(f"job {job} is {record.status}: there is nothing to pause")

        return self._append(job, decide)

    def resume(self, job: str, body: object) -> StoredJob:
        """A paused job waits for a GPU again, at its old place; a pause that was only asked for is taken back."""
        try:
            from_scratch = Resumption.model_validate(body).from_scratch
        except ValidationError as error:
            raise explain(error, Resumption, keys="the only key is `from_scratch`, true or false") from None

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            if record.status is Status.PAUSED:
                return [JobResumed(from_scratch=from_scratch)]
            if from_scratch and record.status is Status.RUNNING and record.requested is not Requested.CANCEL:
                raise Conflict(f"job {job} is running: pause it, and resume it from scratch once it is paused")
            if record.status is Status.RUNNING and record.requested is Requested.PAUSE:
                return [JobPauseWithdrawn()]
            again = record.checkpoint and record.status in (Status.FAILED, Status.CANCELLED)
            raise Conflict(
                f"job {job} is {record.status} and not paused: there is nothing to resume"
                + (f"; `longhaul clone {job} --resume` starts a new job at its newest checkpoint" if again else "")
            )

        stored = self._append(job, decide)
        if stored.record.status is Status.QUEUED:
            self._tickets.add(stored.record.stage)
        return stored

    def change(self, job: str, body: object) -> StoredJob:
        """Give another priority: a waiting job moves in its order at once, a running one when it waits again."""
        try:
            priority = Change.model_validate(body).priority
        except ValidationError as error:
            raise explain(error, Change, keys="the only key is `priority`, from -100 to 100") from None

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            if record.status.terminal:
                raise Conflict(f"job {job} is {record.status}: its priority no longer matters")
            return [] if record.priority == priority else [JobPriorityChanged(priority=priority)]

        return self._append(job, decide)

    def delete(self, job: str) -> None:
        """Remove an ended or damaged job: its run directory, and all that Redis has of it, the Idempotency-Key too.

        The directory is renamed first: after a crash in between, reconcile removes it.
        """
        run = self.run(job)
        self._refuse_open_trial(run)
        if self.store.maintenance.leased(job):
            event_log(run.events_file).forget()
            try:
                run.record()
            except Damaged as error:
                raise Conflict(
                    f"a worker has job {job} in hand, and cannot be asked to let go of it ({error}): stop that worker, "
                    f"then delete the job"
                ) from error
            raise Conflict(f"a worker still holds job {job}: cancel it, or try again in a moment")
        moved = move_away(run)
        try:
            self.store.forget(job)
        except StoreUnavailable as error:
            log.warning("job %s is deleted, and reconcile will tell Redis: %s", job, error)
        remove(moved)
        log.info("job %s is deleted", job)

    def _refuse_open_trial(self, run: RunDir) -> None:
        """Conflict for a trial of a sweep that still runs: it would be made again."""
        with suppress(Damaged, NotFound):
            sweep = run.record().sweep
            if sweep is not None and find_sweep(self.runs, sweep).record().ended is None:
                raise Conflict(f"job {run.id} is a trial of sweep {sweep}, which still runs: cancel the sweep first")

    def repair(self, job: str) -> tuple[StoredJob, Repair]:
        """Make a damaged job readable again, as far as it goes; Damaged where nothing is left to resume from."""
        run = self.run(job)
        done = repair(run)
        with run.locked() as events:
            record = run.record()
            try:
                self.store.clear_damage(job, reproject=True)
                self.store.project(run, record, events)
            except StoreUnavailable as error:
                log.warning("job %s is repaired, and reconcile will tell Redis: %s", job, error)
        if record.status in (Status.VALIDATING, Status.QUEUED):
            self._tickets.add(record.stage)
        return self._stored(run, record), done

    def _append(self, job: str, decide: Decision) -> StoredJob:
        run = self.run(job)

        def decide_on_whole(record: JobRecord) -> Sequence[AnyFact]:
            if record.status is not Status.RUNNING:  # the trainer has read both, and can be stopped
                run.verify_files(record)
            return decide(record)

        event_log(run.events_file).forget()  # nothing is to be appended behind a damage
        try:
            record, _ = self.store.append(run, decide_on_whole)
        except Damaged as error:
            self._show_damage(run, error)
            raise Damaged(f"job {job} is damaged: {error}", hint=error.hint) from error
        return self._stored(run, record)

    def _show_damage(self, run: RunDir, error: Damaged) -> None:
        try:
            self.store.mark_damaged(run, error)
        except StoreUnavailable as away:
            log.warning("job %s is damaged, and reconcile will tell Redis: %s", run.id, away)

    # -- find ---------------------------------------------------------------------------------------------------------

    def run(self, job: str) -> RunDir:
        """The run directory of an existing job. The id is checked before it becomes part of a path."""
        run = RunDir(self.runs / job) if _ID.fullmatch(job) else None
        if run is None or not run.exists():
            raise NotFound(f"there is no job {job[:80]}")
        return run

    def document(self, job: str, file: str, kind: type[Model]) -> Model | None:
        """A JSON file of the run directory; None: it is not there (yet). Raises Damaged, NotFound."""
        try:
            return kind.model_validate_json(content(self.run(job).path, file))
        except NoFile:
            return None
        except ValidationError:
            raise Damaged(
                f"{file} of job {job} is damaged, or another version of Longhaul wrote it",
                hint=f"`longhaul clone {job} --dry-run` makes another",
            ) from None

    def find(self, job: str) -> StoredJob | RawJob:
        """What is known of a job; from its run directory while Redis has not heard of it, or not of all others, yet."""
        if not _ID.fullmatch(job):
            raise NotFound(f"there is no job {job[:80]}")
        try:
            return self.store.get_raw(job)
        except (NotFound, Recovering):
            run = self.run(job)
            return self._from_disk(run, run.record)

    def events(self, job: str, *, after: int, limit: int) -> list[Event]:
        """The next events; from the run directory while Redis has not heard of the job yet."""
        if not self.store.number(job):
            return self.run(job).events(after)[:limit]
        return self.store.events(job, after=after, limit=limit)

    def _stored(self, run: RunDir, record: JobRecord) -> StoredJob:
        """What Redis knows, but never less than `record`: the write to Redis may have failed."""
        try:
            stored = self.store.get(run.id)
        except (StoreUnavailable, NotFound):
            return self._from_disk(run, lambda: record)
        except Exception:  # what was asked is done and on disk: no error may say otherwise
            log.exception("job %s: Redis has nothing that can be read", run.id)
            return self._from_disk(run, lambda: record)
        return stored if stored.record.number >= record.number else replace(stored, record=record)

    def _from_disk(self, run: RunDir, read: Callable[[], JobRecord]) -> StoredJob:
        """What the run directory says, whole or damaged; its place in the order is for Redis to know."""
        spec = read_spec(run.spec_text())
        try:
            record = read()
            run.verify_files(record)
        except Damaged as error:
            self._show_damage(run, error)
            record, _ = event_log(run.events_file).whole()
            return StoredJob(record, spec, None, None, damage=damage(error))
        latest = None
        with suppress(OSError):
            latest = last_metrics(run.metrics_file)
        if latest is not None and latest.attempt < record.scratch_attempt <= record.attempt:
            latest = None
        return StoredJob(record, spec, None, latest)
