"""The worker processes: one per RQ queue (check, prepare, train), and publish."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from jobs.errors import StoreUnavailable
from jobs.gpus import GPU
from jobs.heartbeat import TOGETHER, Gpu, WorkerHeartbeat
from jobs.process.lifeline import WARM, Stopped, run_child, stopped_once
from jobs.process.secrets import minimal_environment
from jobs.reasons import Reason
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.state import Stage
from worker.engines.left_task import LeftTasks
from worker.engines.settings import EngineSettings
from worker.gpu import GpuLosses, NoGpu, named_gpus, usable_gpu
from worker.heartbeat import Fitness, first_heartbeat, forget, report
from worker.publish import SinkThread, publish
from worker.reconcile import Reconciler
from worker.runs_lock import RETRY_S, RunsDirectoryInUse, RunsLock
from worker.settings import WorkerSettings
from worker.sinks.base import SinkSettings
from worker.sinks.registry import sinks_of
from worker.stage_worker import StageWorker
from worker.sweeps import SweepTurns
from worker.train_workers import OWN, DeviceSlot, TrainWorkers
from worker.warm import WarmProcess

# -- doctor ------------------------------------------------------------------------------------------------------------
# `python -m worker doctor`: finds the GPU that a train worker would use, and has the trainer's process examine it.

DRIVER = Path("/dev/nvidia0")


def examine(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the doctor in this terminal; returns its exit code. It is given no secret."""
    environment = minimal_environment(environ, ())
    device = environ.get("LONGHAUL_DEVICE") or ("cuda" if DRIVER.exists() else "cpu")
    if device not in ("cpu", "cuda"):
        print(f"doctor: LONGHAUL_DEVICE is {device!r}; set it to cpu or cuda", file=sys.stderr)
        return 2
    environment["LONGHAUL_DEVICE"] = device
    command = [sys.executable, "-m", "worker.training", "doctor", *arguments]
    try:
        with stopped_once():
            if device == "cuda":
                try:
                    names = environ.get("LONGHAUL_GPUS") or environ.get("CUDA_VISIBLE_DEVICES") or "all"
                    gpu = usable_gpu(named_gpus(names.replace(" ", ""))[0].split(TOGETHER)[0])  # one of a group
                except NoGpu as error:
                    command += ["--no-gpu", str(error)]
                else:
                    environment |= {"CUDA_VISIBLE_DEVICES": gpu.uuid, GPU: gpu.facts.encode()}
                    command += ["--driver", gpu.driver]
            return run_child(command, environment)
    except Stopped as stopped:
        print("doctor: stopped; nothing is kept", file=sys.stderr)
        return stopped.code


# -- main --------------------------------------------------------------------------------------------------------------

log = logging.getLogger("longhaul.worker")
LOOK_FOR_GPU_S = 15.0
Found = TypeVar("Found")


def serve_train(settings: WorkerSettings, slot: int | None = None, engine: str | None = None) -> int:
    """A train worker for each slot of each GPU, or of the CPU, and for each task that an engine may have: the only one
    is this process; of several each is a child of it, which is told its slot.
    """
    if engine is not None:
        return serve_engine(settings, settings.engines[engine], slot or 0)
    heartbeat, store = first_heartbeat(Stage.TRAIN.value, settings), Store(connect(settings.redis_url))
    if settings.engines:
        own = [] if settings.gpus == "none" else [OWN]
        places = [DeviceSlot(None, n, name) for name, each in settings.engines.items() for n in range(each.at_once)]
        stop = threading.Event()
        left = threading.Thread(
            target=LeftTasks(settings.runs, settings.engines).run, args=(stop,), name="left-tasks", daemon=True
        )
        left.start()
        try:
            return TrainWorkers([*own, *places], store, {}, heartbeat).serve()
        finally:
            stop.set()
    heartbeat = heartbeat.model_copy(update={"slot": slot or 0})
    on_cpu = settings.device == "cpu"
    uuids = [] if on_cpu else wait_for(store, heartbeat, lambda: named_gpus(settings.gpus))
    slots = [DeviceSlot(uuid, each) for each in range(settings.trials_at_once) for uuid in uuids or (None,)]
    if slot is None and len(slots) > 1:
        forget(store, heartbeat.name)
        if not on_cpu:
            return TrainWorkers(slots, store, {}, heartbeat).serve()
        threads = threads_for(settings.trials_at_once)
        warm = WarmProcess({**settings.trainer_environment, **threads})
        try:
            return TrainWorkers(slots, store, {**threads, WARM: warm.socket}, heartbeat, warm).serve()
        finally:
            warm.close()
    if on_cpu:
        serve_stage(Stage.TRAIN, settings, heartbeat)
        return 0
    losses = GpuLosses(settings.runs)
    waiting = heartbeat.model_copy(update={"gpu": last_reported(store, uuids[0])})
    gpu = wait_for(store, waiting, partial(usable_and_steady, uuids[0], losses))
    heartbeat = heartbeat.model_copy(update={"gpu": gpu})
    # Its trainers see that GPU alone, or those that train together.
    environment = {**settings.trainer_environment, "CUDA_VISIBLE_DEVICES": gpu.visible}
    lost = serve_stage(Stage.TRAIN, dataclasses.replace(settings, trainer_environment=environment), heartbeat)
    if lost:
        losses.add(gpu.uuid)
        return Reason.GPU_LOST.exit_code
    return 0


def serve_engine(settings: WorkerSettings, engine: EngineSettings, place: int) -> int:
    """Hand jobs over to an engine, one at a time, and follow them there. Nothing trains on this machine."""
    settings = dataclasses.replace(settings, device=engine.device)
    heartbeat = first_heartbeat(Stage.TRAIN.value, settings)
    serve_stage(
        Stage.TRAIN, settings, heartbeat.model_copy(update={"slot": 0, "engine": engine.name, "gpu": engine.gpu(place)})
    )
    return 0


def threads_for(slots: int) -> dict[str, str]:
    """What shares the cores among the trainers of so many slots, unless the environment says it already."""
    name = "OMP_NUM_THREADS"
    return {} if name in os.environ else {name: str(max(1, len(os.sched_getaffinity(0)) // slots))}


def serve_stage(stage: Stage, settings: WorkerSettings, heartbeat: WorkerHeartbeat) -> bool:
    """Work on one queue until SIGTERM, or until the worker's GPU is lost. Returns whether it is."""
    store = Store(connect(settings.redis_url))
    log.info("worker %s waits for work in stage %s (Redis %s)", heartbeat.name, stage.value, settings.masked_redis_url)
    # Libraries that training imports use CUDA at once, and what has used it cannot fork.
    elsewhere = stage is Stage.TRAIN and (settings.device == "cuda" or heartbeat.engine is not None)
    own = None if elsewhere or settings.warm is not None else WarmProcess(settings.trainer_environment)
    worker = StageWorker(stage, settings, heartbeat, own or (None if elsewhere else settings.warm))
    try:
        worker.work(logging_level="WARNING")
    finally:
        if own is not None:
            own.close()
        if worker.gpu_lost is None:  # else its last word stands for a minute: reconcile tells the queue why it waits
            forget(store, heartbeat.name)
    return worker.gpu_lost is not None


def usable_and_steady(uuid: str, losses: GpuLosses) -> Gpu:
    """The GPU. Raises NoGpu, also while it is left alone because it was lost again and again."""
    gpu = usable_gpu(uuid)
    if (pause := losses.pause(uuid)) is not None:
        raise NoGpu(pause)
    return gpu


def last_reported(store: Store, uuid: str) -> Gpu | None:
    """The GPU as a worker before this one knew it: while it is away, jobs that need it wait for it."""
    try:
        return next((each.gpu for each in store.workers.all() if each.gpu and each.gpu.uuid == uuid), None)
    except StoreUnavailable:
        return None


def wait_for(store: Store, heartbeat: WorkerHeartbeat, look: Callable[[], Found]) -> Found:
    """What `look` finds. While that raises NoGpu: take no job, stay unhealthy, say why; never fall back to the CPU."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    reported = None
    while True:
        try:
            found = look()
        except NoGpu as error:
            why = f"LONGHAUL_DEVICE=cuda, but {error}"
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if not stop.is_set():
                return found
            forget(store, heartbeat.name)
            raise SystemExit(0)
        if why != reported:
            log.error("no job is taken: %s", why)
            reported = why
        report(store, heartbeat.with_health(why))
        if stop.wait(LOOK_FOR_GPU_S):
            forget(store, heartbeat.name)
            raise SystemExit(0)


def serve_publish(settings: WorkerSettings) -> int:
    """Feed the sinks, and reconcile in a thread, until SIGTERM. Returns 2 when a sink's setting is wrong, or when it is
    refused the runs."""
    try:
        sinks = sinks_of(SinkSettings(settings.runs, settings.integrations, settings.public_url))
    except ValueError as error:
        log.error("a setting is wrong: %s", error)
        return 2
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    store = Store(connect(settings.redis_url))
    heartbeat = first_heartbeat("publish", settings)
    lines = [SinkThread(sink) for sink in sinks]
    heart = threading.Thread(
        target=beat, args=(store, heartbeat, lines, Fitness("publish", settings), stop), name="heartbeat"
    )
    client = connect(settings.redis_url)
    reconciler = Reconciler(settings.runs, Store(client), Tickets(client))
    thread = threading.Thread(target=reconciler.run, args=(stop,), name="reconcile")
    trying = connect(settings.redis_url)
    sweeps = threading.Thread(
        target=SweepTurns(settings.runs, Store(trying), Tickets(trying)).run, args=(stop,), name="sweeps"
    )
    lock = RunsLock(settings.runs, store, name=heartbeat.name, redis=settings.masked_redis_url)
    heart.start()
    try:
        with lock:
            ours = lock.wait_or_join(stop)
            thread.start()  # also beside a publish of the same control plane: one of the two leads
            while not ours and not stop.wait(RETRY_S):
                ours = lock.wait_or_join(stop)
            if ours:
                sweeps.start()
                publish(settings.runs, lines, Waker(Store(connect(settings.redis_url)), stop), stop)
    except RunsDirectoryInUse as error:
        log.error("%s", error)
        stop.set()
        heart.join()
        report(store, heartbeat.with_health(str(error)))
        return 2
    finally:
        stop.set()
        for each in (thread, sweeps):
            if each.ident is not None:
                each.join()
        heart.join()
    return 0


class Waker:
    """Waits until any job has a new event; with Redis away it is a plain, short wait."""

    def __init__(self, store: Store, stop: threading.Event) -> None:
        self._store = store
        self._stop = stop
        self._last = "$"

    def __call__(self, timeout_s: float) -> None:
        """Return when something happened, or after at most `timeout_s` (and 1 s at a time, to see a stop)."""
        try:
            self._last = self._store.wait_for_event(self._last, min(timeout_s, 1.0))
        except StoreUnavailable:
            self._stop.wait(min(timeout_s, 1.0))


def beat(
    store: Store, heartbeat: WorkerHeartbeat, threads: Sequence[SinkThread], fitness: Fitness, stop: threading.Event
) -> None:
    """Heartbeats of publish, with how far each sink is behind."""
    while not stop.is_set():
        fitness.check()
        sinks = {thread.sink: thread.lag for thread in threads}
        report(store, heartbeat.with_health(fitness.why).model_copy(update={"sinks": sinks}))
        stop.wait(5.0)
    forget(store, heartbeat.name)
