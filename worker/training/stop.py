"""How a trainer is asked to stop: SIGTERM, from its supervisor, or from the user who started it."""

from __future__ import annotations

import signal
from types import FrameType


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
