"""One job for one sink: what is new since the durable cursor, in order, at least once (architecture.md: Sinks).

The cursor is saved after each hand-over. A crash between the two repeats one event, with the same number.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from jobs.disk.event_log import read_event
from jobs.disk.files import START, FilePosition, regular, write_atomically
from jobs.disk.rundir import RunDir, parse_row
from jobs.errors import Damaged, NotFound
from jobs.events import Event, JobRepaired, JobSubmitted
from jobs.metrics import MetricRow
from jobs.process.logs import about
from jobs.state import Status
from jobs.sweeps.directory import SweepDir
from worker.sinks.base import DONE, Disabled, Later, Outcome, ReportsDamage, ReportsSweeps, Sink, SinkJob, SinkSweep

# -- tail --------------------------------------------------------------------------------------------------------------
# A tail of a JSON-lines file: whole new lines since the last look, also when it was replaced or cut meanwhile.

Row = TypeVar("Row", bound=BaseModel)


class Tail(Generic[Row]):
    """Remembers how far it has read; a look without news costs one stat."""

    def __init__(self, file: Path, parse: Callable[[bytes], Row | None], place: FilePosition = START) -> None:
        self._file = file
        self._parse = parse
        self._state = (0, 0, 0)
        self.place = place
        """Behind the last row that was read."""

    def read(self) -> list[Row]:
        """Rows of the whole lines written since, without those that `parse` takes for none; none without a file.

        All rows, where those that were read are not all there any more: the caller knows which of them are new.
        """
        try:
            found = self._file.stat()
        except FileNotFoundError:
            return []
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if state == self._state:
            return []
        with open(self._file, "rb", opener=regular) as file:
            place = self.place.found_in(file)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        rows = [row for line in whole.split(b"\n")[:-1] if (row := self._parse(line)) is not None]
        self.place = place.after(whole) if whole else place
        self._state = state
        return rows


# -- feed --------------------------------------------------------------------------------------------------------------

TERMINAL = frozenset(f"job.{status}" for status in Status if status.terminal)
LONGEST_BACKOFF_S = 60.0

log = logging.getLogger("longhaul.publish")


class Cursor(BaseModel):
    """`runs/<id>/sinks/<sink>.json`: how far one sink has come with one job; of a sweep, in its directory."""

    event: int = 0
    """Number of the last event handed over."""
    rows: FilePosition = START
    """How much of metrics.jsonl is handed over."""
    newest: tuple[int, int] = (0, -1)
    """Attempt and step of the last row handed over: those before it may be read again, but are not handed over."""
    step: int = -1
    """Highest step handed over."""
    damaged: str | None = None
    """The damage of the run directory that was reported to the sink."""
    closed: str | None = None
    """Set at the terminal event: the directory is skipped from then on, unless a repair opens the job again."""
    size: int | None = None
    """Bytes of events.jsonl then; None in cursors of earlier versions."""
    repaired_at: float = 0.0
    """Time of the newest `job.repaired` that was read: numbers before it may have been those of other events."""
    state: dict[str, JsonValue] = {}
    """The sink's own notes."""


def read_cursor(run: RunDir | SweepDir, sink: str) -> Cursor:
    """The saved cursor; one at the beginning where there is none, or a damaged one: twice is better than never."""
    file = run.sinks / f"{sink}.json"
    try:
        return Cursor.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Cursor()
    except ValidationError as error:
        log.error("%s is damaged (%s): %s gets everything again", file, error.errors()[0]["msg"], sink)
        return Cursor()


def write_cursor(run: RunDir | SweepDir, sink: str, cursor: Cursor) -> bool:
    """Whether the disk took it. A full one must not turn "at most one repeat" into one a minute: the cursor in memory
    counts until then."""
    try:
        run.sinks.mkdir(exist_ok=True)
        write_atomically(run.sinks / f"{sink}.json", cursor.model_dump_json().encode() + b"\n")
    except OSError as error:
        log.error("%s: %s: the cursor could not be saved: %s", sink, run.id, error)
        return False
    return True


def size_of(file: Path) -> int:
    """Its bytes; 0 where it is gone."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


class SinkFeed:
    """Tails one run directory for one sink. Used from that sink's thread only."""

    def __init__(self, sink: Sink, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._sink = sink
        self._clock = clock
        self._cursor = read_cursor(run, sink.name)
        self._saved = self._cursor.model_dump_json()
        self._events = Tail(run.events_file, read_event)
        self._rows = Tail(run.metrics_file, lambda line: parse_row(line, run.metrics_file), self._cursor.rows)
        self._newest = self._cursor.newest
        self._waiting: deque[Event] = deque()
        self._batch: list[MetricRow] = []
        self._job: SinkJob | None = None
        self._accepted = True
        self._events_at = 0.0
        self._rows_at = 0.0
        self._failures = 0
        self._looked: object = None
        self._damage: Damaged | None = None
        if self._cursor.closed is not None and self._cursor.size not in (None, size_of(run.events_file)):
            with contextlib.suppress(Damaged, NotFound, OSError):
                self._follow_repairs(run.events())
        self.closed = self._cursor.closed is not None

    @property
    def size(self) -> int | None:
        """Bytes of events.jsonl when the cursor was closed."""
        return self._cursor.size

    @property
    def due(self) -> float:
        """When another turn is worth while without any news (the feed's clock); infinity: only on news."""
        unreported = self._waiting or self._damage_unreported
        waits = [at for at, work in ((self._events_at, unreported), (self._rows_at, self._batch)) if work]
        return min([*waits, self._events_at] if self._failures else waits, default=float("inf"))

    @property
    def behind_since(self) -> float | None:
        """Unix time of the oldest event that the sink has not taken; None: it has all. For any thread.

        By the files, not by what was read of them: a thread that hangs in a sink reads nothing.
        """
        if self.closed or not self._accepted:
            return None
        try:
            if not self._waiting and self._events.place.offset == self.run.events_file.stat().st_size:
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
                self._check_damage()
                if self._damage is None:
                    self._turn()
                elif self._damage_unreported and self._clock() >= self._events_at:
                    self._report_damage(self._damage)
                self._failures = 0
            except Exception:
                self._failures += 1
                wait = min(LONGEST_BACKOFF_S, 2.0 ** min(self._failures, 10) / 2)
                self._events_at = self._rows_at = self._clock() + wait
                log.exception("%s: job %s: unexpected, tried again in %.0f s", self._sink.name, self.run.id, wait)

    def _check_damage(self) -> None:
        """See whether the run directory can be read, when it has changed. Nothing is handed over while it cannot."""
        if (state := self.run.state()) == self._looked:
            return
        try:
            self.run.verified()
            self._damage = self._cursor.damaged = None
        except Damaged as error:
            self._damage = error
        except NotFound:  # taken away meanwhile: publish lists again and lets go of it
            return
        self._looked = state

    @property
    def _damage_unreported(self) -> bool:
        reported = self._damage is None or self._cursor.damaged == str(self._damage)
        return not reported and isinstance(self._sink, ReportsDamage)

    def _report_damage(self, error: Damaged) -> None:
        assert isinstance(self._sink, ReportsDamage)
        submitted: JobSubmitted | None = None
        with contextlib.suppress(Damaged, OSError), open(self.run.events_file, "rb", opener=regular) as file:
            first = read_event(file.readline()).fact
            submitted = first if isinstance(first, JobSubmitted) else None
        outcome = self._sink.damaged(self.run.id, submitted, error)
        if isinstance(outcome, Later):
            self._events_at = self._clock() + self._postponed("damage", outcome)
        else:
            self._log_outcome(outcome)
            self._cursor.damaged = str(error)
            self._save()

    def _turn(self) -> None:
        new = self._events.read()
        if new and new[0].number == 1:  # all of them: the file is read for the first time, or is another one
            self._waiting.clear()
            self._job = None
            self._cursor.event = min(self._cursor.event, new[-1].number)
        self._follow_repairs(new)
        self._waiting.extend(new)
        if not self._waiting and self._job is None:
            return
        job = self._job or self._open_job()
        # Rows are read after events: when the terminal event is among these, every row is on disk.
        if self._accepted and self._sink.follows_metrics:
            for row in self._rows.read():
                if (row.attempt, row.step) > self._newest:
                    self._batch.append(row)
                    self._newest = (row.attempt, row.step)
            if self._batch:
                job.latest = self._batch[-1]
        while self._waiting and (self._waiting[0].number <= self._cursor.event or self._clock() >= self._events_at):
            if not self._take_event(self._waiting[0], job):
                break
            self._waiting.popleft()
        if self._batch and not self.closed and self._clock() >= self._rows_at:
            self._take_rows(job)

    def _follow_repairs(self, events: list[Event]) -> None:
        """Go back to the first repair that was not read before: the events from there on are new."""
        for event in events:
            if isinstance(event.fact, JobRepaired) and event.at > self._cursor.repaired_at:
                self._cursor.event = min(self._cursor.event, event.number - 1)
                self._cursor.repaired_at = event.at
                self._cursor.closed = None

    def _open_job(self) -> SinkJob:
        first = self._waiting[0].fact
        assert isinstance(first, JobSubmitted), f"{self.run.id}: event 1 is {first.type}"
        spec = self.run.spec()
        self._accepted = spec.integrations.wants(self._sink.name) and self._sink.accepts(first)
        self._job = SinkJob(
            id=self.run.id,
            folder=self.run.path,
            submitted=first,
            spec=spec,
            state=self._cursor.state,
            rows=self.run.metrics,
            size_of_rows=lambda: size_of(self.run.metrics_file),
            plan=self.run.plan,
            write=lambda name, content: write_atomically(self.run.path / name, content),
            highest_step=self._cursor.step,
        )
        return self._job

    def _take_event(self, event: Event, job: SinkJob) -> bool:
        """Whether the event is done with."""
        last = event.type in TERMINAL
        if event.number <= self._cursor.event:
            self._update_job(event, job)
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
        self._update_job(event, job)
        outcome = self._sink.event(event, job)
        if isinstance(outcome, Later):
            self._events_at = self._clock() + self._postponed(event.type, outcome)
            self._save()
            return False
        self._log_outcome(outcome)
        if last:
            self._close(event, event.type, job)
        else:
            self._cursor.event = event.number
            self._save()
        return True

    def _update_job(self, event: Event, job: SinkJob) -> None:
        try:
            job.update(event)
        except Exception:  # a mistake of ours: later events are still delivered
            log.exception(
                "%s: job %s: event %d does not say anything about the job", self._sink.name, job.id, event.number
            )

    def _take_rows(self, job: SinkJob) -> bool:
        """Whether all rows at hand are done with."""
        outcome = self._sink.metrics(self._batch, job)
        if isinstance(outcome, Later):
            self._rows_at = self._clock() + self._postponed("rows", outcome)
        else:
            self._log_outcome(outcome)
            job.highest_step = max(job.highest_step, max(row.step for row in self._batch))
            self._cursor.rows, self._cursor.newest = self._rows.place, self._newest
            self._batch.clear()
        self._save()
        return not self._batch

    def _close(self, event: Event, how: str, job: SinkJob) -> None:
        self._cursor.event = event.number
        self._cursor.closed = how
        self._cursor.size = self._events.place.offset
        self._save()
        self.closed = True
        if self._accepted:
            self._sink.close(job)

    def _postponed(self, what: str, later: Later) -> float:
        if later.seconds >= 1:
            log.debug("%s: job %s: %s in %.1f s: %s", self._sink.name, self.run.id, what, later.seconds, later.why)
        return later.seconds

    def _log_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Disabled):
            log.debug("%s: job %s: not sent, disabled: %s", self._sink.name, self.run.id, outcome.why)
        else:
            assert outcome == DONE

    def _save(self) -> None:
        if self._job is not None:
            self._cursor.step = self._job.highest_step
        now = self._cursor.model_dump_json()
        if now == self._saved:
            return
        if write_cursor(self.run, self._sink.name, self._cursor):
            self._saved = now

    def stop(self) -> None:
        """Publish stops; the cursor says where to continue. Never raises."""
        if self._job is None or not self._accepted or self.closed:
            return
        try:
            self._sink.close(self._job)
            self._save()
        except Exception:
            log.exception("%s: job %s: while stopping", self._sink.name, self.run.id)


# -- sweep feed --------------------------------------------------------------------------------------------------------
# One sweep for one sink: how it stands, whenever that has changed, at least once (architecture.md: Sinks).


class SweepFeed:
    """Follows one sweep for one sink. Used from that sink's thread only."""

    def __init__(self, sink: ReportsSweeps, sweep: SweepDir, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = sweep
        self._sink = sink
        self._clock = clock
        self._cursor = read_cursor(sweep, sink.name)
        self._again_at: float | None = None
        self.behind_since: float | None = None
        """Unix time since when the sink has not taken how it stands; None: it has. For any thread."""

    @property
    def closed(self) -> bool:
        """Whether the sink knows of its end."""
        return self._cursor.closed is not None

    @property
    def size(self) -> int | None:
        """Bytes of events.jsonl that the sink knows."""
        return self._cursor.size

    @property
    def due(self) -> float:
        """When another turn is worth while without any news (the feed's clock); infinity: only on news."""
        return float("inf") if self._again_at is None else self._again_at

    def turn(self) -> None:
        """Tell how it stands, if that is new. Never raises: the jobs of this sink wait behind."""
        size = size_of(self.run.events_file)
        if size == self._cursor.size or (self._again_at is not None and self._clock() < self._again_at):
            return
        with about(self.run.id):
            try:
                outcome = self._tell(size)
            except (Damaged, NotFound, OSError) as error:  # the turns of sweeps say so
                outcome = Later(LONGEST_BACKOFF_S, str(error))
            except Exception:
                outcome = Later(LONGEST_BACKOFF_S, "unexpected")
                log.exception("%s: sweep %s: unexpected, tried again in a minute", self._sink.name, self.run.id)
        if isinstance(outcome, Later):
            self._again_at = self._clock() + outcome.seconds
            self.behind_since = self.behind_since or time.time()
        else:
            self._again_at = self.behind_since = None

    def _tell(self, size: int) -> Outcome:
        spec, record = self.run.spec(), self.run.record()
        told = spec.reports_to(self._sink.name) and self._sink.accepts_sweep(spec)
        outcome = self._sink.sweep(SinkSweep(spec, record, self._cursor.state)) if told else DONE
        if not isinstance(outcome, Later):
            self._cursor.event, self._cursor.size = record.number, size
            if record.ended is not None:
                self._cursor.closed = "sweep.ended" if told else "declined"
        if told or self.closed:  # a sink that is configured while it runs joins in
            write_cursor(self.run, self._sink.name, self._cursor)
        return outcome

    def stop(self) -> None:
        """Nothing is held."""
