"""What users can do to jobs: submit, cancel, pause, resume; and how a job is found again.

Order of a submission (design §5): reserve id and key in Redis (fails: nothing on disk), the run directory, the record
in Redis (fails: reconcile does it), a ticket. What a state allows is decided under the lock, in `jobs.store.append`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jobs import rundir
from jobs.errors import Conflict, NotFound, StoreUnavailable, UserError
from jobs.events import AnyFact, JobCancelled, JobPaused, JobRequested, JobResumed, JobSubmitted
from jobs.queue import Tickets
from jobs.record import JobRecord, fold
from jobs.rundir import Decision, RunDir
from jobs.spec import JobSpec, parse_spec
from jobs.state import Request, Stage, Status
from jobs.store import Store, StoredJob

log = logging.getLogger("longhaul.service")
_ID = re.compile(r"job-[a-z0-9_-]{1,60}")
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


class Actions:
    """Everything that changes or finds a job. Raises the errors of `jobs.errors`."""

    def __init__(self, *, runs: Path, data: Path, store: Store, tickets: Tickets) -> None:
        self.runs = runs
        self.store = store
        self._data = data
        self._tickets = tickets

    # -- submit -------------------------------------------------------------------------------------------------------

    def submit(self, body: object, *, key: str | None = None, dry_run: bool = False) -> StoredJob:
        """A new job; or, with an Idempotency-Key that came before with this body, the job of that time."""
        spec = parse_spec(body)
        self._refuse_outside_data(spec)
        if key is not None and not _KEY.fullmatch(key):
            raise UserError("Idempotency-Key: 1 to 255 visible ASCII characters, please", param="Idempotency-Key")
        body_sha256 = _sha256({"body": body, "dry_run": dry_run})
        new_id = make_id()
        if key is None:
            job, first_body = self.store.reserve(f"id:{new_id}", new_id, body_sha256)
        else:
            on_disk = partial(rundir.submitted_under, self.runs, key)
            job, first_body = self.store.reserve(key, new_id, body_sha256, on_disk=on_disk)
        if first_body != body_sha256:
            raise Conflict(f"Idempotency-Key {key!r} was used before with another body (job {job}); take a new key")
        submitted = JobSubmitted(
            name=spec.name,
            model=spec.model,
            spec_sha256=spec.sha256(),
            priority=spec.priority,
            max_restarts=spec.max_restarts,
            metadata=spec.metadata,
            dry_run=dry_run,
            idempotency_key=key,
            body_sha256=body_sha256,
            discord=spec.integrations.discord,
            wandb=spec.integrations.wandb is not None,
        )
        # A key whose first submission died half-way: whoever comes again completes it under the same id.
        run, made = rundir.create(self.runs, job, spec, submitted)
        events = run.events()
        record = fold(job, events)
        try:
            self.store.project(run, record, events)
        except StoreUnavailable as error:
            log.warning("job %s is on disk and waits for Redis: %s", job, error)
        if made:
            self._tickets.add(Stage.CHECK)
        return self._stored(run, record)

    def _refuse_outside_data(self, spec: JobSpec) -> None:
        """Refuse paths whose spelling leaves the data directory; what is on disk is for the check stage to see."""
        paths = {"data.train": spec.data.train}
        if isinstance(spec.data.validation, str):
            paths["data.validation"] = spec.data.validation
        if spec.model.startswith(("./", "/")):
            paths["model"] = spec.model
        base = os.path.abspath(self._data)
        for param, path in paths.items():
            if any(ord(character) < 32 for character in path):
                raise UserError(f"{param} = {path!r} holds a control character", param=param)
            if os.path.commonpath([base, os.path.abspath(os.path.join(base, path))]) != base:
                raise UserError(
                    f"{param} = {path!r} is outside the data directory",
                    param=param,
                    hint="put it into the data directory and give the path inside that",
                )

    # -- cancel, pause, resume ----------------------------------------------------------------------------------------

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


def make_id() -> str:
    """`job-` and 20 digits of base 32: milliseconds since 1970 (so that ids sort by time), then 50 random bits."""
    number = (time.time_ns() // 1_000_000 << 50) | secrets.randbits(50)
    return "job-" + "".join(_BASE32[number >> shift & 31] for shift in range(95, -1, -5))


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
