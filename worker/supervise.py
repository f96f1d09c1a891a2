"""One attempt, told from top to bottom. Runs in an RQ work-horse; there is no torch in it.

A ticket says "there is work on this queue". The horse takes the head of our own order together with its lease, starts
the stage's trainer process, turns what that process writes into events, and says how it ended. Everything it knows is
in the run directory; when this process is killed, reconcile goes on from there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass

from jobs.attempt import Finished, Noted
from jobs.cards import CARD, CardFacts, peak_flops
from jobs.errors import Conflict, Damaged, NotFound, StoreUnavailable
from jobs.events import AnyFact, AttemptStarted, Fault, JobChecked, JobFailed, JobPrepared, JobQueued, JobValidated
from jobs.files import append_line, last_row
from jobs.logs import JOB
from jobs.memory_plan import TEST_LIMIT
from jobs.metrics import MetricRow
from jobs.queue import Tickets
from jobs.record import JobRecord
from jobs.rundir import RunDir
from jobs.state import Stage, Status
from jobs.store import Store
from jobs.workers import lease_token
from worker.ending import ending
from worker.lease import Lease
from worker.settings import WorkerSettings
from worker.trainer import Trainer

log = logging.getLogger("longhaul.supervise")
LOOK_S = 0.1
RETRY_S = 5.0
"""Between two tries to write events to a full disk."""

UNDER_A_LIMIT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    "LRU_CACHE_CAPACITY": "1",
}
"""For a trainer on a CPU with a hard limit, so that what is freed can be had again. glibc's defaults never give memory
back; one arena and mapped blocks do. oneDNN, and torch's layer above it, keep kernels and weights for every shape of a
micro-batch: 23 MiB each for the built-in model. All this makes a step take several times as long
(docs/measurements.md): without a limit nothing of it is set."""


@dataclass(frozen=True)
class Horse:
    """What the work-horse was started with."""

    settings: WorkerSettings
    store: Store
    tickets: Tickets
    worker: str
    stopping: threading.Event
    """Set by SIGTERM."""


HORSE: ContextVar[Horse] = ContextVar("horse")
"""Set by the worker in its forked child: an RQ job function gets only what the ticket says."""


def work(stage_name: str) -> None:
    """The one function that tickets name."""
    horse, stage = HORSE.get(), Stage(stage_name)
    token = lease_token(horse.worker)
    job = horse.store.claim(stage, token)
    if job is None:
        return
    JOB.set(job)  # a horse works on one job: all that it logs is about that
    run = RunDir(horse.settings.runs / job)
    try:
        with Lease(horse.store, job, token) as lease:
            record = (train if stage is Stage.TRAIN else examine)(horse, run, stage, lease)
    except Conflict as error:  # cancelled, paused or taken over meanwhile: the file decided
        log.info("job %s: let go in stage %s: %s", job, stage.value, error)
        horse.store.release(job, token)
    except NotFound:
        log.error("job %s has no directory any more: forgotten", job)
        horse.store.forget(job)
    except Damaged as error:
        log.error("job %s is left alone until somebody mends it: %s", job, error)
        horse.store.park(job, token)
    else:
        if record.status in (Status.QUEUED, Status.VALIDATING):
            horse.tickets.add(record.stage)
        return
    if horse.store.waiting(stage):  # this ticket did nothing for those behind
        horse.tickets.add(stage)


def train(horse: Horse, run: RunDir, stage: Stage, lease: Lease) -> JobRecord:
    """One attempt at a queued job, from attempt.started to what policy makes of its end."""
    record, _ = horse.store.append(run, [AttemptStarted(worker=horse.worker, device=horse.settings.device)])
    attempt = record.attempt
    trainer = Trainer(run, stage, attempt, trainer_environment(horse.settings, stage, run))
    rows_seen = 0
    facts: list[AnyFact] = []
    retry_at = 0.0
    asked = False
    ended = False
    while not ended:
        ended = trainer.wait(LOOK_S)
        facts += [line.fact for line in trainer.listen() if isinstance(line, Noted)]
        if facts and (ended or time.monotonic() >= retry_at):
            try:
                horse.store.append(run, facts, attempt=attempt)
                facts = []
            except OSError as error:  # a full disk: the facts are in the attempt file, too, and are told later
                log.error("job %s: %d events wait: %s", run.id, len(facts), error)
                retry_at = time.monotonic() + RETRY_S
        rows_seen = show_latest(horse.store, run, rows_seen)
        if horse.stopping.is_set() and not asked:
            trainer.ask_to_stop()
            asked = True
        if lease.lost:
            trainer.kill("lease lost")
            raise Conflict(f"job {run.id}: another supervisor holds it")
        if not ended and trainer.silent:
            trainer.kill("silent")
    end = trainer.end()
    lease.stop_renewing()
    while True:
        try:
            record, _ = horse.store.append(
                run, lambda now: ending(run, now, attempt, end), attempt=attempt, release=lease.token
            )
            return record
        except OSError as error:
            log.error("job %s: its end cannot be written down: %s", run.id, error)
            if horse.stopping.wait(RETRY_S):
                raise  # reconcile finds it


def examine(horse: Horse, run: RunDir, stage: Stage, lease: Lease) -> JobRecord:
    """Check or prepare a job that is being validated."""
    environment = trainer_environment(horse.settings, stage, run)
    if (card := best_card(horse.store)) is not None:
        environment[CARD] = card.encode()
    trainer = Trainer(run, stage, None, environment)
    said: list[Noted | Finished] = []
    size = run.events_file.stat().st_size
    while not trainer.wait(LOOK_S):
        said += trainer.listen()
        if horse.stopping.is_set():
            trainer.kill("stopping")  # check and prepare hold nothing that is not written atomically
            raise Conflict("this worker is stopping")
        if lease.lost:
            trainer.kill("lease lost")
            raise Conflict("another supervisor holds it")
        if trainer.silent:
            trainer.kill("silent")
        if (now := run.events_file.stat().st_size) != size:
            size = now
            if run.record().status is not Status.VALIDATING:
                trainer.kill("cancelled")
                raise Conflict("it is not being validated any more")
    said += trainer.listen()
    end = next((line for line in reversed(said) if isinstance(line, Finished)), None)
    if end is None:
        end = trainer.end()
        if trainer.ended_by_signal and trainer.killed_for is None:
            # Something outside killed it: the lease is left to run out; reconcile puts the job back, at most 5 times,
            # and then finds the reason in the attempt file.
            log.error("job %s: stage %s ended: %s", run.id, stage.value, end.error.message if end.error else end.reason)
            append_line(run.attempt_file(stage.value), end)
            lease.stop_renewing()
            return run.record()
    lease.stop_renewing()
    record, _ = horse.store.append(run, lambda now: verdict(now, stage, end), release=lease.token)
    return record


def verdict(record: JobRecord, stage: Stage, end: Finished) -> list[AnyFact]:
    """What a finished check or prepare makes of the job."""
    if end.reason != "done":
        fault = end.error or Fault(code=end.reason, message=f"stage {stage.value} ended: {end.reason}")
        return [JobFailed(error=fault)]
    if stage is Stage.CHECK:
        checked = JobChecked(plan=end.result.get("plan", {}))
        return [checked, JobValidated()] if record.dry_run else [checked]
    result = end.result
    prepared = JobPrepared(
        data=result.get("data", {}),
        steps=result["steps"],
        time=result.get("time"),
        memory=result.get("memory"),
        adopted=result.get("adopted"),
    )
    return [prepared, JobQueued()]


def trainer_environment(settings: WorkerSettings, stage: Stage, run: RunDir) -> dict[str, str]:
    """No secret reaches a trainer; the hub only check and prepare."""
    environment = dict(settings.trainer_environment)
    environment["PYTHONUNBUFFERED"] = "1"
    if stage is Stage.TRAIN:
        environment.pop("HF_TOKEN", None)
        environment["HF_HUB_OFFLINE"] = "1"
        if settings.device == "cpu" and (TEST_LIMIT in environment or has_budget(run)):
            environment |= UNDER_A_LIMIT
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def has_budget(run: RunDir) -> bool:
    """Whether the job sets `memory.budget`: then it is a hard limit."""
    try:
        return run.spec().memory.budget != "auto"
    except (NotFound, ValueError):  # the trainer, too, will read it, and say what is wrong with it
        return False


def best_card(store: Store) -> CardFacts | None:
    """The card on which the job can be fastest, as train workers report theirs; None: none has reported one."""
    try:
        reports = store.workers.all()
    except StoreUnavailable as error:
        log.warning("time and memory are planned without knowing the cards: %s", error)
        return None
    cards = [
        CardFacts(str(report["gpu"]["name"]), int(report["gpu"]["memory_bytes"]))
        for report in reports
        if report["stage"] == Stage.TRAIN and report.get("gpu")
    ]
    return max(cards, key=lambda card: (peak_flops(card.name) or 0.0, card.memory_bytes), default=None)


def show_latest(store: Store, run: RunDir, seen: int) -> int:
    """Copy the newest row of metrics to Redis when the file has grown. Returns its size."""
    try:
        size = os.stat(run.metrics_file).st_size
    except FileNotFoundError:
        return seen
    if size != seen and (row := last_row(run.metrics_file, MetricRow)) is not None:
        try:
            store.set_latest(run.id, row)
        except StoreUnavailable as error:
            log.warning("job %s: latest metrics not shown (%s)", run.id, error)
    return size
