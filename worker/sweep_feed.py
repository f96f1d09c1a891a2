"""One sweep for one sink: how it stands, whenever that has changed, at least once (architecture.md: Sinks)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jobs.errors import Damaged, NotFound
from jobs.process.logs import about
from jobs.sweeps.directory import SweepDir
from worker.feed import LONGEST_BACKOFF_S, read_cursor, size_of, write_cursor
from worker.sinks.base import DONE, Later, Outcome, ReportsSweeps, SinkSweep

log = logging.getLogger("longhaul.publish")


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
        told = self._sink.accepts_sweep(spec)
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
