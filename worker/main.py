"""The worker processes: one per RQ queue (check, prepare, train), and publish."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.connection import connect
from jobs.errors import StoreUnavailable
from jobs.queue import Tickets
from jobs.state import Stage
from jobs.store import Store
from worker.card import Card, NoCard, usable_card
from worker.heartbeat import forget, report, worker_facts
from worker.publish import Line, publish, sinks_of
from worker.reconcile import Reconciler
from worker.settings import WorkerSettings
from worker.stage_worker import StageWorker

log = logging.getLogger("longhaul.worker")
LOOK_FOR_CARD_S = 15.0


def serve_stage(stage: Stage, settings: WorkerSettings) -> None:
    """Work on one queue until SIGTERM."""
    facts = worker_facts(stage.value, settings)
    store = Store(connect(settings.redis_url))
    settings.runs.mkdir(parents=True, exist_ok=True)
    if stage is Stage.TRAIN and settings.device == "cuda":
        card = wait_for_card(store, facts, settings.trainer_environment.get("CUDA_VISIBLE_DEVICES", ""))
        facts |= {"gpu": card.facts()}
        # One train worker a card: its trainers see that card alone.
        environment = {**settings.trainer_environment, "CUDA_VISIBLE_DEVICES": card.uuid}
        settings = dataclasses.replace(settings, trainer_environment=environment)
    log.info("worker %s waits for work in stage %s (Redis %s)", facts["name"], stage.value, settings.redis_shown)
    try:
        StageWorker(stage, settings, facts).work(logging_level="WARNING")
    finally:
        forget(store, facts["name"])


def wait_for_card(store: Store, facts: dict[str, Any], wanted: str) -> Card:
    """The card. While there is none: take no job, stay unhealthy, say why; never fall back to the CPU."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    said = None
    while True:
        try:
            return usable_card(wanted)
        except NoCard as error:
            why = f"LONGHAUL_DEVICE=cuda, but {error}"
        if why != said:
            log.error("no job is taken: %s", why)
            said = why
        report(store, facts | {"healthy": False, "why": why})
        if stop.wait(LOOK_FOR_CARD_S):
            forget(store, facts["name"])
            raise SystemExit(0)


def serve_publish(settings: WorkerSettings) -> None:
    """Feed the sinks, and reconcile in a thread, until SIGTERM."""
    settings.runs.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    client = connect(settings.redis_url)
    reconciler = Reconciler(settings.runs, Store(client), Tickets(client))
    thread = threading.Thread(target=reconciler.run, args=(stop,), name="reconcile")
    lines = [Line(sink) for sink in sinks_of(settings)]
    thread.start()
    store = Store(connect(settings.redis_url))
    heart = threading.Thread(target=beat, args=(store, settings, lines, stop), name="heartbeat")
    heart.start()
    try:
        with sole_publisher(settings.runs, stop) as alone:
            if alone:
                publish(settings.runs, lines, Waker(Store(connect(settings.redis_url)), stop), stop)
    finally:
        stop.set()
        thread.join()
        heart.join()


@contextlib.contextmanager
def sole_publisher(runs: Path, stop: threading.Event) -> Iterator[bool]:
    """Hold `runs/.locks/publish.lock`: two publishers would tell everything twice. False: stopped while waiting."""
    locks = runs / ".locks"
    locks.mkdir(exist_ok=True)
    with open(locks / "publish.lock", "ab") as lock:
        waiting = False
        while not stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    log.warning("another publish tells the sinks of %s; this one waits until it has gone", runs)
                    waiting = True
                stop.wait(1.0)
        yield not stop.is_set()


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


def beat(store: Store, settings: WorkerSettings, lines: Sequence[Line], stop: threading.Event) -> None:
    """Heartbeats of publish, with how far each sink is behind."""
    facts = worker_facts("publish", settings)
    while not stop.is_set():
        report(store, facts | {"sinks": {line.sink: line.lag for line in lines}})
        stop.wait(5.0)
    forget(store, facts["name"])
