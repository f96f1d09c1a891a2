"""Reconcile: makes Redis agree with the run directories, and ends what nobody is left to end (design §5).

A thread of publish with its own client; one is active at a time. RQ's own registries decide nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jobs.attempt import Finished
from jobs.errors import Conflict, Damaged, NotFound, StoreUnavailable
from jobs.events import AnyFact, DeviceWaiting
from jobs.queue import Tickets
from jobs.record import JobRecord, fold
from jobs.removal import sweep
from jobs.rundir import RunDir, list_runs
from jobs.state import Stage, Status
from jobs.store import LEASE_MS, Store, new_token
from worker.ending import ending, stage_lost

log = logging.getLogger("longhaul.reconcile")
EVERY_S = 15.0
STANDBY_S = 5.0
"""Between two looks whether the one that leads has gone."""
MOST_EXPIRIES = 5


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
    ) -> None:
        self._runs = runs
        self._store = store
        self._tickets = tickets
        self._lease_s = lease_s
        self._clock = clock
        self._token = new_token()
        self._reachable_since: float | None = None
        self._records: dict[str, tuple[int, JobRecord]] = {}

    def run(self, stop: threading.Event) -> None:
        """Once at start, then every 15 s until told to stop."""
        while not stop.is_set():
            leads = True
            try:
                leads = self.once()
            except Exception:  # the thread that mends everything must not die of one thing; the log says what it was
                log.exception("reconcile failed; next try in %.0f s", EVERY_S)
            stop.wait(EVERY_S if leads else STANDBY_S)
        with contextlib.suppress(StoreUnavailable):
            self._store.upkeep.resign(self._token)

    def once(self) -> bool:
        """One pass: projections, leases, tickets; then a word to the job that no card is there for.

        False: another reconciler leads, which may have been killed a moment ago: its key runs out after 45 s.
        """
        try:
            leads = self._store.upkeep.lead(self._token, int(EVERY_S * 3000))
            now = self._clock()
            if self._reachable_since is None:
                self._reachable_since = now
            if not leads:
                return False
            wiped = self._store.upkeep.begin_rebuild(self._token)
            if wiped:  # the leases are gone with the rest: give their holders the time to take them again
                self._reachable_since = now
            open_jobs = self._project_all(wiped)
            if wiped:
                self._store.upkeep.end_rebuild(self._token)
            if self._redis_trusted(now):
                self._judge(open_jobs)
            for stage in Stage:
                for _ in range(self._store.waiting(stage) - self._tickets.count(stage)):
                    self._tickets.add(stage)
            self._say_why_nothing_trains()
        except StoreUnavailable as error:
            self._reachable_since = None
            log.warning("reconcile waits for Redis: %s", error)
        return True

    def _redis_trusted(self, now: float) -> bool:
        """Leases are judged only after Redis was there, to be renewed in, for one whole lease."""
        assert self._reachable_since is not None
        return min(now - self._reachable_since, self._store.upkeep.uptime_s()) >= self._lease_s

    def _project_all(self, wiped: bool) -> list[tuple[RunDir, JobRecord]]:
        """Bring Redis up to every run directory. Returns the jobs that are not over."""
        sweep(self._runs)
        runs = list_runs(self._runs)
        for gone in self._store.upkeep.known() - {run.id for run in runs}:
            if not (self._runs / gone).exists():
                log.error("job %s has no directory any more: forgotten", gone)
                self._store.forget(gone)
        found = []
        for run in runs:
            try:
                record = self._projected(run, wiped)
            except (Conflict, Damaged, NotFound, OSError) as error:
                log.error("job %s is left alone: %s", run.id, error)
                continue
            if not record.status.terminal:
                found.append((run, record))
        return found

    def _projected(self, run: RunDir, wiped: bool) -> JobRecord:
        size = run.events_file.stat().st_size
        cached = self._records.get(run.id)
        record = cached[1] if cached and cached[0] == size else run.record()
        self._records[run.id] = (size, record)
        known = self._store.number(run.id)
        if wiped or known < record.number:
            with run.locked() as events:  # nobody deletes it now: Redis is never told again of what is gone
                record = fold(run.id, events)
                # Also of a job that is known again already: an event of its own has told Redis all but its key.
                if (wiped or known == 0) and record.idempotency_key and record.body_sha256:
                    self._store.reserve(record.idempotency_key, run.id, record.body_sha256)
                self._store.project(run, record, events[known:])
        return record

    def _judge(self, open_jobs: list[tuple[RunDir, JobRecord]]) -> None:
        for job, token in self._store.upkeep.expired():
            run = RunDir(self._runs / job)
            if not run.held():
                times = self._store.upkeep.expire(job, token)
                if times:
                    log.warning("job %s: its lease ran out (%d in this stage)", job, times)
                    self._take_over(run, times)
        for (
            run,
            record,
        ) in open_jobs:  # running, but with no lease at all: Redis was wiped, or release came before the end
            if record.status is Status.RUNNING and not self._store.upkeep.leased(run.id) and not run.held():
                self._take_over(run, 1)

    def _take_over(self, run: RunDir, times: int) -> None:
        """End what the vanished supervisor left open."""

        def decide(record: JobRecord) -> list[AnyFact]:
            if record.status is Status.RUNNING:
                lost = Finished(at=time.time(), reason="lost", step=record.progress_step)
                return ending(run, record, record.attempt, lost)
            if record.status is Status.VALIDATING and times >= MOST_EXPIRIES:
                return [stage_lost(run, record, times)]
            return []

        try:
            record, new = self._store.append(run, decide)
        except (Conflict, NotFound, Damaged, OSError) as error:
            log.info("job %s: nothing to take over: %s", run.id, error)
            return
        if new:
            log.warning("job %s: taken over, now %s", run.id, record.status.value)

    def _say_why_nothing_trains(self) -> None:
        """When no train worker has a usable card, the job whose turn it is says so: once, and again if the why changes.

        In its events, and so in its record and to every sink. It moves no job: with a card the job starts by itself.
        """
        head = self._store.head(Stage.TRAIN)
        trainers = [worker for worker in self._store.workers.all() if worker["stage"] == Stage.TRAIN] if head else []
        if head is None or not trainers or any(worker["healthy"] for worker in trainers):
            return
        why = "; ".join(sorted({str(worker["why"]) for worker in trainers}))

        def decide(record: JobRecord) -> list[AnyFact]:
            told = record.status is not Status.QUEUED or record.waiting == why
            return [] if told else [DeviceWaiting(message=why)]

        try:
            _, new = self._store.append(RunDir(self._runs / head), decide)
        except (Conflict, NotFound, Damaged, OSError) as error:
            log.error("job %s is not told why it waits: %s", head, error)
            return
        if new:
            log.warning("job %s waits for a card: %s", head, why)
