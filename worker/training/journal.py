"""How a trainer speaks to its supervisor: one line a write in its attempt file (architecture.md: Trainer).

Every phase is announced by a heartbeat as it begins, and writes one at least every `BEAT_S` seconds *of progress*:
call `progress` whenever something was achieved; it decides whether a line is due.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from jobs.attempt import Finished, Heartbeat, Noted, Phase, Result
from jobs.disk.files import LineWriter
from jobs.errors import StageError
from jobs.events import AnyFact, Fault
from jobs.frozen import Empty
from jobs.reasons import Reason
from worker.training.fence import unfenced

BEAT_S = 5.0


class Journal:
    """Writes the attempt file."""

    def __init__(
        self, file: Path, clock: Callable[[], float] = time.monotonic, *, fence: Callable[[], None] = unfenced
    ) -> None:
        file.parent.mkdir(exist_ok=True)  # no parents: a run directory that was deleted is not made anew
        self.fence = fence
        """Call it before whatever is written to last: it does not return where the attempt is over."""
        self._lines = LineWriter(file, fence)
        self._clock = clock
        self._phase: Phase = "wait"
        self._step = 0
        self._last_beat = 0.0
        self._last_progress: float | None = None
        self._intervals: deque[float] = deque(maxlen=32)

    def phase(self, phase: Phase, *, step: int | None = None) -> None:
        """A phase begins."""
        self._phase = phase
        self._intervals.clear()
        self._last_progress = None
        self.progress(step=step, due=True)

    def progress(self, fraction: float | None = None, *, step: int | None = None, due: bool = False) -> None:
        """Something was achieved (a step, a file, a batch of rows). Writes a heartbeat if one is due."""
        now = self._clock()
        if step is not None:
            self._step = step
        if self._last_progress is not None:
            self._intervals.append(now - self._last_progress)
        self._last_progress = now
        if due or now - self._last_beat >= BEAT_S:
            self._last_beat = now
            interval = statistics.median(self._intervals) if self._intervals else None
            self._write(
                Heartbeat(at=time.time(), phase=self._phase, step=self._step, progress=fraction, interval_s=interval)
            )

    def note(self, fact: AnyFact) -> None:
        """A fact for the job's event list."""
        self._write(Noted(at=time.time(), fact=fact))

    def finish(self, reason: Reason, *, error: Fault | None = None, result: Result | None = None) -> None:
        """The last line."""
        self._write(Finished(at=time.time(), reason=reason, step=self._step, error=error, result=result or Empty()))

    def fail(self, error: StageError) -> None:
        """The last line of a process that ends by a typed error."""
        self.finish(error.reason, error=Fault.raised(error))

    def _write(self, line: Heartbeat | Noted | Finished) -> None:
        # A full disk stops nothing: facts wait for room, heartbeats are left out; only the last line must be written.
        self._lines.write(line, keep=not isinstance(line, Heartbeat))
        if isinstance(line, Finished):
            self._lines.close()
