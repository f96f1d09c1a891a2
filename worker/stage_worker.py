"""RQ's worker, with what differs here: the horse dies with its parent, SIGTERM is forwarded to it first, tickets are
ours and nothing else, and heartbeats go to our own key as well.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import zlib
from types import FrameType
from typing import Any, NoReturn

import redis
import rq
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.exceptions import StopRequested
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus

from jobs.disk.measured_file import read_measured
from jobs.heartbeat import TOGETHER, WorkerHeartbeat
from jobs.process.lifeline import tie_to_parent
from jobs.reasons import Reason
from jobs.redis.connection import TICKET_FUNCTION, Tickets, connect, queue_name
from jobs.redis.store import Store
from jobs.state import Stage
from jobs.version import VERSION
from worker.gpu import NoGpu, usable_gpu
from worker.heartbeat import Fitness, report
from worker.settings import WorkerSettings
from worker.supervise import CONTEXT, WorkerContext
from worker.training.machine.host import host_memory
from worker.warm import WarmProcess

# -- ticket ------------------------------------------------------------------------------------------------------------
# RQ's jobs as workers take them: our tickets and nothing else, whatever was written to Redis.
#
# Arguments are JSON, never pickle (a pickle is a program). What is read is bounded before it is unpacked: RQ
# compresses a job's data, and a kilobyte can be made to hold a gigabyte. All is looked at when it is read, for RQ
# reads tickets on more than one way: its maintenance would run the callback of one that no worker has ever taken.

MOST_BYTES = 64 * 1024
"""Ours have some 400."""
_EXTRAS = (
    "_success_callback_name", "_failure_callback_name", "_stopped_callback_name", "webhooks", "_dependency_ids",
    "_instance", "_kwargs", "retries_left", "repeats_left", "group_id",
)  # fmt: skip
"""What RQ can be told to do besides. Ours ask for none of it."""


class NotOurs(ValueError):
    """Somebody else wrote it."""


class Ticket(Job):
    """An RQ job that can be nothing else than one of `jobs.redis.connection.Tickets`, but for its stage."""

    def restore(self, raw_data: dict[bytes, bytes]) -> Any:
        """Take over what Redis holds. Raises NotOurs; RQ's DeserializationError or other errors: it cannot be read."""
        if sum(map(len, raw_data.values())) > MOST_BYTES:
            raise NotOurs(f"a ticket of more than {MOST_BYTES:,} bytes")
        for packed in (raw_data.get(b"data", b""), raw_data.get(b"exc_info", b"")):
            unpacking = zlib.decompressobj()
            try:
                unpacking.decompress(packed, MOST_BYTES)
            except zlib.error:  # RQ takes it as it is, then
                continue
            if unpacking.unconsumed_tail:
                raise NotOurs(f"a ticket that unpacks to more than {MOST_BYTES:,} bytes")
        super().restore(raw_data)
        if self.func_name != TICKET_FUNCTION:
            raise NotOurs(f"a ticket that asks for {str(self.func_name)[:80]!r}")
        if self.timeout != -1:
            raise NotOurs(f"a ticket with a time limit (timeout={self.timeout}), which would end a long training")
        if extras := [name.strip("_") for name in _EXTRAS if getattr(self, name, None)]:
            raise NotOurs(f"a ticket with {', '.join(extras)}")


# -- stage worker ------------------------------------------------------------------------------------------------------

log = logging.getLogger("longhaul.worker")
RETRY_S = 5.0
"""Between two looks whether work can be done again."""
UPDATE = "update this box, and start its workers again"
CLOCK_S = 5.0
"""An answer of Redis takes 2 s at most: a larger difference is that of two clocks."""


class StageWorker(rq.Worker):
    """RQ's worker for one stage."""

    job_class = Ticket

    def __init__(
        self, stage: Stage, settings: WorkerSettings, heartbeat: WorkerHeartbeat, warm: WarmProcess | str | None = None
    ) -> None:
        """`warm`: what forks trainers; the socket of one is somebody else's."""
        self._stopping = threading.Event()
        self._stop_received = False
        super().__init__(
            [queue_name(stage)],
            name=heartbeat.name,
            connection=connect(settings.redis_url, patient_until=self._should_give_up),
            serializer=JSONSerializer,
            worker_ttl=20,
            job_monitoring_interval=5,
            maintenance_interval=30,
            log_job_description=False,
        )
        self._stage = stage
        self._settings = settings
        self._heartbeat = heartbeat
        self._client = connect(settings.redis_url)
        self._store = Store(self._client)
        self._fitness = Fitness(stage.value, settings, self._store)
        self._warm = warm
        self._horse_lost_gpu = multiprocessing.get_context("fork").Event()
        self._horse_outdated = multiprocessing.get_context("fork").Event()
        self.gpu_lost: str | None = None
        """Why this worker's GPU cannot be used any more: `work` has returned because of that."""

    def _should_give_up(self) -> bool:
        """Asked to stop, and the current work is done: what RQ still has for an unreachable Redis is only its own.

        The parent must not leave before its horse, which is tied to it and may be waiting for a checkpoint.
        """
        if self.is_horse:
            return self._stopping.is_set()
        return self._stop_requested and (not self.horse_pid or has_ended(self.horse_pid))

    def heartbeat(self, timeout: int | None = None, pipeline: redis.client.Pipeline | None = None) -> None:
        """RQ's heartbeat and ours.

        Raises StopRequested when an idle worker was told to stop. RQ raises it once, in its signal handler, wherever
        the main thread is: also in code that catches every exception. A worker that missed it would stay.
        """
        super().heartbeat(timeout, pipeline)
        if not self.horse_pid:  # a disk that a checkpoint is being written to may take its time
            self._fitness.check()
        if isinstance(self._warm, WarmProcess) and not self.horse_pid and not self.is_horse:
            self._warm.keep_up()
        if (
            gpu := self._heartbeat.gpu
        ) is not None and self._heartbeat.engine is None:  # it may be examined while this worker runs
            measured = read_measured(self._settings.runs, gpu.uuid.split(TOGETHER)[0], gpu.driver)
            known = gpu.model_copy(update={"measured": measured, "host_memory_bytes": host_memory().total})
            self._heartbeat = self._heartbeat.model_copy(update={"gpu": known})
        busy = self._heartbeat.model_copy(update={"busy": bool(self.horse_pid)})
        ahead_s = report(self._store, busy.with_health(self._fitness.why))
        self._heartbeat = self._heartbeat.model_copy(
            update={"clock_ahead_s": round(ahead_s, 1) if abs(ahead_s) > CLOCK_S else None}
        )
        if self._stop_received and self.get_state() == WorkerStatus.IDLE:
            raise StopRequested

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl+C. Forwarded to the horse, and by it to the trainer; Redis is not used: it may be away.

        A second one changes nothing: the trainer is already writing its checkpoint. SIGKILL is the last resort.
        """
        if self._stop_received:
            log.warning("already stopping: the trainer finishes its step and writes a checkpoint")
            return
        self._stop_received = True
        self._forward_stop()
        log.info("worker %s: stopping after the job in hand", self.name)
        if self.get_state() != WorkerStatus.BUSY:
            raise StopRequested
        self._stop_requested = True

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """Fork with SIGTERM held back, so that none falls between the fork and the forwarding."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().fork_work_horse(job, queue)
            if self._stop_requested:
                self._forward_stop()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _forward_stop(self) -> None:
        """To the horse, if there is one: it may have ended, and its parent not have noticed yet."""
        if self.horse_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)

    def setup_work_horse_signals(self) -> None:
        """The forked child begins here. Ctrl+C is the parent's; SIGTERM sets a flag that the supervisor looks at."""
        assert self.pid is not None
        tie_to_parent(self.pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        client = connect(self._settings.redis_url)  # a forked child shares no connection with its parent
        CONTEXT.set(
            WorkerContext(
                self._settings,
                Store(client),
                Tickets(client),
                self.name,
                self._stopping,
                self._heartbeat.gpu,
                self._horse_lost_gpu,
                self._warm.socket if isinstance(self._warm, WarmProcess) else self._warm,
                self._heartbeat.slot or 0,
                self._heartbeat.engine,
                self._horse_outdated,
            )
        )

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Only tickets of this stage; anything else in Redis was refused when it was read."""
        if isinstance(job, Ticket) and job.args == [self._stage.value]:
            if (why := self._check_gpu()) is not None:
                self._drop(job, queue)
                self._leave_without_gpu(why)
            if self._fitness.why is not None:  # seen while it waited for this ticket
                self._drop(job, queue)
                Tickets(self._client).add(self._stage)
                return
            super().execute_job(job, queue)
            if self._horse_outdated.is_set():
                self._fitness.outdate(
                    f"this is Longhaul {VERSION}, and a newer version writes events of the jobs: {UPDATE}"
                )
            if self._horse_lost_gpu.is_set():
                self._leave_without_gpu(self._check_gpu() or "the last attempt could not use the GPU")
            return
        log.error("ticket %r is refused: it is for %.80r, this worker for %s", job.id, job.args, self._stage.value)
        self._drop(job, queue)

    def _drop(self, job: Job, queue: Queue) -> None:
        self.connection.lrem(queue.intermediate_queue_key, 1, job.id)
        job.delete()

    def _check_gpu(self) -> str | None:
        """Why the GPU that this worker found at its start cannot be used any more; None: it can, or it has none."""
        if self._heartbeat.gpu is None or self._heartbeat.engine is not None:
            return None
        try:
            usable_gpu(self._heartbeat.gpu.uuid)
        except NoGpu as error:
            return str(error)
        return None

    def _leave_without_gpu(self, why: str) -> NoReturn:
        """Take no job, and end `work`: Docker recreates the container, with the GPU if it is back."""
        self.gpu_lost = f"{Reason.GPU_LOST.sentence}: {why}"
        log.error("no job is taken, this worker ends: %s. To find out why, %s", self.gpu_lost, Reason.GPU_LOST.hint)
        report(self._store, self._heartbeat.with_health(self.gpu_lost))
        Tickets(self._client).add(self._stage)  # for another worker; without one it stays
        raise StopRequested

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        """A ticket that cannot be read, or is not ours, is thrown away (none is missed); the worker continues.

        None is taken while no work can be done: tickets are for all workers of the stage.
        """
        self._fitness.check()
        while self._fitness.why is not None:
            self.set_state(WorkerStatus.IDLE)
            self.heartbeat()
            self._stopping.wait(RETRY_S)
        while True:
            try:
                return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
            except (StopRequested, redis.RedisError):
                raise
            except Exception as error:
                job = getattr(error, "job_id", None)  # RQ notes it there
                # Foreign text, on one line; a traceback for what is unexpected.
                why, known = ascii(str(error))[1:-1][:300], isinstance(error, NotOurs)
                log.error("ticket %.80r is refused: %s", job, why, exc_info=None if known else error)
                self.connection.delete(*(queue.intermediate_queue_key for queue in self.queues))
                if job is not None:
                    self.connection.delete(Ticket.key_for(job))

    def run_maintenance_tasks(self) -> None:
        """RQ's registries decide nothing here: when it fails on foreign content in them, they are emptied."""
        try:
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # RQ's
        except (StopRequested, redis.RedisError):
            raise
        except Exception:
            log.exception("RQ's registries hold what cannot be read: they are emptied")
            for queue in self.queues:
                self.connection.delete(queue.started_job_registry.key, queue.intermediate_queue_key)

    def check_for_suspension(self, burst: bool) -> None:
        """`rq suspend` is not used: no key in Redis stops a worker."""

    def subscribe(self) -> None:
        """RQ's remote commands (stop a job, kill a horse) are not used, so nothing listens for them."""

    def teardown(self) -> None:
        """Sign off; with Redis away for a moment only, not for ever."""
        self.connection.set_retry(Retry(NoBackoff(), 0))
        with contextlib.suppress(redis.RedisError):
            super().teardown()  # type: ignore[no-untyped-call]  # RQ's


def has_ended(child: int) -> bool:
    """Whether a child process has ended; it is not reaped."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
