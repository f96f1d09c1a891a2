"""A task that an earlier attempt has left on an engine. It is ended before another begins, or for good."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

from jobs.disk.rundir import RunDir, list_runs
from jobs.errors import Damaged, NotFound
from jobs.state import Status
from worker.engines.engine import Engine, EngineUnavailable, TaskState, TaskStatus
from worker.engines.handover import Handover, Orders, TaskRecord, earlier
from worker.engines.settings import EngineSettings

log = logging.getLogger("longhaul.engines")
CANCEL_EVERY_S = 60.0
"""Between two cancels of the same task: an engine may take its time to end it."""
EVERY_S = 600.0
"""Between two looks for tasks of jobs that do not run."""


class LeftTask:
    """One of them."""

    def __init__(self, before: Handover, engines: Mapping[str, EngineSettings]) -> None:
        self._before, self._settings = before, engines
        self._engine: Engine | None = None
        self._look_at, self._cancel_at = 0.0, 0.0
        self._deaf_at = math.inf
        """When it has ended by itself, if nobody knows which task it is."""
        self.task: str | None = None
        """The engine's id of it."""
        self.why = f"until it is known that the task of attempt {before.attempt} has ended"
        """What is waited for."""

    def ended(self) -> bool:
        """Whether nothing of it runs any more. While something may, each call orders its end, and asks its engine now
        and then.
        """
        try:
            record = self._before.task()
        except OSError as error:
            self.why = f"until the file of the task of attempt {self._before.attempt} can be read: {error}"
            return False
        except ValueError as error:
            return self._damaged_ended(error)
        if record is None or record.over:
            return True
        self.task = record.id
        self._order_kill(record.token)
        settings = self._settings.get(record.engine)
        if settings is None:
            self.why = (
                f"until LONGHAUL_ENGINES names the engine {record.engine} again, on which a task of attempt "
                f"{self._before.attempt} may still run"
            )
            return False
        if (now := monotonic()) < self._look_at:
            return False
        self._look_at = now + settings.look_every_s
        engine = self._engine = self._engine or settings.connect()
        try:
            state = self._look(engine, record)
        except EngineUnavailable as error:
            self.why = f"until it is known that the task of attempt {self._before.attempt} has ended: {error}"
            return False
        if state.status.over:
            self._keep(record)
            return True
        self.why = f"until the task of attempt {self._before.attempt} has ended ({state.message})"
        return False

    def _look(self, engine: Engine, record: TaskRecord) -> TaskState:
        """How it is; one that may run is cancelled."""
        task = record.id or engine.find(record.name)
        if task is None:
            return TaskState(TaskStatus.GONE)
        state = engine.state(task)
        if not state.status.over and monotonic() >= self._cancel_at:
            self._cancel_at = monotonic() + CANCEL_EVERY_S
            engine.cancel(task)
        return state

    def _damaged_ended(self, error: ValueError) -> bool:
        """Of a task that nobody knows, the node ends what trains when it hears no orders of its own for long."""
        self._order_kill("unknown")
        now = monotonic()
        longest_s = max((each.alone_s for each in self._settings.values()), default=0.0)
        self._deaf_at = min(self._deaf_at, now + 2 * longest_s)
        if now < self._deaf_at and not self._has_reported_end():
            self.why = f"until a task that nobody knows any more has ended by itself: {error}"
            return False
        log.error("job %s: attempt %d: %s", self._before.run.name, self._before.attempt, error)
        self._keep(TaskRecord(engine="unknown", name="unknown", token="unknown"))
        return True

    def _has_reported_end(self) -> bool:
        try:
            report = self._before.report()
        except (OSError, ValueError):
            return False
        return report is not None and report.code is not None

    def _order_kill(self, token: str) -> None:
        try:
            self._before.write_orders(Orders(token=token, order="kill", beat=0))
        except OSError as error:
            log.warning("job %s: a node hears nothing: %s", self._before.run.name, error)

    def _keep(self, record: TaskRecord) -> None:
        try:
            self._before.write_task(record.model_copy(update={"over": True}))
        except OSError as error:  # it is found out again
            log.warning("job %s: that a task is over is not kept: %s", self._before.run.name, error)


class LeftTasks:
    """Those of jobs that do not run: nobody else ends them before the job's next attempt, if there is one."""

    def __init__(self, runs: Path, engines: Mapping[str, EngineSettings]) -> None:
        self._runs, self._engines = runs, engines

    def run(self, stop: threading.Event) -> None:
        """Now, and again and again until asked to stop."""
        while True:
            try:
                self.end()
            except OSError as error:
                log.warning("tasks of jobs that do not run are not looked for: %s", error)
            if stop.wait(EVERY_S):
                return

    def end(self) -> None:
        """One look at each, which cancels what may still run."""
        for run in list_runs(self._runs):
            if not any(run.path.glob("attempts/*.task.json")):
                continue
            try:
                record = run.record()
            except (Damaged, NotFound, OSError) as error:
                log.warning("job %s: whether it has left a task is not known: %s", run.id, error)
                continue
            # One that is running ends those of its earlier attempts itself. Another may begin now: its task is later.
            if record.status is not Status.RUNNING:
                self._end(run, record.attempt)

    def _end(self, run: RunDir, last: int) -> None:
        for before in earlier(run.path, last + 1):
            left = LeftTask(before, self._engines)
            if not left.ended():
                log.warning("job %s does not run; it is waited %s", run.id, left.why)
