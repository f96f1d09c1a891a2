"""How a trainer speaks to its supervisor: one line a write in its attempt file (architecture.md: Trainer). SIGTERM asks
it to stop.

Every phase is announced by a heartbeat as it begins, and writes one at least every `BEAT_S` seconds *of progress*:
call `progress` whenever something was achieved; it decides whether a line is due.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from jobs.attempt import Finished, Heartbeat, Noted, Phase, Result
from jobs.disk.files import LineWriter
from jobs.disk.rundir import RunDir
from jobs.errors import Damaged, NewerFormat, NotFound, StageError
from jobs.events import AnyFact
from jobs.frozen import Empty
from jobs.reasons import Reason
from jobs.trainer_facts import Fault

# -- fence -------------------------------------------------------------------------------------------------------------
# Fencing: a trainer whose attempt is over writes nothing more (ADR 18).
#
# A box that was cut off from the runs directory, or stood still, loses its lock there without being told, and another
# attempt begins. So a trainer looks into the events before everything that it writes to last: they name the open
# attempt.

log = logging.getLogger("longhaul.trainer")
EXIT_CODE = 85
"""Of a trainer that was fenced off. Nothing follows from it: the attempt is over already."""


def end_if_over(run: RunDir, attempt: int) -> None:
    """End this process at once, whatever its threads are at, where `attempt` has ended or a later one has begun.

    Costs opening the events and one `fstat`; no line is read twice. They are opened for writing: reading alone a client
    of NFS may answer by itself, from a delegation.
    """
    try:
        record = run.record(from_server=True)
    except NewerFormat as error:  # of a box that this one does not understand: it may have taken the job over
        why = f"its events cannot be read any more: {error}"
    except Damaged:  # no attempt can begin until it is repaired; then its events name the open one
        return
    except NotFound:
        why = "its run directory was deleted"
    else:
        ended = record.attempt == attempt and not record.attempt_open and record.last_reason is not None
        if record.attempt <= attempt and not ended:
            return
        why = f"attempt {record.attempt} has begun" if record.attempt > attempt else "it was given up"
    log.error("job %s: attempt %d is over (%s): process %d ends and writes nothing", run.id, attempt, why, os.getpid())
    os._exit(EXIT_CODE)


def unfenced() -> None:
    """For what has no attempt that another could follow."""


# -- journal -----------------------------------------------------------------------------------------------------------

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


# -- being asked to stop -------------------------------------------------------------------------------------


class StopAsked(Exception):
    """Raised where a trainer looks and has been asked to stop. The last step is whole; other work may not be."""


class StopSignal:
    """Remembers a SIGTERM; a second one changes nothing. Make it early, in the main thread: loading takes a while."""

    def __init__(self) -> None:
        self._signalled = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def asked(self) -> bool:
        """Whether to finish the step, save and leave."""
        return self._signalled

    def raise_if_asked(self) -> None:
        """Raise StopAsked if asked."""
        if self.asked():
            raise StopAsked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
