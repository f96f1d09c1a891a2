"""One attempt, from top to bottom. Runs in an RQ work-horse; there is no torch in it.

A ticket says "there is work on this queue". The horse takes the head of our own order together with its lease, starts
the stage's trainer process, turns what that process writes into events, and says how it ended. Everything it knows is
in the run directory; when this process is killed, reconcile resumes from there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Self

from jobs.attempt import Activity, CheckResult, Finished, Noted, PrepareResult
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, last_metrics
from jobs.errors import Conflict, Damaged, NewerFormat, NotFound, StoreUnavailable
from jobs.events import AnyFact, AttemptEnded, AttemptStarted, JobChecked, JobPrepared, JobQueued, JobValidated
from jobs.frozen import Empty
from jobs.gpu_needs import GpuNeeds
from jobs.gpus import GPU, GpuFacts
from jobs.heartbeat import Gpu, TrainWorker, Worker
from jobs.memory_plan import TEST_LIMIT
from jobs.process.logs import JOB
from jobs.reasons import Reason
from jobs.record import JobRecord
from jobs.redis.connection import Tickets
from jobs.redis.store import Store
from jobs.redis.workers import lease_token
from jobs.spec import JobSpec
from jobs.state import Requested, Stage, Status
from jobs.trainer_facts import Fault
from jobs.version import VERSION, library_versions
from worker.ending import ending, unfinished
from worker.engines.process import EngineProcess
from worker.gpu import NoGpu, usable_gpu
from worker.settings import WorkerSettings
from worker.trainer import Starter, Trainer, here

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


SENT = (
    "HF_HUB_OFFLINE", "PYTHONUNBUFFERED", TEST_LIMIT,
    *(f"LONGHAUL_{name}" for name in ("RUNS", "DATA", "UPLOADS", "PREPARED", "MODELS")),
)  # fmt: skip
"""Of a trainer's variables those that it is given on the node of an engine, which has its own PATH and HOME."""


@dataclass(frozen=True)
class WorkerContext:
    """What the work-horse was started with."""

    settings: WorkerSettings
    store: Store
    tickets: Tickets
    worker: str
    stopping: threading.Event
    """Set by SIGTERM."""
    gpu: Gpu | None
    """That of a train worker; None on a CPU."""
    gpu_lost: Event
    """Set by the horse when its attempt lost the GPU; the worker looks at it."""
    warm: str | None = None
    """Socket of the process that forks trainers; None: each is started as any program."""
    slot: int = 0
    """That of a train worker."""
    engine: str | None = None
    """Where a train worker has its jobs trained; None: here."""
    outdated: Event | None = None
    """Set by the horse when a newer version has written events of its job; the worker looks at it."""

    @property
    def train_worker(self) -> TrainWorker:
        """What decides which jobs it may start."""
        return TrainWorker(device=self.settings.device, gpu=self.gpu, slot=self.slot, engine=self.engine)


CONTEXT: ContextVar[WorkerContext] = ContextVar("context")
"""Set by the worker in its forked child: an RQ job function gets only what the ticket says."""


def work(stage_name: str) -> None:
    """The one function that tickets name."""
    context, stage = CONTEXT.get(), Stage(stage_name)
    token = lease_token(context.worker)
    job = context.store.claim(stage, token, context.train_worker)
    if job is None:
        add_useful_ticket(context, stage, in_vain=True)
        return
    JOB.set(job)  # a horse works on one job: all that it logs is about that
    with suppress(StoreUnavailable):  # another slot of the GPU may be idle; reconcile looks, too
        add_useful_ticket(context, stage)
    run = RunDir(context.settings.runs / job)
    try:
        with Lease(context.store, job, token) as lease:
            record = (train if stage is Stage.TRAIN else validate)(context, run, stage, lease)
    except Conflict as error:  # cancelled, paused or taken over meanwhile: the file decided
        log.info("job %s: let go in stage %s: %s", job, stage.value, error)
        context.store.release(job, token)
    except NotFound as error:  # deleted, which reconcile sees; or this box has another folder: its lease runs out
        log.error("job %s has no run directory here: %s", job, error)
    except NewerFormat as error:  # no damage: a worker of that version reads it
        log.error("job %s is left to a worker of a newer version: %s", job, error)
        context.store.release(job, token)
        if context.outdated is not None:
            context.outdated.set()
        return
    except Damaged as error:
        log.error("job %s is left alone until it is repaired: %s", job, error)
        context.store.mark_damaged(run, error, release=token)
    else:
        if record.status in (Status.QUEUED, Status.VALIDATING):
            context.tickets.add(record.stage)
    add_useful_ticket(context, stage)


def add_useful_ticket(context: WorkerContext, stage: Stage, *, in_vain: bool = False) -> None:
    """One more ticket, if one is missing: this one did nothing for those behind, or for the worker of another GPU."""
    if context.store.useful_tickets(stage, in_vain=in_vain) > context.tickets.count(stage):
        context.tickets.add(stage)


@dataclass(frozen=True)
class News:
    """What has happened since the last look at a trainer and its job."""

    lines: list[Noted | Finished]
    """That the trainer has written."""
    events_changed: bool
    """What users ask for is in the events, and nowhere else."""
    ended: bool
    """The trainer has; this is the last."""


def follow(store: Store, trainer: Trainer, run: RunDir, lease: Lease) -> Iterator[News]:
    """Look at a trainer until it has ended, show what it does, and kill it if it makes no progress.

    Raises Conflict, the trainer killed, when another supervisor holds the job.
    """
    before: object = None
    shown: Activity | None = None
    ended = False
    while not ended:
        ended = trainer.wait(LOOK_S)
        lines, now = trainer.read_lines(), run.state()
        shown = show_activity(store, run, None if ended else trainer.activity, shown)
        yield News(lines, now != before, ended)
        before = now
        if not ended and lease.lost:
            trainer.kill("lease lost")
            raise Conflict(f"job {run.id}: another supervisor holds it")
        if not ended and trainer.stalled:
            trainer.kill("stalled")


def train(context: WorkerContext, run: RunDir, stage: Stage, lease: Lease) -> JobRecord:
    """One attempt at a queued job, from attempt.started to what policy makes of its end."""
    run.verified()
    gpus = GpuNeeds.of(run.spec().resources, run.record().plan).gpus
    started = AttemptStarted(
        worker=context.worker,
        box=context.settings.box,
        device=context.settings.device,
        gpu=context.gpu.uuid if context.gpu else None,
        gpu_name=context.gpu.text(gpus) if context.gpu else None,
        versions={
            "longhaul": VERSION,
            **library_versions("torch", "transformers"),
            **({"driver": context.gpu.driver} if context.gpu and context.gpu.driver else {}),
        },
        engine=context.engine,
    )
    record, _ = context.store.append(run, [started])
    attempt = record.attempt
    trainer = Trainer(run, stage, attempt, starter(context, run, attempt, gpus))
    rows_seen = 0
    facts: list[AnyFact] = []
    untold: list[AnyFact] = []
    reported = 0
    retry_at = 0.0
    asked = over = False
    explained: Finished | None = None
    for news in follow(context.store, trainer, run, lease):
        untold.extend(trainer.facts())
        facts.extend(line.fact for line in news.lines if isinstance(line, Noted))
        explained = next((line for line in news.lines if isinstance(line, Finished)), explained)
        if not over and (untold or reported < len(facts)) and (news.ended or time.monotonic() >= retry_at):
            try:
                context.store.append(run, lambda now: untold + unreported(facts, now, attempt), attempt=attempt)
                reported = len(facts)
                untold.clear()
            except Conflict as error:
                over = True
                log.warning("job %s: attempt %d is over: %s", run.id, attempt, error)
            except (OSError, Damaged) as error:  # the facts are in the attempt file, too, and are reported later
                log.error("job %s: %d events wait: %s", run.id, len(untold) + len(facts) - reported, error)
                retry_at = time.monotonic() + RETRY_S
        rows_seen = show_latest(context.store, run, rows_seen, record.scratch_attempt)
        if news.events_changed:
            try:
                current = run.record()
                asked = current.requested is not Requested.NONE
                over = current.attempt != attempt or current.status is not Status.RUNNING  # a repair cut it off
            except Damaged as error:  # training itself is not affected
                log.error("job %s continues, but its requests cannot be read: %s", run.id, error)
        if asked or over or context.stopping.is_set():
            trainer.ask_to_stop()
    if lease.lost:
        raise Conflict(f"job {run.id}: another supervisor holds it")
    end = explained or trainer.end()
    if context.engine is None:
        end = or_gpu_lost(end, context.gpu)
    said = None if explained is None else explained.reason
    # Of several GPUs: one that rank 0 does not see, or whose memory ran out; the next attempt then has to know.
    if end.reason is not said and (said is not None or end.reason is Reason.OOM_IN_OPTIMIZER):
        append_line(run.attempt_file(attempt), end)
    lease.stop_renewing()
    while True:
        try:
            record, new = context.store.append(
                run, lambda now: ending(run, now, attempt, end), attempt=attempt, release=lease.token
            )
            ends = [event.fact.reason for event in new if isinstance(event.fact, AttemptEnded)]
            if context.engine is None and Reason.GPU_LOST in ends:
                context.gpu_lost.set()
            return record
        except OSError as error:
            log.error("job %s: its end cannot be recorded: %s", run.id, error)
            if context.stopping.wait(RETRY_S):
                raise  # reconcile finds it


def starter(context: WorkerContext, run: RunDir, attempt: int, gpus: int) -> Starter:
    """What starts the trainer of this attempt: here, or on the engine that the worker hands jobs over to."""
    environment = trainer_environment(context.settings, Stage.TRAIN, run)
    if context.engine is None:
        return here(environment, context.warm)
    engines, engine = context.settings.engines, context.engine
    sent = {name: value for name, value in environment.items() if name in SENT or name in UNDER_A_LIMIT}
    return lambda _arguments, _output: EngineProcess(engines, engine, run, attempt, sent, gpus)


def unreported(facts: list[AnyFact], now: JobRecord, attempt: int) -> list[AnyFact]:
    """What the trainer has noted that is not among the events: also what a repair has cut off them."""
    return facts[now.noted :] if now.attempt == attempt else facts


def or_gpu_lost(end: Finished, gpu: Gpu | None) -> Finished:
    """The end of a trainer that did not report a reason, or lost a rank: `gpu_lost` if its GPU cannot be used now."""
    if gpu is None or end.reason not in (Reason.CRASH, Reason.KILLED, Reason.STALLED):
        return end
    try:
        usable_gpu(gpu.uuid)
    except NoGpu as error:
        fault = Fault.of(Reason.GPU_LOST, f": {error}")
        return end.model_copy(update={"reason": Reason.GPU_LOST, "error": fault})
    return end


def validate(context: WorkerContext, run: RunDir, stage: Stage, lease: Lease) -> JobRecord:
    """Check or prepare a job that is being validated."""
    run.verified()
    environment = trainer_environment(context.settings, stage, run)
    if (device := planned_device(context.store, spec := run.spec())) is not None:
        environment["LONGHAUL_DEVICE"] = device
    if (gpu := planned_gpu(context.store, spec)) is not None:
        environment[GPU] = gpu.encode()
    trainer = Trainer(run, stage, None, here(environment, context.warm))
    lines: list[Noted | Finished] = []
    for news in follow(context.store, trainer, run, lease):
        lines += news.lines
        if news.ended:
            break
        if context.stopping.is_set():
            trainer.kill("stopping")  # check and prepare write everything atomically
            raise Conflict("this worker is stopping")
        if news.events_changed and run.record().status is not Status.VALIDATING:
            trainer.kill("cancelled")
            raise Conflict("it is no longer being validated")
    end = next((line for line in reversed(lines) if isinstance(line, Finished)), None)
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
    record, _ = context.store.append(run, lambda now: stage_outcome(run, now, stage, end), release=lease.token)
    return record


def stage_outcome(run: RunDir, record: JobRecord, stage: Stage, end: Finished) -> list[AnyFact]:
    """The facts that follow from a finished check or prepare."""
    if not end.reason.completes:
        fault = end.error or Fault.of(end.reason, f" (stage {stage.value})")
        return [unfinished(run, record, fault)]
    match end.result:
        case CheckResult(plan=plan):
            return [JobChecked(plan=plan), JobValidated()] if record.dry_run else [JobChecked(plan=plan)]
        case PrepareResult() as result:
            return [JobPrepared(**dict(result)), JobQueued()]
        case _:
            raise AssertionError(f"stage {stage.value} is done and says nothing of it")


def trainer_environment(settings: WorkerSettings, stage: Stage, run: RunDir | None = None) -> dict[str, str]:
    """No secret reaches a trainer; check and prepare get the hub's. Without a run: as most have it."""
    environment = dict(settings.trainer_environment)
    if stage is Stage.TRAIN:
        environment["HF_HUB_OFFLINE"] = "1"
        if settings.device == "cpu" and (TEST_LIMIT in environment or (run is not None and has_budget(run))):
            environment |= UNDER_A_LIMIT
    else:
        environment |= {**settings.hub_tokens, "CUDA_VISIBLE_DEVICES": ""}
    return environment


def has_budget(run: RunDir) -> bool:
    """Whether the job sets `memory.budget`: then it is a hard limit."""
    try:
        return run.spec().memory.budget != "auto"
    except (NotFound, Damaged):  # the trainer, too, will read it, and say what is wrong with it
        return False


def show_activity(store: Store, run: RunDir, activity: Activity | None, shown: Activity | None) -> Activity | None:
    """Copy what the trainer does to Redis when it has changed; where Redis is away, the next change is. Returns it."""
    if activity == shown:
        return shown
    try:
        store.set_activity(run.id, activity)
    except StoreUnavailable as error:
        log.warning("job %s: what it does is not shown (%s)", run.id, error)
    return activity


def show_latest(store: Store, run: RunDir, seen: int, scratch_attempt: int) -> int:
    """Copy the newest row of metrics to Redis when the file has changed. Returns its size.

    Rows of attempts before `scratch_attempt` are removed as soon as the trainer has loaded: they are not shown.
    """
    try:
        size = os.stat(run.metrics_file).st_size
    except FileNotFoundError:
        return seen
    if size != seen:
        row = last_metrics(run.metrics_file)
        try:
            store.set_latest(run.id, None if row is None or row.attempt < scratch_attempt else row)
        except StoreUnavailable as error:
            log.warning("job %s: latest metrics not shown (%s)", run.id, error)
    return size


# -- the GPU that a job is planned for -----------------------------------------------------------------------


def trainers_for(store: Store, spec: JobSpec) -> list[Worker]:
    """The train workers of the job's engine, or of our own machines."""
    try:
        workers = store.workers.all()
    except StoreUnavailable as error:
        log.warning("time and memory are planned without knowing the GPUs: %s", error)
        return []
    return [each for each in workers if each.stage == Stage.TRAIN and each.engine == spec.resources.engine]


def planned_device(store: Store, spec: JobSpec) -> str | None:
    """`cpu` or `cuda`: what the nodes of the job's engine have. None: as this machine."""
    trainers = trainers_for(store, spec) if spec.resources.engine is not None else []
    return next((each.device for each in trainers), None)


def planned_gpu(store: Store, spec: JobSpec) -> GpuFacts | None:
    """The GPU that a job is planned for: of those that its train workers report and that meet `resources`, the largest,
    and of these one with native bf16, the fastest, and the one whose host has the most memory. None: there is none.

    A job that needs native bf16 gets one without only where there is no other: *check* then refuses it.
    """
    return max(_fitting(store, spec), key=_best, default=None)


def _fitting(store: Store, spec: JobSpec) -> list[GpuFacts]:
    trainers = trainers_for(store, spec)
    if any(each.device == "cuda" and each.gpu is None for each in trainers):
        return []
    needs = GpuNeeds.of(spec.resources, Empty())
    reported = [each.gpu.facts for each in trainers if each.gpu is not None]
    fitting = [gpu for gpu in reported if needs.unmet(gpu) is None]
    return [gpu for gpu in fitting if gpu.native_bf16] or fitting if spec.needs_native_bf16 else fitting


def _best(gpu: GpuFacts) -> tuple[int, bool, float, int, int]:
    return gpu.memory_bytes, gpu.native_bf16, gpu.peak_flops or 0.0, gpu.host_memory_bytes or 0, gpu.count


# -- the lease -----------------------------------------------------------------------------------------------


lease_log = logging.getLogger("longhaul.lease")
RENEW_S = 5.0


class Lease:
    """Holds the lease `token` on `job`. With Redis away it continues: then the trainer's lock decides."""

    def __init__(self, store: Store, job: str, token: str) -> None:
        self.job = job
        self.token = token
        self._store = store
        self._lost = threading.Event()
        self._done = threading.Event()
        renew = partial(copy_context().run, self._renew)  # what it logs is about the same job
        self._thread = threading.Thread(target=renew, name=f"lease-{job}", daemon=True)

    @property
    def lost(self) -> bool:
        """Another worker holds the job now."""
        return self._lost.is_set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_renewing()

    def stop_renewing(self) -> None:
        """Before the lease is released, so that a late renewal cannot take it again."""
        self._done.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._done.wait(RENEW_S):
            try:
                if not self._store.renew(self.job, self.token):
                    lease_log.error("job %s: another worker holds its lease", self.job)
                    self._lost.set()
                    return
            except StoreUnavailable as error:
                lease_log.warning("job %s: lease not renewed, continuing (%s)", self.job, error)
