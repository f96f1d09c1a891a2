"""Running publish in a thread, and waiting for what it does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jobs.rundir import RunDir
from worker.feed import read_cursor
from worker.publish import Line, publish
from worker.sinks.base import Sink


@contextlib.contextmanager
def publishing(runs: Path, *sinks: Sink) -> Iterator[list[Line]]:
    """publish with these sinks, woken fifty times a second, stopped in good order at the end."""
    stop = threading.Event()
    lines = [Line(sink) for sink in sinks]
    thread = threading.Thread(target=publish, args=(runs, lines, lambda _: stop.wait(0.02), stop))
    thread.start()
    try:
        yield lines
    finally:
        stop.set()
        thread.join(40)
        assert not thread.is_alive()


def until(condition: Callable[[], object], timeout_s: float = 40.0) -> None:
    """Wait for something that another thread or process does to files."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def closed(run: RunDir, sink: str) -> bool:
    """Whether this sink has been told the end of this job."""
    return read_cursor(run, sink).closed is not None
