"""The only reader and writer of Redis keys: records, order, leases, events as a stream, worker heartbeats.

Redis says what happens next; what a job is and what happened is in its run directory (design §5). So every record
here is a projection that `project` can make again.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import redis
from pydantic_core import from_json
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from jobs import moves
from jobs.errors import NotFound, StoreUnavailable
from jobs.events import AnyFact, Event, MetricRow
from jobs.record import JobRecord
from jobs.rundir import Decision, RunDir
from jobs.state import Stage, Status

log = logging.getLogger("longhaul.store")
ALL_EVENTS = "longhaul:events"
"""Stream of the newest events of all jobs: fields `job` and `event`."""
LEASE_MS = 30_000
HEARTBEAT = frozenset({"name", "stage", "healthy", "why"})
"""What every worker reports of itself, whatever else it adds."""
KEEP_RESERVATION_S = 7 * 24 * 3600


class Patience(ExponentialBackoff):
    """Waits a little longer each time, until it is `over`: then a lost Redis is an error."""

    def __init__(self, over: Callable[[], bool]) -> None:
        super().__init__(cap=2.0, base=0.05)
        self._over = over

    def compute(self, failures: int) -> float:
        """Seconds to wait after so many failures. Raises ConnectionError when patience is over."""
        if self._over():
            raise redis.ConnectionError("Redis is away, and nobody waits for it any more")
        return super().compute(failures)

    def __deepcopy__(self, memo: object) -> Patience:
        return self  # every connection copies its client's; what `over` asks is one for all


def connect(url: str, *, patient_until: Callable[[], bool] | None = None) -> redis.Redis:
    """A client: an answer or an error within about 2 s. A patient one (RQ's own loop) waits for Redis, until told."""
    if patient_until is not None:
        retry = Retry(Patience(patient_until), -1)
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=5,
            retry=retry,
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )
    return redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2, retry=Retry(NoBackoff(), 1))


@dataclass(frozen=True)
class StoredJob:
    """What Redis knows about a job."""

    record: JobRecord
    spec: dict[str, Any]
    position: int | None
    """Jobs before it in the order of its stage; None when it does not wait."""
    latest: MetricRow | None


class Store:
    """Moves and reads. Raises StoreUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._scripts: dict[str, Callable[..., Any]] = {}

    # -- jobs ------------------------------------------------------------------------------------------------

    def reserve(
        self,
        key: str,
        job: str,
        body_sha256: str,
        *,
        on_disk: Callable[[], tuple[str, str] | None] = lambda: None,
    ) -> tuple[str, str]:
        """(id, body hash) that the key stands for: this call's, unless another came first.

        `on_disk` is asked who came first when Redis was wiped and has not been told everything again.
        """
        found = self._move(moves.RESERVE, key, job, body_sha256, KEEP_RESERVATION_S, 0)
        if not found:
            job, body_sha256 = on_disk() or (job, body_sha256)
            found = self._move(moves.RESERVE, key, job, body_sha256, KEEP_RESERVATION_S, 1)
        first, body = found
        return first.decode(), (body or b"").decode()

    def project(self, run: RunDir, record: JobRecord, events: Sequence[Event], *, release: str | None = None) -> None:
        """Bring Redis up to `record`, whose last events are `events`; `release`: the lease token to let go with it.

        Repeating it, or doing it with an older record, changes nothing. A gap is filled from the file.
        """
        have, gap = self._project(run, record, events, release)
        if gap:
            missing = [event for event in run.events(after=have) if event.number <= record.number]
            self._project(run, record, missing, release)

    def _project(
        self, run: RunDir, record: JobRecord, events: Sequence[Event], release: str | None
    ) -> tuple[int, bool]:
        submitted_ms = int(record.submitted_at * 1000)
        spec = run.spec_file.read_text() if events and events[0].number == 1 else ""
        pairs: list[str | int] = []
        for event in events:
            pairs += [event.number, event.model_dump_json()]
        have, gap = self._move(
            moves.PROJECT, run.id, record.number - len(events), record.number, record.model_dump_json(),
            record.status.value, record.stage.value, -record.priority * 10**13 + submitted_ms,
            int(record.not_before * 1000), submitted_ms, spec, release or "", *pairs,
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
        """Append to the run directory and project, under one lock. With Redis away, reconcile projects later."""

        def project(record: JobRecord, new: list[Event]) -> None:
            try:
                self.project(run, record, new, release=release)
            except StoreUnavailable as error:
                log.warning("job %s: events up to %d wait for Redis (%s)", run.id, record.number, error)

        return run.append(decide, attempt=attempt, project=project)

    def get(self, job: str) -> StoredJob:
        """One job, or NotFound."""
        found = self._get_all([job])
        if not found:
            raise NotFound(f"there is no job {job}")
        return found[0]

    def _get_all(self, jobs: Sequence[str]) -> list[StoredJob]:
        """Those of these jobs that Redis knows, in one round trip."""
        with self._reachable():
            pipe = self._redis.pipeline(transaction=False)
            for job in jobs:
                pipe.hmget(_job(job), ["record", "spec"])
                pipe.hget(f"{_job(job)}:latest", "row")
                for stage in Stage:
                    pipe.zrank(f"longhaul:order:{stage.value}", job)
            replies = iter(pipe.execute())
        found = []
        for (record, spec), latest, *ranks in zip(*[replies] * (2 + len(Stage)), strict=True):
            if record is not None:
                found.append(
                    StoredJob(
                        record=JobRecord.model_validate_json(record),
                        spec=json.loads(spec) if spec else {},
                        position=next((rank for rank in ranks if rank is not None), None),
                        latest=MetricRow.model_validate_json(latest) if latest else None,
                    )
                )
        return found

    def number(self, job: str) -> int:
        """Number of the last event that Redis has; 0 for an unknown job."""
        with self._reachable():
            return int(cast(Any, self._redis.hget(_job(job), "number")) or 0)

    def page(self, *, after: str | None, limit: int, status: Status | None = None) -> tuple[list[StoredJob], bool]:
        """Newest first; `after` is the id that the page follows. Returns the page and whether there is more."""
        index = f"longhaul:status:{status.value}" if status else "longhaul:jobs"
        with self._reachable():
            start = 0
            if after is not None:
                # The cursor may have left this index (its status changed): its time still says where the page begins.
                score = self._redis.zscore("longhaul:jobs", after)
                if score is None:
                    raise NotFound(f"there is no job {after}")
                rank = self._redis.zrevrank(index, after)
                start = (
                    int(cast(Any, rank)) + 1
                    if rank is not None
                    else int(cast(Any, self._redis.zcount(index, score, "+inf")))
                )
            ids = cast(list[bytes], self._redis.zrevrange(index, start, start + limit))
        return self._get_all([each.decode() for each in ids[:limit]]), len(ids) > limit

    def events(self, job: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """Events with numbers above `after`, from the stream."""
        with self._reachable():
            rows = cast(list[Any], self._redis.xrange(events_key(job), min=f"({after}-0", count=limit))
        return [Event.model_validate_json(fields[b"event"]) for _, fields in rows]

    def set_latest(self, job: str, row: MetricRow) -> None:
        """The newest row of metrics, overwritten each time."""
        with self._reachable():
            self._redis.hset(f"{_job(job)}:latest", "row", row.model_dump_json())

    # -- order and leases ------------------------------------------------------------------------------------

    def claim(self, stage: Stage, token: str) -> str | None:
        """Take the head of the order whose time has come, and its lease, in one move. None: nothing is due."""
        job = self._move(moves.CLAIM, stage.value, token, LEASE_MS)
        return job.decode() if job else None

    def renew(self, job: str, token: str) -> bool:
        """Hold the lease for another 30 s; a lease that nobody holds is taken again. False: somebody else holds it."""
        return bool(self._move(moves.RENEW, job, token, LEASE_MS))

    def release(self, job: str, token: str) -> bool:
        """Let go of the lease; a job that still waits goes back to its old place."""
        return bool(self._move(moves.RELEASE, job, token))

    def park(self, job: str, token: str) -> None:
        """Let go of a job whose directory is damaged; it stands in no order until its next event."""
        self._move(moves.PARK, job, token)

    def forget(self, job: str) -> None:
        """Drop everything about a job that has no directory any more."""
        self._move(moves.FORGET, job)

    def known(self) -> set[str]:
        """Ids of all jobs that Redis has heard of."""
        with self._reachable():
            return {each.decode() for each in cast(list[bytes], self._redis.zrange("longhaul:jobs", 0, -1))}

    def expired(self) -> list[tuple[str, str]]:
        """(id, token) of leases that have run out."""
        flat = [item.decode() for item in self._move(moves.EXPIRED)]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def expire(self, job: str, token: str) -> int:
        """Drop a lease that has run out. Returns how often that happened in this stage; 0: it was renewed meanwhile."""
        return int(self._move(moves.EXPIRE, job, token))

    def leased(self, job: str) -> bool:
        """Whether anybody holds the job."""
        with self._reachable():
            return bool(self._redis.hexists(_job(job), "lease"))

    def waiting(self, stage: Stage) -> int:
        """Jobs in the order of a stage."""
        with self._reachable():
            return int(cast(Any, self._redis.zcard(f"longhaul:order:{stage.value}")))

    def head(self, stage: Stage) -> str | None:
        """The job whose turn comes next, due or not; None: nobody waits."""
        with self._reachable():
            first = cast(list[bytes], self._redis.zrange(f"longhaul:order:{stage.value}", 0, 0))
        return first[0].decode() if first else None

    def lead(self, token: str, ttl_ms: int) -> bool:
        """Whether this reconciler is the active one."""
        return bool(self._move(moves.LEAD, token, ttl_ms))

    def resign(self, token: str) -> None:
        """Let another reconciler lead at once."""
        self._move(moves.RESIGN, token)

    def begin_rebuild(self, token: str) -> bool:
        """Whether Redis was wiped (or is new) and has to be told of every run directory; then `end_rebuild` follows."""
        return bool(self._move(moves.BEGIN_REBUILD, token))

    def end_rebuild(self, token: str) -> bool:
        """Redis knows everything again. False: it was wiped once more meanwhile."""
        return bool(self._move(moves.END_REBUILD, token))

    # -- workers and health ----------------------------------------------------------------------------------

    def report_worker(self, name: str, facts: dict[str, Any]) -> None:
        """A worker's heartbeat; forgotten after a minute of silence."""
        with self._reachable():
            self._redis.set(f"longhaul:worker:{name}", json.dumps(facts), ex=60)

    def forget_worker(self, name: str) -> None:
        """A worker left in good order."""
        with self._reachable():
            self._redis.delete(f"longhaul:worker:{name}")

    def workers(self) -> list[dict[str, Any]]:
        """Workers heard of in the last minute, by name. What is no heartbeat is passed over, with a word in the log."""
        found = []
        with self._reachable():
            for name in sorted(self._redis.scan_iter("longhaul:worker:*", count=100)):
                try:
                    if (raw := self._redis.get(name)) is not None:
                        found.append(_heartbeat(cast(bytes, raw)))
                except (ValueError, redis.ResponseError) as error:  # the latter: not even a string
                    log.warning("%r is no worker's heartbeat and is passed over: %s", name, error)
        return found

    def ping(self) -> None:
        """Raises StoreUnavailable when Redis does not answer."""
        with self._reachable():
            self._redis.ping()

    def uptime_s(self) -> float:
        """Seconds since Redis started."""
        with self._reachable():
            return float(cast(Any, self._redis.info("server"))["uptime_in_seconds"])

    def wait_for_event(self, last: str, timeout_s: float) -> str:
        """Wait until any job has a new event, at most so long. Returns the position to wait from next time."""
        with self._reachable():
            answer = cast(
                Any,
                self._redis.xread({ALL_EVENTS: last}, count=1000, block=max(1, int(timeout_s * 1000))),
            )
        return cast(str, answer[0][1][-1][0].decode()) if answer else last

    # ------------------------------------------------------------------------------------------------------------------

    def _move(self, script: str, *args: str | int) -> Any:
        call = self._scripts.get(script)
        if call is None:
            call = self._scripts[script] = self._redis.register_script(moves.HELPERS + script)
        with self._reachable():
            return call(keys=[], args=list(args))

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise StoreUnavailable(f"Redis does not answer: {error}") from error
        except redis.ResponseError as error:
            # Out of memory (noeviction), a read-only replica, or a disk that its AOF cannot be written to.
            if isinstance(error, redis.OutOfMemoryError | redis.ReadOnlyError) or "MISCONF" in str(error):
                raise StoreUnavailable(f"Redis takes no writes: {error}") from error
            raise


def new_token() -> str:
    """A token that marks one holder or one move."""
    return uuid.uuid4().hex


def events_key(job: str) -> str:
    """The stream of one job's events: ids `<number>-0`, field `event`."""
    return f"{_job(job)}:events"


def _heartbeat(raw: bytes) -> dict[str, Any]:
    """What a worker reported of itself; ValueError for anything else."""
    facts = from_json(raw, allow_inf_nan=False)
    if not isinstance(facts, dict) or HEARTBEAT - facts.keys():
        raise ValueError(f"it has to be an object with {', '.join(sorted(HEARTBEAT))}")
    json.dumps(facts, allow_nan=False)  # ValueError: 1e999 is read as infinity, and no answer can hold that
    return facts


def _job(job: str) -> str:
    return f"longhaul:job:{job}"
