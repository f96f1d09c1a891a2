"""Several train workers: one for each slot of each GPU, or of the CPU (ADR 15), each a child process that sees its GPU
alone; and one for each task that an engine may have (ADR 19). One that ends is started again.

The others continue. Only when no GPU is left do all end, with the exit code of a lost GPU: Docker then starts the
container anew, with the GPUs that are back.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.errors import StoreUnavailable
from jobs.heartbeat import TOGETHER, Worker, WorkerHeartbeat
from jobs.process import secrets
from jobs.process.lifeline import tied_to_parent
from jobs.reasons import Reason
from jobs.redis.store import Store
from jobs.text.units import format_duration
from worker.heartbeat import forget, report
from worker.warm import WarmProcess

log = logging.getLogger("longhaul.worker")
LOOK_S = 0.2
LOOK_FOR_ALL_S = 5.0
WAITS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Before a child starts again, by the number of ends in a row; the last for all more."""
STEADY_S = 120.0
"""A child that has run this long begins a new count."""


@dataclass(frozen=True)
class DeviceSlot:
    """Where one train worker trains."""

    uuid: str | None
    """Of the GPU, or of those that train together (`TrainWorkerGpu.uuid`); None: the CPU."""
    number: int
    engine: str | None = None
    """None: on this machine."""

    @property
    def text(self) -> str:
        """For people."""
        if self == OWN:
            return "this machine"
        if self.engine is not None:
            return f"the engine {self.engine}, place {self.number}"
        return (f"GPU {self.uuid}" if self.uuid else "the CPU") + (f", slot {self.number}" if self.number else "")


OWN = DeviceSlot(None, -1)
"""All slots of this machine: their worker keeps a child for each, as one does where there are no engines."""


@dataclass
class SlotWorker:
    """The train worker of one slot."""

    slot: DeviceSlot
    process: subprocess.Popen[bytes]
    started_at: float
    ends: int = 0
    """In a row."""
    start_at: float | None = None
    """When it is started again; None: it runs."""


class TrainWorkers:
    """One child for each of these slots, with `environment` besides this process's own, of which `heartbeat` is."""

    def __init__(
        self,
        slots: Sequence[DeviceSlot],
        store: Store,
        environment: Mapping[str, str],
        heartbeat: WorkerHeartbeat,
        warm: WarmProcess | None = None,
    ) -> None:
        """`warm`: forks the trainers of all; kept up."""
        self._store, self._heartbeat, self._warm = store, heartbeat, warm
        self._environment = environment
        self._workers = [SlotWorker(each, start(each, environment), time.monotonic()) for each in slots]
        self._one_was_lost = False

    def serve(self) -> int:
        """Until SIGTERM or SIGINT: then all are asked to stop, and have the time they need. Returns the exit code."""
        stop = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: stop.set())
        log.info("%d train workers: %s", len(self._workers), "; ".join(each.slot.text for each in self._workers))
        look_at = time.monotonic()
        none_left = False
        while not none_left and not stop.wait(LOOK_S):
            if self._warm is not None:
                self._warm.keep_up()
            for worker in self._workers:
                self._keep_up(worker)
            if self._one_was_lost and time.monotonic() >= look_at:
                none_left, look_at = self._none_left(), time.monotonic() + LOOK_FOR_ALL_S
        if none_left:
            log.error("all GPUs are lost: this process ends")
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.wait()
        return Reason.GPU_LOST.exit_code if none_left else 0

    def _keep_up(self, worker: SlotWorker) -> None:
        """Start it again when it has ended: at once where it lost its GPU, for which the next one waits by itself."""
        now = time.monotonic()
        if worker.start_at is not None:
            if now >= worker.start_at:
                if worker.process.returncode != Reason.GPU_LOST.exit_code:  # else its last word stands for a minute
                    for heartbeat in self._heartbeats_of(worker):
                        forget(self._store, heartbeat.name)
                worker.process = start(worker.slot, self._environment)
                worker.started_at, worker.start_at = now, None
            return
        code = worker.process.poll()
        if code is None:
            return
        if code == Reason.GPU_LOST.exit_code:
            self._one_was_lost, worker.start_at = True, now
            return
        worker.ends = 1 if now - worker.started_at > STEADY_S else worker.ends + 1
        wait_s = WAITS_S[min(worker.ends, len(WAITS_S)) - 1]
        worker.start_at = now + wait_s
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        why = f"the train worker of {worker.slot.text} {how}; it starts again in {format_duration(wait_s)}"
        log.error("%s", why)
        for heartbeat in self._heartbeats_of(worker):
            report(self._store, heartbeat.with_health(why))

    def _none_left(self) -> bool:
        """Whether each worker says that it cannot work."""
        healthy = {heartbeat.pid: heartbeat.healthy for heartbeat in self._heartbeats()}
        found = [healthy.get(worker.process.pid) for worker in self._workers]
        self._one_was_lost = not all(found)  # all are back: what makes them sick later is another matter
        return all(each is False for each in found)

    def _heartbeats_of(self, worker: SlotWorker) -> list[Worker]:
        return [each for each in self._heartbeats() if each.pid == worker.process.pid]

    def _heartbeats(self) -> list[Worker]:
        try:
            return [
                each for each in self._store.workers.all()
                if each.parent_pid == self._heartbeat.pid and each.shares_host(self._heartbeat)
            ]  # fmt: skip
        except StoreUnavailable as error:
            log.warning("how the train workers are is not known: %s", error)
            return []


def start(slot: DeviceSlot, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A train worker that sees this GPU alone. From the main thread only: the child is tied to the spawning thread."""
    own = secrets.minimal_environment(os.environ, secrets.NEEDED["train"])
    gpu = {} if slot.uuid is None else {
        "LONGHAUL_GPUS": slot.uuid, "CUDA_VISIBLE_DEVICES": slot.uuid.replace(TOGETHER, ","),
    }  # fmt: skip
    which = [] if slot == OWN else ["--slot", str(slot.number)]
    if slot.engine is None:
        own.pop("LONGHAUL_ENGINES", None)
    else:
        which += ["--engine", slot.engine]
    return subprocess.Popen(
        tied_to_parent(sys.executable, "-m", "worker", "train", *which),
        env={**own, **environment, **gpu},
        process_group=0,  # a terminal's Ctrl+C reaches the parent alone, which passes it on once
    )
