"""How a trainer is asked to stop: SIGTERM, or the file `request` in the run directory (design §7)."""

from __future__ import annotations

import signal
from types import FrameType

from jobs.rundir import RunDir


class StopAsked(Exception):
    """Raised where a trainer looks and has been asked to stop. The last step is whole; other work may not be."""


class Stop:
    """Remembers a SIGTERM; a second one changes nothing. Make it early, in the main thread: loading takes a while."""

    def __init__(self, run: RunDir) -> None:
        self._file = run.request_file
        self._signalled = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def asked(self) -> bool:
        """Whether to finish the step, save and leave. Costs one stat."""
        return self._signalled or self._file.exists()

    def look(self) -> None:
        """Raise StopAsked if asked."""
        if self.asked():
            raise StopAsked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
