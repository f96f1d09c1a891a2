"""The publish process: tails run directories and feeds the sinks (architecture.md: Sinks).

    run directories ──▶ main loop: which jobs and sweeps?  (at start, when one appears, every 30 s)
                            │ one thread per sink
                            ├─▶ log      ─▶ a feed per open job ─▶ runs/<id>/sinks/log.json
                            ├─▶ curve    ─▶ …
                            ├─▶ wandb    ─▶ …      each feed: new events and rows → sink → cursor
                            └─▶ discord  ─▶ …

It outlives attempts and workers and needs no Redis: `wake` only makes it quicker. The threads share nothing, so a
slow or dead sink delays itself alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jobs.disk.rundir import RunDir, list_runs
from jobs.heartbeat import SinkLag
from jobs.sweeps.directory import SweepDir, list_sweeps
from worker.feed import SinkFeed, SweepFeed, size_of
from worker.sinks.base import ReportsSweeps, Sink

POLL_S = 2.0
LIST_S = 30.0
STOP_S = 30.0

Found = list[RunDir | SweepDir]
Wake = Callable[[float], object]
"""Waits until something may have happened, at most so many seconds."""

log = logging.getLogger("longhaul.publish")


def publish(
    runs: Path, threads: Sequence[SinkThread], wake: Wake, stop: threading.Event, poll_s: float = POLL_S
) -> None:
    """Feed each sink on its own thread until `stop` is set."""
    for thread in threads:
        thread.start()
    folder = Folder(runs)
    try:
        while not stop.is_set():
            found = folder.news()
            for thread in threads:
                thread.notify(found)
            wake(poll_s)
    finally:
        for thread in threads:
            thread.end()
        deadline = time.monotonic() + STOP_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class Folder:
    """Which run directories and sweeps are there: listed at start, when the folder has changed, and every 30 s."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._changed_ns = -1
        self._listed_at = float("-inf")

    def news(self) -> Found | None:
        """All of them, or None when there is no reason to look."""
        try:
            changed_ns = self._runs.stat().st_mtime_ns
            if changed_ns == self._changed_ns and time.monotonic() - self._listed_at < LIST_S:
                return None
            found: Found = [*list_sweeps(self._runs), *list_runs(self._runs)]
        except OSError as error:
            log.error("cannot list %s: %s", self._runs, error)
            return None
        self._changed_ns = changed_ns
        self._listed_at = time.monotonic()
        return found


class SinkThread(threading.Thread):
    """One sink with its open jobs and sweeps, in a thread that lives as long as publish does.

    As long: children of a sink are tied to the thread that spawned them (`lifeline`). It is a daemon because a
    hung sink must not keep the process from ending: its cursors are on disk.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(name=f"sink-{sink.name}", daemon=True)
        self.sink = sink.name
        self._sink = sink
        self._feeds: dict[str, SinkFeed | SweepFeed] = {}
        self._closed: dict[str, int | None] = {}
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._news = threading.Event()
        self._ended = False

    @property
    def lag(self) -> SinkLag:
        """How far it is behind."""
        feeds = list(self._feeds.values())  # one step: its own thread adds and removes meanwhile
        behind = [since for feed in feeds if (since := feed.behind_since) is not None]
        oldest_s = max(0.0, time.time() - min(behind)) if behind else 0.0
        return SinkLag(jobs_behind=len(behind), oldest_s=oldest_s)

    def notify(self, found: Found | None) -> None:
        """There may be news; `found` are all run directories and sweeps, when they were listed again."""
        if found is not None:
            self._found.put(found)
        self._news.set()

    def end(self) -> None:
        """Finish the current call, release everything, end the thread."""
        self._ended = True
        self._news.set()

    def run(self) -> None:
        """Turn by turn, job by job."""
        while not self._ended:
            self._news.clear()
            self._update_feeds()
            for feed in list(self._feeds.values()):
                if self._ended:
                    break
                feed.turn()
                if feed.closed:
                    del self._feeds[feed.run.id]
                    self._closed[feed.run.id] = feed.size
            due = min((feed.due for feed in self._feeds.values()), default=float("inf"))
            self._news.wait(min(60.0, max(0.0, due - time.monotonic())))
        for feed in self._feeds.values():
            feed.stop()

    def _update_feeds(self) -> None:
        while not self._found.empty():
            found = {run_dir.id: run_dir for run_dir in self._found.get()}
            for gone in self._feeds.keys() - found.keys():
                log.warning("%s: %s: its directory is gone", self._sink.name, gone)
                self._feeds.pop(gone).stop()
            for name in found.keys() - self._feeds.keys():
                self._adopt(found[name])

    def _adopt(self, run_dir: RunDir | SweepDir) -> None:
        size = size_of(run_dir.events_file)
        if self._closed.get(run_dir.id) == size:
            return
        feed: SinkFeed | SweepFeed
        try:
            if isinstance(run_dir, RunDir):
                feed = SinkFeed(self._sink, run_dir)
            elif isinstance(self._sink, ReportsSweeps):
                feed = SweepFeed(self._sink, run_dir)
            else:
                return
        except OSError:
            log.exception("%s: %s: its cursor cannot be read", self._sink.name, run_dir.id)
            return
        if feed.closed:
            self._closed[run_dir.id] = size
        else:
            self._feeds[run_dir.id] = feed
