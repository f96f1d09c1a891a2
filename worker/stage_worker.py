"""RQ's worker, with what differs here: the horse dies with its parent, SIGTERM is forwarded to it first, tickets are
ours and nothing else, and heartbeats go to our own key as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import redis
import rq
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.exceptions import StopRequested
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus

from jobs.connection import connect
from jobs.lifeline import tie_to_parent
from jobs.queue import Tickets, queue_name
from jobs.state import Stage
from jobs.store import Store
from worker.heartbeat import report
from worker.settings import WorkerSettings
from worker.supervise import HORSE, Horse
from worker.ticket import NotOurs, Ticket

log = logging.getLogger("longhaul.worker")


class StageWorker(rq.Worker):
    """RQ's worker for one stage."""

    job_class = Ticket

    def __init__(self, stage: Stage, settings: WorkerSettings, facts: dict[str, Any]) -> None:
        self._stopping = threading.Event()
        self._told_to_stop = False
        super().__init__(
            [queue_name(stage)],
            name=facts["name"],
            connection=connect(settings.redis_url, patient_until=self._waits_no_more),
            serializer=JSONSerializer,
            worker_ttl=20,
            job_monitoring_interval=5,
            maintenance_interval=30,
            log_job_description=False,
        )
        self._stage = stage
        self._settings = settings
        self._facts = facts
        self._client = connect(settings.redis_url)
        self._store = Store(self._client)

    def _waits_no_more(self) -> bool:
        """Asked to stop, and the work in hand is done: what RQ has still to tell a Redis that is away is only its own.

        The parent must not leave before its horse, which is tied to it and may be waiting for a checkpoint.
        """
        if self.is_horse:
            return self._stopping.is_set()
        return self._stop_requested and (not self.horse_pid or has_ended(self.horse_pid))

    def heartbeat(self, timeout: int | None = None, pipeline: redis.client.Pipeline | None = None) -> None:
        """RQ's heartbeat and ours.

        Raises StopRequested when an idle worker was told to stop. RQ raises it once, in its signal handler, wherever
        the main thread is: also where somebody takes every exception for his own. A worker that missed it would stay.
        """
        super().heartbeat(timeout, pipeline)
        report(self._store, self._facts | {"busy": bool(self.horse_pid)})
        if self._told_to_stop and self.get_state() == WorkerStatus.IDLE:
            raise StopRequested

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """Fork with SIGTERM held back, so that none falls between the fork and the forwarding."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().fork_work_horse(job, queue)
            if self._stop_requested:
                os.kill(self.horse_pid, signal.SIGTERM)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        """The forked child."""
        assert self.pid is not None
        tie_to_parent(self.pid)
        super().main_work_horse(job, queue)

    def setup_work_horse_signals(self) -> None:
        """Ctrl+C is the parent's; SIGTERM sets a flag that the supervisor looks at."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        client = connect(self._settings.redis_url)  # a forked child shares no connection with its parent
        HORSE.set(Horse(self._settings, Store(client), Tickets(client), self.name, self._stopping))

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Tickets of this stage; all else that somebody wrote to Redis is none, and was refused when it was read."""
        if isinstance(job, Ticket) and job.args == [self._stage.value]:
            super().execute_job(job, queue)
            return
        log.error("ticket %r is refused: it is for %.80r, this worker for %s", job.id, job.args, self._stage.value)
        self.connection.lrem(queue.intermediate_queue_key, 1, job.id)
        job.delete()

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        """A ticket that cannot be read, or is not ours, is thrown away (none is missed); the worker goes on."""
        while True:
            try:
                return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
            except (StopRequested, redis.RedisError):
                raise
            except Exception as error:
                job = getattr(error, "job_id", None)  # RQ notes it there
                # Somebody else's words, on one line; a traceback for what nobody foresaw.
                why, known = ascii(str(error))[1:-1][:300], isinstance(error, NotOurs)
                log.error("ticket %.80r is refused: %s", job, why, exc_info=None if known else error)
                self.connection.delete(*(queue.intermediate_queue_key for queue in self.queues))
                if job is not None:
                    self.connection.delete(Ticket.key_for(job))

    def run_maintenance_tasks(self) -> None:
        """RQ's registries decide nothing here: when it stumbles over what somebody put in there, they are emptied."""
        try:
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # RQ's
        except (StopRequested, redis.RedisError):
            raise
        except Exception:
            log.exception("RQ's registries hold what cannot be read: they are emptied")
            for queue in self.queues:
                self.connection.delete(queue.started_job_registry.key, queue.intermediate_queue_key)

    def check_for_suspension(self, burst: bool) -> None:
        """`rq suspend` is not used: nobody stops a worker by a key in Redis."""

    def subscribe(self) -> None:
        """RQ's remote commands (stop a job, kill a horse) are not used, so nobody listens for them."""

    def unsubscribe(self) -> None:
        """See `subscribe`."""

    def set_shutdown_requested_date(self) -> None:
        """Left out: with Redis away it would hold up the stop for ever."""

    def teardown(self) -> None:
        """Sign off; with Redis away for a moment only, not for ever."""
        self.connection.set_retry(Retry(NoBackoff(), 0))
        with contextlib.suppress(redis.RedisError):
            super().teardown()  # type: ignore[no-untyped-call]  # RQ's

    def handle_warm_shutdown_request(self) -> None:
        """First of all tell the horse, which tells the trainer; only then talk to Redis, which may be away."""
        self._told_to_stop = True
        if self.horse_pid:
            os.kill(self.horse_pid, signal.SIGTERM)
        log.info("worker %s: stopping after the job in hand", self.name)

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """A second SIGTERM changes nothing: the trainer is writing its checkpoint. SIGKILL is the last resort."""
        log.warning("already stopping: the trainer finishes its step and writes a checkpoint")


def has_ended(child: int) -> bool:
    """Whether a child process has ended. One that was not waited for yet is left to be."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
