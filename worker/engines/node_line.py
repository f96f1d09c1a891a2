"""The line of the box to the node of one task: orders and signs of life go there, what the node reports comes here.

What a disk does not take or give is tried again with the next call: the task trains on meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Literal

from jobs.disk.rundir import RunDir
from worker.engines.engine import EngineRefused, EngineUnavailable, Storage
from worker.engines.handover import Handover, NodeReport, Orders, TaskRecord

log = logging.getLogger("longhaul.engines")
DEAF_S = 30.0
"""Without an exchange, after which silence says nothing about the node."""


class NodeLine:
    """Of one thread."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        storage: Storage,
        record: TaskRecord,
        order: Callable[[], Literal["train", "stop", "kill"]],
    ) -> None:
        """`order`: what the box wants of the task now."""
        self._run, self._storage, self._order = run, storage, order
        self._handover = Handover(run.path, attempt)
        self._beats = itertools.count()
        self._kept: TaskRecord | None = None
        self.record = record
        """Which task it is. A change is on disk after the next `keep` that succeeds."""
        self.report: NodeReport | None = None
        """The node's last."""
        self._heard_at = time.monotonic()
        self.all_here = True
        """Whether all has come here that the node has left and that can be had."""
        self.lost = ""
        """What the node has left and can never be had; then nothing more comes."""

    @property
    def deaf(self) -> bool:
        """Whether nothing has come from the node for a while, for want of a way: it may have said something."""
        return time.monotonic() - self._heard_at > DEAF_S

    def open(self) -> None:
        """All that the node begins with is there when this returns. Raises OSError and EngineUnavailable."""
        self._handover.write_task(self.record)
        self._kept = self.record
        self._handover.write_orders(self._orders())
        self._storage.push(self._run.path)

    def beat(self) -> None:
        """A sign of life, and whatever is new on either side."""
        self.send_orders()
        self.exchange()

    def send_orders(self) -> None:
        """As they are now."""
        try:
            self._handover.write_orders(self._orders())
        except OSError as error:  # a full disk: without a sign of life for long, the task stops
            log.warning("job %s: its node hears nothing: %s", self._run.id, error)

    def exchange(self) -> None:
        """With a node that does not share the box's disks."""
        try:
            self._storage.push(self._run.path)
            self.all_here = self._storage.pull(self._run.path)
            self._heard_at = time.monotonic()
        except EngineRefused as error:
            self.lost = str(error)
        except (EngineUnavailable, OSError) as error:
            self.all_here = False
            log.warning("job %s: nothing comes from its node, and nothing goes there: %s", self._run.id, error)

    def keep(self) -> None:
        """Have the record on disk."""
        if self._kept != self.record:
            try:
                self._handover.write_task(self.record)
            except OSError as error:  # the task is found by its name
                log.warning("job %s: what is known of its task is not kept yet: %s", self._run.id, error)
            else:
                self._kept = self.record

    def read_report(self) -> NodeReport | None:
        """What the node says; what it said before, where that cannot be read."""
        try:
            report = self._handover.report()
        except (OSError, ValueError) as error:  # of a network's disk: it may be there in a moment
            log.warning("job %s: what its node says cannot be read: %s", self._run.id, error)
        else:
            if report is not None and report.token == self.record.token:
                self.report = report
        return self.report

    def _orders(self) -> Orders:
        return Orders(token=self.record.token, order=self._order(), beat=next(self._beats))
