"""A trainer on an engine, as its supervisor sees it: like a process, though it runs elsewhere.

A thread hands the task over and then, until the trainer has ended: gives a sign of life, reads what the node says, and
asks the engine now and then how the task is; it gives signs of life while the engine takes its time to answer. What it
knows of a task is on disk before anything depends on it: when this process is killed, the next attempt ends the task
before it hands over its own.
"""

from __future__ import annotations

import errno
import logging
import math
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Literal, TypeVar

from jobs.disk.rundir import RunDir
from jobs.events import AnyFact, TaskStarted, TaskSubmitted, TaskWaiting
from jobs.process.secrets import redact
from jobs.reasons import Reason
from jobs.text.units import printable
from worker.engines.engine import Engine, EngineError, EngineUnavailable, TaskState, TaskStatus
from worker.engines.handover import BEAT_S, Handover, NodeLine, TaskRecord, earlier
from worker.engines.left_task import LeftTask
from worker.engines.settings import EngineSettings
from worker.warm import EndCause

log = logging.getLogger("longhaul.engines")
Answer = TypeVar("Answer")
LATE_S = 5.0
"""After the engine has said that a task is over: until then the last files of its node may still come."""
LEAVES_S = 20.0
"""After the node has said how the trainer ended: until then the engine is waited for to say that its task is over."""
TELL_EVERY_S = 600.0
"""Between two events that say why a task waits: an engine's reasons change often."""
_REASONS = {
    TaskStatus.ENDED: Reason.WORKER_LOST,
    TaskStatus.PREEMPTED: Reason.WORKER_LOST,
    TaskStatus.GONE: Reason.WORKER_LOST,
    TaskStatus.OUT_OF_MEMORY: Reason.HOST_OUT_OF_MEMORY,
}
"""Why an attempt has ended whose trainer could not say it. Any other end of a task is a crash."""


class EngineProcess:
    """The trainer of one attempt, on an engine."""

    pid = None

    def __init__(
        self,
        engines: Mapping[str, EngineSettings],
        engine: str,
        run: RunDir,
        attempt: int,
        environment: Mapping[str, str],
        gpus: int,
    ) -> None:
        """On this one of the engines. An earlier attempt may have been on another."""
        settings = engines[engine]
        self.cause: EndCause | None = None
        self._queued = True
        self._engines, self._settings, self._run, self._attempt = engines, settings, run, attempt
        self._engine: Engine = settings.connect()
        token = secrets.token_hex(8)
        self._task = settings.task(run, attempt, token, environment, gpus)
        record = TaskRecord(engine=settings.name, name=self._task.name, token=token)
        self._node = NodeLine(run, attempt, self._engine.storage, record, self._order)
        self._asking = ThreadPoolExecutor(1, f"engine-{run.id}")
        self._facts: queue.SimpleQueue[AnyFact] = queue.SimpleQueue()
        self._told, self._tell_at = "", 0.0
        self._asked = self._killed = self._over = False
        self._awake = threading.Event()
        self._ended = threading.Event()
        self._code = -signal.SIGKILL
        self._thread = threading.Thread(target=self._live, name=f"task-{run.id}", daemon=True)
        self._thread.start()

    # -- as any process ---------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether its silence says nothing: it is queued, its node prepares, or nothing can be heard of it."""
        return self._queued or not self._has_started() or self._node.deaf

    def poll(self) -> int | None:
        """Its exit code; None: it runs, or waits."""
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, of a signal negative. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"task {self._task.name}", timeout or 0)
        return self._code

    def send_signal(self, sig: int) -> None:
        """SIGTERM, which asks the trainer to stop; what is not running yet is taken back."""
        assert sig == signal.SIGTERM, "an engine passes on no other signal"
        self._asked = True
        self._awake.set()

    def kill(self) -> None:
        """End the task as soon as engine and node hear of it. The next attempt waits until it has ended."""
        self._killed = True
        self._awake.set()

    def facts(self) -> list[AnyFact]:
        """What became of the task since the last call."""
        new: list[AnyFact] = []
        with suppress(queue.Empty):
            while True:
                new.append(self._facts.get_nowait())
        return new

    def _order(self) -> Literal["train", "stop", "kill"]:
        return "kill" if self._killed else "stop" if self._asked else "train"

    # -- the thread -------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._code = self._hand_over_and_follow()
        except Exception as error:
            log.exception("job %s: its task on the engine %s is given up", self._run.id, self._settings.name)
            self.cause = EndCause(Reason.CRASH, f": {type(error).__name__}: {error}")
            self._code = 1
            self._killed = True
            self._node.send_orders()
            if self._node.record.id is not None:
                self._cancel(self._node.record.id)  # the next attempt sees to the rest
        finally:
            self._asking.shutdown(wait=False)
            self._ended.set()

    def _hand_over_and_follow(self) -> int:
        for before in earlier(self._run.path, self._attempt):
            if not self._earlier_ended(before):
                return -signal.SIGTERM
        try:
            self._node.open()
            task = self._answered(lambda: self._engine.submit(self._task))
        except (
            EngineError,
            OSError,
        ) as error:  # it may have taken it all the same: it may not train, and is ended later
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self.cause = EndCause(Reason.DISK_FULL if full else Reason.NOT_SUBMITTED, f": {error}")
            self._killed = True
            self._node.send_orders()
            return 1
        self._node.record = self._node.record.model_copy(update={"id": task})
        self._facts.put(TaskSubmitted(engine=self._settings.name, task=task))
        code = self._follow(task)
        if self._over and not self._killed:
            self._node.record = self._node.record.model_copy(update={"over": True})
            self._node.keep()
        return code

    def _follow(self, task: str) -> int:
        """Until nothing of the task runs any more, or it is killed."""
        look_at, over_at = 0.0, math.inf
        state = TaskState(TaskStatus.QUEUED)
        taken_back = False
        while True:
            self._node.keep()
            self._node.beat()
            if self._node.report is None and self._node.read_report() is not None:
                self._queued = False
                self._tell_start(task)
            report = self._node.read_report()
            if report is not None and report.code is not None and report.code != -signal.SIGKILL:
                self._over = self._leaves(task)
                return self._ended_by_itself(report.code)
            if self._killed:
                self._cancel(task)
                return -signal.SIGKILL
            if self._node.lost:
                self.cause = EndCause(Reason.WORKER_LOST, f": {self._node.lost}")
                self._cancel(task)
                return 1
            if self._asked and self._queued and not taken_back:
                taken_back, look_at = self._cancel(task), 0.0
            if (now := time.monotonic()) >= min(look_at, over_at):
                state = self._look(task, state)
                look_at = now + self._settings.look_every_s
                if state.status.over and (taken_back or (now >= over_at and self._node.all_here)):
                    self._over = True
                    return self._ended_otherwise(task, state)
                over_at = min(over_at, now + LATE_S) if state.status.over else math.inf
            self._awake.wait(BEAT_S / 2)
            self._awake.clear()

    def _leaves(self, task: str) -> bool:
        """Whether the engine says soon that nothing of the task runs any more, as its node does. What still does, an
        engine may have started again, or suspended: it is cancelled, and looked after as any task that is left.
        """
        until = time.monotonic() + LEAVES_S
        while not self._killed:
            with suppress(EngineUnavailable):
                if self._answered(lambda: self._engine.state(task)).status.over:
                    return True
            if time.monotonic() >= until:
                break
            self._awake.wait(BEAT_S / 2)
            self._awake.clear()
        self._cancel(task)
        return False

    def _look(self, task: str, before: TaskState) -> TaskState:
        """How the task is; as it was, where the engine does not say."""
        try:
            state = self._answered(lambda: self._engine.state(task))
        except EngineUnavailable as error:
            log.warning("job %s: how task %s is, is not known: %s", self._run.id, task, error)
            return before
        if state.status is TaskStatus.QUEUED:
            self._queued = True
            self._tell_wait(task, state.message)
        elif state.status is TaskStatus.RUNNING:
            self._queued = False
            if self._told and self._node.report is not None:  # it was suspended
                self._tell_start(task)
        return state

    def _tell_start(self, task: str) -> None:
        """It runs, at first or again: what was said of its waiting is true no more."""
        assert self._node.report is not None
        self._told, self._tell_at = "", 0.0
        self._facts.put(TaskStarted(task=task, node=self._node.report.host))

    def _tell_wait(self, task: str | None, message: str) -> None:
        """Why the task waits: at once, and what changes later once in a while."""
        if message != self._told and time.monotonic() >= self._tell_at:
            self._told, self._tell_at = message, time.monotonic() + TELL_EVERY_S
            self._facts.put(TaskWaiting(task=task, message=message))

    def _ended_by_itself(self, code: int) -> int:
        if code == -signal.SIGTERM:  # of the engine, or ours, before the trainer could listen
            self.cause = EndCause(Reason.INTERRUPTED, "")
        return code

    def _ended_otherwise(self, task: str, state: TaskState) -> int:
        """The trainer has left no exit code, or was killed: what the engine says explains it."""
        if self._asked and self._queued:
            return -signal.SIGTERM
        if (report := self._node.read_report()) is not None and report.code not in (None, -signal.SIGKILL):
            return self._ended_by_itself(report.code)
        reason = _REASONS.get(state.status, Reason.CRASH)
        if state.status is TaskStatus.PREEMPTED and not self._has_started():
            reason = Reason.NOT_STARTED
        said = self._last_words(task) if reason is Reason.CRASH else ""
        self.cause = EndCause(reason, f": {self._settings.name}: {state.message}{said}")
        return 1

    def _has_started(self) -> bool:
        """A report may be lost on a full disk; the trainer's own file tells then that it trains."""
        return self._node.report is not None or self._run.attempt_file(self._attempt).exists()

    def _last_words(self, task: str) -> str:
        try:
            lines = self._engine.logs(task).split("\n")
        except EngineUnavailable:
            return ""
        return (
            f": {printable(redact(last))[:300]}"
            if (last := next((each for each in reversed(lines) if each.strip()), ""))
            else ""
        )

    # -- tasks of earlier attempts ----------------------------------------------------------------------------

    def _earlier_ended(self, before: Handover) -> bool:
        """Whether nothing of an earlier attempt's task runs any more. False: this one is to stop before that is so."""
        left = LeftTask(before, self._engines)
        while not left.ended():
            self._node.exchange()
            if self._asked or self._killed:
                return False
            self._tell_wait(left.task, left.why)
            self._awake.wait(BEAT_S / 2)
            self._awake.clear()
        return True

    # -- the engine -----------------------------------------------------------------------------

    def _answered(self, ask: Callable[[], Answer]) -> Answer:
        """What the engine says; signs of life while it takes its time."""
        asked = self._asking.submit(ask)
        while not wait([asked], BEAT_S / 2).done:
            self._node.beat()
        return asked.result()

    def _cancel(self, task: str) -> bool:
        try:
            self._answered(lambda: self._engine.cancel(task))
        except EngineUnavailable as error:
            log.warning("job %s: task %s is not cancelled yet: %s", self._run.id, task, error)
            return False
        return True
