"""Running publish in a thread, and waiting for what it does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobs.disk.rundir import RunDir
from jobs.events import Event, JobSubmitted
from jobs.metrics import MetricRow
from tests.sinks import story
from worker.feed import read_cursor
from worker.publish import SinkThread, publish
from worker.sinks.base import DONE, Outcome, Sink, SinkJob


@contextlib.contextmanager
def publishing(runs: Path, *sinks: Sink) -> Iterator[list[SinkThread]]:
    """publish with these sinks, woken fifty times a second, stopped in good order at the end."""
    stop = threading.Event()
    lines = [SinkThread(sink) for sink in sinks]
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


@dataclass
class Listener:
    """A sink that remembers; `answer` decides what it says to an event."""

    name: str = "listener"
    follows_metrics: bool = True
    answer: Callable[[Event], Outcome] = lambda event: DONE
    events: list[tuple[str, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def accepts(self, submitted: JobSubmitted) -> bool:
        return submitted.discord

    def event(self, event: Event, job: SinkJob) -> Outcome:
        outcome = self.answer(event)
        if outcome == DONE:
            self.events.append((job.id, event.number))
            self.order.append(event.type)
        return outcome

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        self.steps += [row.step for row in rows]
        self.order.append("rows")
        return DONE

    def close(self, job: SinkJob) -> None:
        self.closed.append(job.id)


def whole(runs: Path, job: str = "job-1") -> RunDir:
    run = story.submit(runs, job)
    story.start(run)
    story.train(run, 10, 400)
    story.succeed(run)
    return run
