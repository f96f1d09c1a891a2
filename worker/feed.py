"""One job for one sink: what is new since the durable cursor, in order, at least once (design §14).

The cursor is saved after each hand-over. A crash between the two repeats one event, with the same number.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from jobs.errors import Damaged, NotFound
from jobs.events import Event, JobSubmitted
from jobs.files import write_atomically
from jobs.logs import about
from jobs.metrics import MetricRow
from jobs.rundir import RunDir
from jobs.state import Status
from worker.sinks.base import DONE, Disabled, Job, Later, Outcome, Sink
from worker.tail import Tail

TERMINAL = frozenset(f"job.{status}" for status in Status if status.terminal)
LONGEST_BACKOFF_S = 60.0

log = logging.getLogger("longhaul.publish")


class Cursor(BaseModel):
    """`runs/<id>/sinks/<sink>.json`: how far one sink has come with one job."""

    event: int = 0
    """Number of the last event handed over."""
    offset: int = 0
    """Bytes of metrics.jsonl handed over."""
    step: int = -1
    """Highest step handed over."""
    closed: str | None = None
    """Set at the terminal event: the directory is skipped from then on."""
    state: dict[str, Any] = {}
    """The sink's own notes."""


def read_cursor(run: RunDir, sink: str) -> Cursor:
    """The saved cursor, or one at the beginning."""
    try:
        return Cursor.model_validate_json((run.sinks / f"{sink}.json").read_bytes())
    except FileNotFoundError:
        return Cursor()


class Feed:
    """Tails one run directory for one sink. Used from that sink's thread only."""

    def __init__(self, sink: Sink, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._sink = sink
        self._clock = clock
        self._cursor = read_cursor(run, sink.name)
        self._saved = self._cursor.model_dump_json()
        self._events = Tail(run.events_file, Event)
        self._rows = Tail(run.metrics_file, MetricRow, self._cursor.offset)
        self._waiting: deque[Event] = deque()
        self._batch: list[MetricRow] = []
        self._job: Job | None = None
        self._accepted = True
        self._events_at = 0.0
        self._rows_at = 0.0
        self._failures = 0
        self.closed = self._cursor.closed is not None

    @property
    def due(self) -> float:
        """When another turn is worth while without any news (the feed's clock); infinity: only on news."""
        waits = [at for at, work in ((self._events_at, self._waiting), (self._rows_at, self._batch)) if work]
        return min([*waits, self._events_at] if self._failures else waits, default=float("inf"))

    @property
    def behind_since(self) -> float | None:
        """Unix time of the oldest event that the sink has not taken; None: it has all. For any thread.

        By the files, not by what was read of them: whoever hangs in a sink reads nothing.
        """
        if self.closed or not self._accepted:
            return None
        try:
            if not self._waiting and self._events.offset == self.run.events_file.stat().st_size:
                return None
            left = self.run.events(after=self._cursor.event)
        except (OSError, NotFound, Damaged):  # gone, or not to be read: the next turn says so
            return None
        return left[0].at if left else None

    def turn(self) -> None:
        """Hand over what can be handed over now. Never raises: the other jobs of this sink wait behind."""
        if self._failures and self._clock() < self._events_at:
            return
        with about(self.run.id):
            try:
                self._turn()
                self._failures = 0
            except Exception:
                self._failures += 1
                wait = min(LONGEST_BACKOFF_S, 2.0 ** min(self._failures, 10) / 2)
                self._events_at = self._rows_at = self._clock() + wait
                log.exception("%s: job %s: unexpected, tried again in %.0f s", self._sink.name, self.run.id, wait)

    def _turn(self) -> None:
        self._waiting.extend(self._events.read())
        if not self._waiting and self._job is None:
            return
        job = self._job or self._meet()
        # Rows are read after events: when the terminal event is among these, every row is on disk.
        if self._accepted and self._sink.follows_metrics:
            self._batch.extend(self._rows.read())
            if self._batch:
                job.latest = self._batch[-1]
        while self._waiting and (self._waiting[0].number <= self._cursor.event or self._clock() >= self._events_at):
            if not self._take_event(self._waiting[0], job):
                break
            self._waiting.popleft()
        if self._batch and not self.closed and self._clock() >= self._rows_at:
            self._take_rows(job)

    def _meet(self) -> Job:
        first = self._waiting[0].fact
        assert isinstance(first, JobSubmitted), f"{self.run.id}: event 1 is {first.type}"
        self._accepted = self._sink.accepts(first)
        self._job = Job(
            id=self.run.id,
            folder=self.run.path,
            submitted=first,
            config=self.run.spec().model_dump(mode="json"),
            state=self._cursor.state,
            rows=self.run.metrics,
            write=lambda name, content: write_atomically(self.run.path / name, content),
            highest_step=self._cursor.step,
        )
        return self._job

    def _take_event(self, event: Event, job: Job) -> bool:
        """Whether the event is done with."""
        last = event.type in TERMINAL
        if event.number <= self._cursor.event:
            job.see(event)
            return True
        if not self._accepted:
            # Without a cursor until the end: a sink that is configured while the job is still open joins from event 1,
            # and one configured later does not dig out jobs that ended long ago.
            if last:
                self._close(event, "declined", job)
            return True
        job.ending = last
        if last and self._batch and not self._take_rows(job):
            self._events_at = self._rows_at
            return False
        job.see(event)
        outcome = self._sink.event(event, job)
        if isinstance(outcome, Later):
            self._events_at = self._clock() + self._postponed(event.type, outcome)
            self._save(job)
            return False
        self._note(outcome)
        if last:
            self._close(event, event.type, job)
        else:
            self._cursor.event = event.number
            self._save(job)
        return True

    def _take_rows(self, job: Job) -> bool:
        """Whether all rows at hand are done with."""
        outcome = self._sink.metrics(self._batch, job)
        if isinstance(outcome, Later):
            self._rows_at = self._clock() + self._postponed("rows", outcome)
        else:
            self._note(outcome)
            job.highest_step = max(job.highest_step, max(row.step for row in self._batch))
            self._cursor.offset = self._rows.offset
            self._batch.clear()
        self._save(job)
        return not self._batch

    def _close(self, event: Event, how: str, job: Job) -> None:
        self._cursor.event = event.number
        self._cursor.closed = how
        self._save(job)
        self.closed = True
        if self._accepted:
            self._sink.close(job)

    def _postponed(self, what: str, later: Later) -> float:
        if later.seconds >= 1:
            log.debug("%s: job %s: %s in %.1f s: %s", self._sink.name, self.run.id, what, later.seconds, later.why)
        return later.seconds

    def _note(self, outcome: Outcome) -> None:
        if isinstance(outcome, Disabled):
            log.debug("%s: job %s: not sent, disabled: %s", self._sink.name, self.run.id, outcome.why)
        else:
            assert outcome == DONE

    def _save(self, job: Job) -> None:
        self._cursor.step = job.highest_step
        now = self._cursor.model_dump_json()
        if now == self._saved:
            return
        try:
            self.run.sinks.mkdir(exist_ok=True)
            write_atomically(self.run.sinks / f"{self._sink.name}.json", now.encode() + b"\n")
        except OSError as error:
            # A full disk must not turn "at most one repeat" into one a minute: the cursor in memory counts until then.
            log.error("%s: job %s: the cursor could not be saved: %s", self._sink.name, self.run.id, error)
        else:
            self._saved = now

    def stop(self) -> None:
        """Publish stops; the cursor says where to go on. Never raises."""
        if self._job is None or not self._accepted or self.closed:
            return
        try:
            self._sink.close(self._job)
            self._save(self._job)
        except Exception:
            log.exception("%s: job %s: while stopping", self._sink.name, self.run.id)
