"""A clock that stands still until a test moves it."""

from __future__ import annotations


class Clock:
    """Seconds; callable like `time.monotonic`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
