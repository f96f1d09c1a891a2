"""The only reader and writer of Redis keys: records, order, leases, events as a stream.

Redis decides what happens next. What a job is and what has happened to it is in its run directory, so every record here
is a projection that `project` can rebuild.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import redis
from pydantic import ValidationError

from jobs.attempt import Activity
from jobs.disk import rundir
from jobs.disk.event_log import Decision, event_log
from jobs.disk.files import read_regular
from jobs.disk.rundir import RunDir
from jobs.errors import Damaged, NotFound, StoreUnavailable
from jobs.events import AnyFact, AttemptStarted, Event, JobSubmitted
from jobs.gpu_needs import GpuNeeds
from jobs.heartbeat import TrainWorker
from jobs.metrics import MetricRow
from jobs.plan import CheckSummary
from jobs.record import JobRecord, fold, left_s
from jobs.redis import queries, scripts
from jobs.redis.connection import Scripts, Tickets, reachable
from jobs.redis.maintenance import Maintenance
from jobs.redis.queries import EVERY_JOB, Filter
from jobs.redis.scripts import job_key
from jobs.redis.workers import Workers
from jobs.spec import JobSpec, ResourcesSpec
from jobs.state import Requested, Stage, Status
from jobs.text.units import format_duration
from jobs.trainer_facts import Fault
from jobs.version import FORMAT, VERSION

# -- new jobs ----------------------------------------------------------------------------------------------------------
# Making a job: its run directory, its record in Redis, a ticket. For whoever has checked what it asks for.

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


# -- store -------------------------------------------------------------------------------------------------------------

ALL_EVENTS = "longhaul:events"
"""Stream of the newest events of all jobs: fields `job` and `event`."""
LEASE_MS = 30_000
ANY_CPU = TrainWorker(device="cpu")
KEEP_RESERVATION_S = 7 * 24 * 3600
UNREADABLE = Fault(
    code="unreadable_record",
    message="Redis holds a record of this job that this version of Longhaul cannot read",
    hint="use the version that wrote it; or stop all containers and remove the volume `redis`: Redis is then filled "
    "again from the run directories",
)


@dataclass(frozen=True)
class StoredJob:
    """What Redis knows about a job."""

    record: JobRecord
    spec: JobSpec | None
    """None: it cannot be read."""
    position: int | None
    """Jobs ahead of it in its stage; None if it does not wait."""
    latest: MetricRow | None
    estimated_start: float | None = None
    """Unix seconds, for a job that waits for a GPU; None: unknown. The same holds for the next field."""
    estimated_finish: float | None = None
    damage: Fault | None = None
    """What is wrong with its run directory. `record` is then what Redis knew before, or what could still be read."""
    trainers: tuple[TrainWorker, ...] = ()
    """The present train workers, for a job that has not ended and for a dry run."""
    behind: tuple[str, int] | None = None
    """The job that the workers of its stage, *check* or *prepare*, have had longest, and for how many minutes; None: it
    does not wait there, or none for a minute."""
    heard: Activity | None = None
    """What its process last said that it does; see `activity`."""

    @property
    def activity(self) -> Activity | None:
        """What it does now; None where nothing of it runs, or nothing was heard."""
        heard, record = self.heard, self.record
        if heard is None or record.stage is not heard.stage:
            return None
        runs = record.attempt_open and record.attempt == heard.attempt
        return heard if runs or (record.status is Status.VALIDATING and self.position is None) else None

    @property
    def waits_because(self) -> str | None:
        """Why it cannot start though its turn has come, that no GPU here can take it, or behind what it waits."""
        if self.record.waiting_reason:
            return self.record.waiting_reason
        if self.record.status not in (Status.VALIDATING, Status.QUEUED):
            return None
        if (unmet := self.gpu_needs.unmet_by_all(self.trainers)) is not None or self.behind is None:
            return unmet
        job, minutes = self.behind
        return f"job {job} is before it, in {self.record.stage} for {format_duration(60 * minutes)}"

    @property
    def gpu_needs(self) -> GpuNeeds:
        """What it needs from a GPU, as far as that is known."""
        return GpuNeeds.of(self.spec.resources if self.spec else ResourcesSpec(), self.record.plan)


class RawJob(NamedTuple):
    """A job as `queries.SHOWN` returns it. Equal values are parsed and answered alike."""

    id_utf8: bytes
    record_json: bytes
    spec_json: bytes
    latest_json: bytes
    """Empty: there is none. The same holds for the fields below."""
    rank: int
    """Jobs ahead of it in its stage; -1 if it does not wait."""
    start_ms: bytes
    """Digits of Unix milliseconds."""
    finish_ms: bytes
    damage_json: bytes
    trainers_json: bytes
    in_work: bytes
    """`queries.SHOWN`: id and minutes of the job behind which it waits to be checked or prepared."""
    activity_json: bytes

    @property
    def id(self) -> str:
        """Which job it is."""
        return self.id_utf8.decode()

    @property
    def record(self) -> JobRecord:
        """As `StoredJob.record`."""
        return read_record(self.record_json)

    def parsed(self) -> StoredJob:
        """The same as models; a job whose record this version cannot read is shown as damaged."""
        try:
            return self._parsed()
        except ValidationError as error:
            log.error("job %s: its record in Redis cannot be read: %s", self.id, str(error).replace("\n", " ")[:500])
            return StoredJob(JobRecord(id=self.id), None, None, None, damage=UNREADABLE)

    def _parsed(self) -> StoredJob:
        return StoredJob(
            record=self.record,
            spec=read_spec(self.spec_json),
            position=None if self.rank < 0 else self.rank,
            latest=MetricRow.model_validate_json(self.latest_json) if self.latest_json else None,
            estimated_start=float(self.start_ms) / 1000 if self.start_ms else None,
            estimated_finish=float(self.finish_ms) / 1000 if self.finish_ms else None,
            damage=Fault.model_validate_json(self.damage_json) if self.damage_json else None,
            trainers=read_trainers(self.trainers_json) if self.trainers_json else (),
            behind=(in_work[0], int(in_work[1])) if (in_work := self.in_work.decode().split()) else None,
            heard=_activity(self.activity_json),
        )


def _activity(text: bytes) -> Activity | None:
    """None: there is none, or a newer version wrote it."""
    if not text:
        return None
    try:
        return Activity.model_validate_json(text)
    except ValidationError:
        return None


class Store:
    """Reads and writes Redis. Raises StoreUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._script = Scripts(client, scripts.HELPERS)
        self._ask = Scripts(client, scripts.HELPERS + queries.WHOLE + queries.SHOWN)
        self.workers = Workers(client)
        self.maintenance = Maintenance(client)

    # -- jobs ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        key: str,
        job: str,
        body_sha256: str,
        *,
        on_disk: Callable[[], tuple[str, str] | None] = lambda: None,
    ) -> tuple[str, str]:
        """The (id, body hash) that the key stands for: this call's, unless another call came first.

        If Redis was wiped and is not refilled yet, `on_disk` says who came first.
        """
        found = self._script(scripts.RESERVE, key, job, body_sha256, KEEP_RESERVATION_S, 0)
        if not found:
            job, body_sha256 = on_disk() or (job, body_sha256)
            found = self._script(scripts.RESERVE, key, job, body_sha256, KEEP_RESERVATION_S, 1)
        first, body = found
        return first.decode(), (body or b"").decode()

    def project(self, run: RunDir, record: JobRecord, events: Sequence[Event], *, release: str | None = None) -> None:
        """Bring Redis up to `record`, whose last events are `events`; also release the lease with the token `release`.

        Repeating it, or doing it with an older record, changes nothing. A gap is filled from the file.
        """
        have, gap = self._project(run, record, events, release)
        if gap:
            missing = [event for event in run.events(after=have) if event.number <= record.number]
            self._project(run, record, missing, release)
        if any(isinstance(each.fact, AttemptStarted) and each.attempt == record.scratch_attempt for each in events):
            self.set_latest(run.id, None)

    def _project(
        self, run: RunDir, record: JobRecord, events: Sequence[Event], release: str | None
    ) -> tuple[int, bool]:
        submitted_ms = int(record.submitted_at * 1000)
        spec, indexes, asks = "", "", ["", "", "1", ""]
        if events and events[0].number == 1:
            spec = read_regular(run.spec_file).decode()
            try:
                parsed = json.loads(spec)
                indexes = json.dumps(
                    queries.lasting_indexes(record.metadata, parsed["data"], dry_run=record.dry_run, sweep=record.sweep)
                )
                resources = parsed.get("resources") or {}  # none in those of earlier versions
                asks = [
                    str(resources.get("gpu_memory_gib") or ""), (resources.get("gpu_name") or "").lower(),
                    str(resources.get("gpus") or 1), resources.get("engine") or "",
                ]  # fmt: skip
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise Damaged("spec.json is no specification") from error
        pairs: list[str | int] = []
        for event in events:
            pairs += [event.number, event.model_dump_json()]
        have, gap = self._script(
            scripts.PROJECT, run.id, record.number - len(events), record.number, record.model_dump_json(),
            record.status.value, record.stage.value, -record.priority * 10**13 + submitted_ms,
            int(record.not_before * 1000), submitted_ms, spec, indexes, *_effort(record), release or "",
            json.dumps(asks), *_planned_needs(record), *pairs,
        )  # fmt: skip
        return int(have), bool(gap)

    def append(
        self,
        run: RunDir,
        decide: Decision | Sequence[AnyFact],
        *,
        attempt: int | None = None,
        release: str | None = None,
    ) -> tuple[JobRecord, list[Event]]:
        """Append to the run directory and project, under one lock. If Redis is away, reconcile projects later."""

        def project(record: JobRecord, new: list[Event]) -> None:
            try:
                self.project(run, record, new, release=release)
            except StoreUnavailable as error:
                log.warning("job %s: events up to %d wait for Redis (%s)", run.id, record.number, error)

        return run.append(decide, attempt=attempt, project=project)

    def get(self, job: str) -> StoredJob:
        """One job, or NotFound. Raises Recovering while Redis does not know all jobs, and so not its place."""
        return self.get_raw(job).parsed()

    def get_raw(self, job: str) -> RawJob:
        """`get`, not parsed."""
        found = self._ask(queries.SHOW, job)
        if found is None:
            raise NotFound(f"there is no job {job}")
        return RawJob(*found)

    def number(self, job: str) -> int:
        """Number of the last event that Redis has; 0 for an unknown job."""
        with reachable():
            return int(cast(Any, self._redis.hget(job_key(job), "number")) or 0)

    def page(self, wanted: Filter = EVERY_JOB, *, after: str | None = None, limit: int) -> tuple[list[RawJob], bool]:
        """Newest first; `after` is the id that the page follows. Returns the page and whether there is more.

        Raises NotFound when there is no job `after` (whatever its state), Recovering while Redis does not know all.
        """
        answer = self._ask(queries.LIST, after or "", limit, json.dumps(wanted.groups()), json.dumps(wanted.excluded))
        if answer is None:
            raise NotFound(f"there is no job {after}: begin again without `after`")
        more, jobs = answer
        return [RawJob(*job) for job in jobs], bool(more)

    def using(self, dataset: str) -> list[tuple[str, Status]]:
        """Jobs whose rows are in this uploaded data set (or were, when they began) and their states, newest first.

        Raises Recovering while Redis does not know all jobs.
        """
        flat = [item.decode() for item in self._ask(queries.MEMBERS, queries.dataset_index(dataset))]
        return [(job, Status(status)) for job, status in zip(flat[::2], flat[1::2], strict=True)]

    def events(self, job: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """Events with numbers above `after`, from the stream."""
        with reachable():
            rows = cast(list[Any], self._redis.xrange(events_key(job), min=f"({after}-0", count=limit))
        return [Event.model_validate_json(fields[b"event"]) for _, fields in rows]

    def set_latest(self, job: str, row: MetricRow | None) -> None:
        """Replace the newest row of metrics. None: there is none any more."""
        key = f"{job_key(job)}:latest"
        with reachable():
            if row is None:
                self._redis.hdel(key, "row")
            else:
                self._redis.hset(key, "row", row.model_dump_json())

    def set_activity(self, job: str, activity: Activity | None) -> None:
        """Replace what the process of the job does. None: it has none."""
        key = f"{job_key(job)}:latest"
        with reachable():
            if activity is None:
                self._redis.hdel(key, "activity")
            else:
                self._redis.hset(key, "activity", activity.model_dump_json())

    # -- order and leases ------------------------------------------------------------------------------------

    def claim(self, stage: Stage, token: str, worker: TrainWorker = ANY_CPU) -> str | None:
        """Take the first job in the order that is due and, to train, that this worker may start now, and its lease, in
        one script. None: there is none.
        """
        job = self._script(scripts.CLAIM, stage.value, token, LEASE_MS, worker.model_dump_json())
        return job.decode() if job else None

    def waiting_to_train(self) -> list[tuple[str, GpuNeeds]]:
        """The jobs that wait to train, in order, each with what it needs from a GPU."""
        return [
            (
                job.decode(),
                GpuNeeds(
                    float(gib) if gib else None,
                    name.decode() or None,
                    int(least) if least else None,
                    bool(bf16),
                    int(gpus),
                    engine.decode() or None,
                    int(host) if host else None,
                ),
            )
            for job, gib, name, least, bf16, gpus, engine, host in self._script(scripts.WAITING_TO_TRAIN)
        ]

    def useful_tickets(self, stage: Stage, *, in_vain: bool = False) -> int:
        """How many tickets would find work now: waiting jobs; to train, as many as idle workers may start."""
        return int(self._script(scripts.USEFUL_TICKETS, stage.value, int(in_vain)))

    def renew(self, job: str, token: str) -> bool:
        """Hold the lease for another 30 s; a free lease is taken again. False: another worker holds it."""
        return bool(self._script(scripts.RENEW, job, token, LEASE_MS))

    def release(self, job: str, token: str) -> bool:
        """Release the lease; a job that still waits returns to its old place."""
        return bool(self._script(scripts.RELEASE, job, token))

    def mark_damaged(self, run: RunDir, error: Damaged, *, release: str | None = None) -> bool:
        """Show a job as damaged, in no order, until `clear_damage` is called. True: it was not shown so before."""
        fault = damage(error).model_dump_json()
        with reachable():
            known = cast(bytes | None, self._redis.hget(job_key(run.id), "damaged"))
        news = known is None or known.decode() != fault
        if news or release is not None:
            record, _ = event_log(run.events_file).whole()
            submitted_s = record.submitted_at or (run.spec_file if run.spec_file.exists() else run.path).stat().st_mtime
            spec = run.spec_text()
            self._script(
                scripts.MARK_DAMAGED,
                run.id,
                fault,
                record.model_dump_json(),
                int(submitted_s * 1000),
                spec,
                release or "",
            )
        return news

    def clear_damage(self, job: str, *, reproject: bool = False) -> None:
        """The run directory can be read again. `reproject`: all of the job's events are projected again."""
        self._script(scripts.CLEAR_DAMAGE, job, int(reproject))

    def all_damaged(self) -> list[str]:
        """Ids of jobs that are shown as damaged, oldest first."""
        with reachable():
            return [job.decode() for job in cast(list[bytes], self._redis.zrange("longhaul:status:damaged", 0, -1))]

    def forget(self, job: str) -> None:
        """Forget a job whose directory is gone."""
        self._script(scripts.FORGET, job)

    def waiting(self, stage: Stage) -> int:
        """Jobs in the order of a stage."""
        with reachable():
            return int(cast(Any, self._redis.zcard(f"longhaul:order:{stage.value}")))

    # -- health --------------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Raises StoreUnavailable when Redis does not answer, or takes no writes."""
        with reachable():
            self._redis.set("longhaul:ping", 1, px=1000)

    def wait_for_event(self, last: str, timeout_s: float) -> str:
        """Wait at most this long for a new event of any job. Returns the position to wait from next time."""
        with reachable():
            answer = cast(
                Any,
                self._redis.xread({ALL_EVENTS: last}, count=1000, block=max(1, int(timeout_s * 1000))),
            )
        return cast(str, answer[0][1][-1][0].decode()) if answer else last


@lru_cache(maxsize=256)
def read_spec(text: bytes | str) -> JobSpec | None:
    """The specification in this JSON; None if it is invalid, as in a damaged job. A job never changes its own."""
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError:
        return None


@lru_cache(maxsize=256)
def read_record(text: bytes) -> JobRecord:
    """The record in this JSON. A job's record stays the same until its next event."""
    return JobRecord.model_validate_json(text)


@lru_cache(maxsize=8)
def read_trainers(reports: bytes) -> tuple[TrainWorker, ...]:
    """The train workers in this JSON list. Invalid entries are left out (`jobs.redis.workers` logs them)."""
    found = []
    for facts in json.loads(reports):
        with suppress(ValidationError):
            found.append(TrainWorker.model_validate(facts))
    return tuple(found)


def damage(error: Damaged) -> Fault:
    """How a damaged job is shown to fail."""
    return Fault(code=error.code, message=str(error), hint=error.hint)


def new_token() -> str:
    """A token that identifies one holder or one call."""
    return uuid.uuid4().hex


def events_key(job: str) -> str:
    """The stream of one job's events: ids `<number>-0`, field `event`."""
    return f"{job_key(job)}:events"


def _planned_needs(record: JobRecord) -> tuple[int | str, ...]:
    """(bytes that a GPU must have room for, whether it must have native bf16, whether it is a trial, the bytes that it
    then has of a GPU, the GPU of its open attempt, bytes of optimizer states on the host); '': unknown, or no."""
    needs = GpuNeeds.of(ResourcesSpec(), record.plan)
    reserved = record.plan.memory.reserved_bytes if isinstance(record.plan, CheckSummary) else None
    return (
        "" if needs.least_bytes is None else needs.least_bytes,
        "1" if needs.native_bf16 else "",
        "1" if record.sweep else "",
        reserved or "",
        (record.gpu or "") if record.attempt_open else "",
        needs.host_bytes or "",
    )


def _effort(record: JobRecord) -> tuple[int | str, int | str]:
    """(ms that the job is expected to need from its newest checkpoint on, ms of the start of its attempt); '': unknown,
    or it waits on an engine.

    A job that was asked to stop needs no more time.
    """
    running = record.status is Status.RUNNING
    began = int(record.attempt_started_at * 1000) if running and record.attempt_started_at is not None else ""
    if running and record.requested is not Requested.NONE:
        return 0, began
    left = left_s(record, None)
    return "" if left is None else int(left * 1000), began
