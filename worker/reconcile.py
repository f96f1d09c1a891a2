"""Reconcile: makes Redis agree with the run directories, and ends what nothing else ends (architecture.md: Truth).

A thread of publish with its own client; one is active at a time. RQ's own registries decide nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import redis

from jobs.attempt import Finished
from jobs.disk.event_log import event_log
from jobs.disk.removal import move_away, remove, sweep
from jobs.disk.rundir import RunDir, list_runs
from jobs.errors import Conflict, Damaged, NotFound, StoreUnavailable
from jobs.events import AnyFact
from jobs.gpu_needs import NO_GPU
from jobs.reasons import Reason
from jobs.record import JobRecord
from jobs.redis.connection import Tickets
from jobs.redis.store import LEASE_MS, Store, new_token
from jobs.state import Stage, Status
from jobs.trainer_facts import DeviceWaiting, Fault
from worker.ending import ending, stage_lost
from worker.runs_lock import identified

log = logging.getLogger("longhaul.reconcile")
EVERY_S = 15.0
LOOK_S = 1.0
"""Between two looks whether Redis was emptied."""
STANDBY_S = 5.0
"""Between two looks whether the one that leads has gone."""
REBUILDING = 8
"""Jobs that are projected to an emptied Redis at the same time."""
MOST_EXPIRIES = 5
REFUSED_DRY_RUN_S = 86_400.0
"""How long a dry run that has failed or was cancelled stays: there is nothing in it to come back to."""


class Reconciler:
    """Call `once` every 15 s, or `run` in a thread."""

    def __init__(
        self,
        runs: Path,
        store: Store,
        tickets: Tickets,
        *,
        lease_s: float = LEASE_MS / 1000,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs = runs
        self._store = store
        self._tickets = tickets
        self._lease_s = lease_s
        self._clock, self._wall_clock = clock, wall_clock
        self._token = new_token()
        self._reachable_since: float | None = None
        self._records: dict[str, tuple[object, JobRecord]] = {}

    def run(self, stop: threading.Event) -> None:
        """Once at start, then every 15 s until asked to stop."""
        while not stop.is_set():
            leads = True
            try:
                leads = self.run_once()
            except Exception:  # the thread that repairs everything must not die of one error; the log has it
                log.exception("reconcile failed; next try in %.0f s", EVERY_S)
            self._rest(stop, EVERY_S if leads else STANDBY_S)
        with contextlib.suppress(StoreUnavailable):
            self._store.maintenance.resign(self._token)

    def _rest(self, stop: threading.Event, seconds: float) -> None:
        """Until the next look; a Redis that was emptied meanwhile is not left waiting: nothing is listed or claimed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not stop.wait(min(LOOK_S, left)):
            with contextlib.suppress(StoreUnavailable):
                if self._store.maintenance.wiped():
                    return

    def run_once(self) -> bool:
        """One pass: projections, leases, tickets; then a word to the jobs that no GPU is there for.

        False: another reconciler leads, which may have been killed a moment ago: its key runs out after 45 s.
        """
        try:
            leads = self._store.maintenance.lead(self._token, int(EVERY_S * 3000))
            now = self._clock()
            if self._reachable_since is None:
                self._reachable_since = now
            if not leads:
                return False
            self._identify()
            wiped = self._store.maintenance.begin_rebuild(self._token)
            if wiped:  # the leases are gone with the rest: give their holders the time to take them again
                self._reachable_since = now
            open_jobs = self._project_all(wiped)
            if wiped:
                self._store.maintenance.end_rebuild(self._token)
            if self._redis_trusted(now):
                self._check_leases(open_jobs)
            for stage in Stage:
                for _ in range(self._store.useful_tickets(stage) - self._tickets.count(stage)):
                    self._tickets.add(stage)
            self._report_waits()
        except StoreUnavailable as error:
            self._reachable_since = None
            log.warning("reconcile waits for Redis: %s", error)
        return True

    def _identify(self) -> None:
        """Tell Redis whose jobs these are; on a disk that takes no file now, later."""
        try:
            self._store.maintenance.name_runs(identified(self._runs))
        except OSError as error:
            log.error("workers of other boxes cannot be told which runs directory this is: %s", error)

    def _redis_trusted(self, now: float) -> bool:
        """Leases are judged only after Redis was there, to be renewed in, for one whole lease."""
        assert self._reachable_since is not None
        return min(now - self._reachable_since, self._store.maintenance.uptime_s()) >= self._lease_s

    def _project_all(self, wiped: bool) -> list[tuple[RunDir, JobRecord]]:
        """Bring Redis up to every run directory. Returns the jobs that are not over."""
        sweep(self._runs)
        runs = list_runs(self._runs)
        damaged = set(self._store.all_damaged())
        for run in runs:
            if run.id in damaged:  # who found the damage may have read more of it
                self._records.pop(run.id, None)
                event_log(run.events_file).forget()
        for gone in self._store.maintenance.known() - {run.id for run in runs}:
            if not (self._runs / gone).exists():
                log.error("job %s has no run directory any more and is forgotten", gone)
                self._store.forget(gone)
        if wiped:  # each waits for the disk of Redis, which takes the writes of many at once
            with ThreadPoolExecutor(REBUILDING, "rebuild") as pool:
                records = list(pool.map(lambda run: self._projected(run, wiped), runs))
        else:
            records = [self._projected(run, wiped) for run in runs]
        pairs = zip(runs, records, strict=True)
        whole = [(run, record) for run, record in pairs if record is not None]
        for repaired in damaged & {run.id for run, _ in whole}:
            self._store.clear_damage(repaired)
            log.warning("job %s can be read again", repaired)
        for run, record in whole:
            if record.dry_run and record.status in (Status.FAILED, Status.CANCELLED):
                self._remove_when_old(run, record)
        return [(run, record) for run, record in whole if not record.status.terminal]

    def _remove_when_old(self, run: RunDir, record: JobRecord) -> None:
        if record.finished_at is None or self._wall_clock() - record.finished_at < REFUSED_DRY_RUN_S:
            return
        try:
            moved = move_away(run)
        except (Conflict, NotFound, OSError) as error:  # somebody deletes it now, or the next pass does
            log.warning("dry run %s stays for now: %s", run.id, error)
            return
        self._store.forget(run.id)
        self._records.pop(run.id, None)
        remove(moved)
        log.info("dry run %s, which was %s a day ago, is deleted", run.id, record.status)

    def _projected(self, run: RunDir, wiped: bool) -> JobRecord | None:
        """The record of one job, which Redis knows now. None: it is damaged, which Redis knows, too; or gone."""
        try:
            return self._project(run, wiped)
        except Damaged as error:
            self._show_damage(run, error)
        except (Conflict, NotFound, OSError) as error:
            log.error("job %s is left alone: %s", run.id, error)
        except (StoreUnavailable, redis.RedisError):
            raise
        except Exception as error:  # whatever it is, it must not keep all other jobs from Redis
            hint = f"to remove it: `longhaul cancel {run.id}`, and `longhaul delete {run.id}` when it has ended"
            message = f"an unexpected error, {type(error).__name__}: {error}"
            self._show_damage(run, Damaged(message, hint=hint), error)
        return None

    def _show_damage(self, run: RunDir, damage: Damaged, unforeseen: Exception | None = None) -> None:
        try:
            if self._store.mark_damaged(run, damage):
                log.error("job %s is damaged and left alone: %s; %s", run.id, damage, damage.hint, exc_info=unforeseen)
        except (StoreUnavailable, redis.RedisError):
            raise
        except Exception:
            log.exception("job %s is left alone, and cannot be shown as damaged", run.id)

    def _project(self, run: RunDir, wiped: bool) -> JobRecord:
        state = run.state()
        cached = self._records.get(run.id)
        record = cached[1] if cached and cached[0] == state else None
        if record is None and not wiped:
            record = run.verified()
        known = 0 if wiped else self._store.number(run.id)
        if record is None or known != record.number:
            with run.locked() as events:  # nobody deletes it now: Redis is never given back what is gone
                record = run.verified()
                known = 0 if wiped else self._store.number(run.id)
                if known > record.number:  # the file was repaired, or comes from a backup
                    self._store.clear_damage(run.id, reproject=True)
                    known = 0
                # Also of a job that is known again already: an event of its own has told Redis all but its key.
                if known == 0 and record.idempotency_key and record.body_sha256:
                    self._store.reserve(record.idempotency_key, run.id, record.body_sha256)
                self._store.project(run, record, events[known:])
        self._records[run.id] = (state, record)
        return record

    def _check_leases(self, open_jobs: list[tuple[RunDir, JobRecord]]) -> None:
        for job, token in self._store.maintenance.expired():
            run = RunDir(self._runs / job)
            if not run.held():
                times = self._store.maintenance.expire(job, token)
                if times:
                    log.warning("job %s: its lease ran out (%d in this stage)", job, times)
                    self._take_over(run, times)
        for (
            run,
            record,
        ) in open_jobs:  # running, but with no lease at all: Redis was wiped, or release came before the end
            if record.status is Status.RUNNING and not self._store.maintenance.leased(run.id) and not run.held():
                self._take_over(run, 1)

    def _take_over(self, run: RunDir, times: int) -> None:
        """End what the vanished supervisor left open."""

        def decide(record: JobRecord) -> list[AnyFact]:
            if record.status is Status.RUNNING:
                box = f" (box {record.box})" if record.box else ""
                error = Fault.of(Reason.WORKER_LOST, f": it was not heard of for too long{box}")
                lost = Finished(at=time.time(), reason=Reason.WORKER_LOST, step=record.progress_step, error=error)
                return ending(run, record, record.attempt, lost)
            if record.status is Status.VALIDATING and times >= MOST_EXPIRIES:
                return [stage_lost(run, record, times)]
            return []

        try:
            record, new = self._store.append(run, decide)
        except (Conflict, NotFound, Damaged, OSError) as error:
            log.info("job %s: nothing to take over: %s", run.id, error)
            return
        except (StoreUnavailable, redis.RedisError):
            raise
        except Exception:
            log.exception("job %s cannot be taken over; tried again in %.0f s", run.id, EVERY_S)
            return
        if new:
            log.warning("job %s: taken over, now %s", run.id, record.status.value)

    def _report_waits(self) -> None:
        """Jobs that no GPU here can take say so. Where all GPUs that could take a job are unusable, the first such job
        says why: once, and again if the why changes.

        In its events, and so in its record and to every sink. It moves no job: with a GPU the job starts by itself.
        """
        waiting = self._store.waiting_to_train()
        trainers = [worker for worker in self._store.workers.all() if worker.stage == Stage.TRAIN] if waiting else []
        one_says = False
        for job, needs in waiting if trainers else ():
            why = needs.unmet_by_all(trainers)
            able = [worker for worker in trainers if needs.unmet_by(worker) is None]
            if why is None and not one_says and not any(worker.healthy for worker in able):
                why, one_says = "; ".join(sorted({str(worker.why) for worker in able})), True
            known = self._records.get(job)
            here = any(worker.healthy for worker in able)
            if why is None and here and known is not None and (known[1].waiting_reason or "").startswith(NO_GPU):
                why = "there is a GPU again that can take the job: it waits for its turn"
            if why is not None:
                self._report_wait(job, why, available=here)

    def _report_wait(self, job: str, why: str, available: bool) -> None:
        def decide(record: JobRecord) -> list[AnyFact]:
            reported = record.status is not Status.QUEUED or record.waiting_reason == why
            return [] if reported else [DeviceWaiting(message=why, available=available)]

        try:
            _, new = self._store.append(RunDir(self._runs / job), decide)
        except (Conflict, NotFound, Damaged, OSError) as error:
            log.error("job %s: the reason why it waits is not shown: %s", job, error)
            return
        if new:
            log.warning("job %s waits for a GPU: %s", job, why)
