"""Making a job: its run directory, its record in Redis, a ticket. For whoever has checked what it asks for."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path

from jobs.disk import rundir
from jobs.disk.rundir import RunDir
from jobs.errors import StoreUnavailable
from jobs.events import JobSubmitted
from jobs.record import JobRecord, fold
from jobs.redis.queue import Tickets
from jobs.redis.store import Store
from jobs.spec import JobSpec
from jobs.state import Stage
from jobs.version import FORMAT, VERSION

log = logging.getLogger("longhaul.store")
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


def submitted_of(
    spec: JobSpec,
    *,
    dry_run: bool = False,
    idempotency_key: str | None = None,
    body_sha256: str | None = None,
    cloned_from: str | None = None,
    sweep: str | None = None,
) -> JobSubmitted:
    """The first event of a job with this specification."""
    return JobSubmitted(
        name=spec.name,
        model=spec.model,
        spec_sha256=spec.sha256(),
        kind=spec.kind,
        priority=spec.priority,
        max_restarts=spec.max_restarts,
        metadata=spec.metadata,
        dry_run=dry_run,
        format_version=FORMAT,
        version=VERSION,
        idempotency_key=idempotency_key,
        body_sha256=body_sha256,
        discord=spec.integrations.discord,
        wandb=spec.integrations.wandb is not None,
        cloned_from=cloned_from,
        sweep=sweep,
    )


def make_job(
    runs: Path, store: Store, tickets: Tickets, job: str, spec: JobSpec, submitted: JobSubmitted
) -> tuple[RunDir, JobRecord]:
    """The job of this id: where it is there already, nothing of it changes. If Redis is away, reconcile projects it."""
    run, made = rundir.create(runs, job, spec, submitted)
    with run.locked() as events:  # nobody deletes it before Redis has heard of it
        record = fold(job, events)
        try:
            store.project(run, record, events)
        except StoreUnavailable as error:
            log.warning("job %s is on disk and waits for Redis: %s", job, error)
    if made:
        tickets.add(Stage.CHECK)
    return run, record


def make_id(kind: str = "job") -> str:
    """`job-` and 20 digits of base 32: milliseconds since 1970 (so that ids sort by time), then 50 random bits."""
    number = (time.time_ns() // 1_000_000 << 50) | secrets.randbits(50)
    return f"{kind}-" + "".join(_BASE32[number >> shift & 31] for shift in range(95, -1, -5))
