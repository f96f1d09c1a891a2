"""So much processor time, and no more, for what comes from outside and may never end: a pattern, a template."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jobs.text.units import format_duration


class Endless(Exception):
    """It has had its time."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises Endless inside, once this process has computed for so long there. For main threads; not to be nested."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Endless(f"it has not ended after {format_duration(seconds)}")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
