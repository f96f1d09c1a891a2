"""What the box and the node tell each other about a task, in files beside the attempt file. Each is replaced whole.

attempts/<n>.task.json      the box, for itself: which task of the engine the attempt is
attempts/<n>.orders.json    the box, for the node: whether the task may train, and a sign of life
attempts/<n>.node.json      the node, for the box: where the trainer runs, and how it has ended
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from jobs.disk.files import read_regular, write_atomically
from jobs.disk.rundir import RunDir
from jobs.frozen import Frozen
from worker.engines.engine import EngineRefused, EngineUnavailable, Storage

BEAT_S = 2.0
"""Between two signs of life of the box."""
LONGEST_HOST = 255
"""Characters of a host name."""
Content = TypeVar("Content", bound=BaseModel)


class TaskRecord(Frozen):
    """Which task of the engine an attempt is. It is on disk before the engine has the task."""

    engine: str
    name: str
    """By which the engine finds the task if its id is lost."""
    token: str
    """Of the task. Of several that claim to be this attempt, the one whose token stands in the orders may train."""
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:-]*$")] | None = None
    """The engine's; null: it is not known whether the engine took the task."""
    over: bool = False
    """Nothing of it runs any more."""


class Orders(Frozen, extra="ignore"):
    """What the box wants of the task now."""

    token: str
    order: Literal["train", "stop", "kill"]
    """`stop`: finish the step, checkpoint, leave."""
    beat: int
    """Another number each time: the box is there."""


class NodeReport(Frozen, extra="ignore"):
    """What the node says of the trainer."""

    token: str
    host: Annotated[str, Field(max_length=LONGEST_HOST)]
    code: int | None = None
    """Its exit code, of a signal negative; null: it runs."""


class Handover:
    """The files of one attempt."""

    def __init__(self, run: Path, attempt: int) -> None:
        self.run = run
        self._folder = run / "attempts"
        self.attempt = attempt

    # fmt: off
    def task(self) -> TaskRecord | None: return _read(self._file("task"), TaskRecord)
    def orders(self) -> Orders | None: return _read(self._file("orders"), Orders)
    def report(self) -> NodeReport | None: return _read(self._file("node"), NodeReport)
    # fmt: on

    def write_task(self, task: TaskRecord) -> None:
        """On disk when this returns."""
        write_atomically(self._file("task"), task.model_dump_json().encode())

    def write_report(self, report: NodeReport) -> None:
        """On disk when this returns."""
        write_atomically(self._file("node"), report.model_dump_json().encode())

    def write_orders(self, orders: Orders) -> None:
        """Every few seconds, so that the disk is not waited for."""
        file = self._file("orders")
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
        try:
            # The node's user may write here, too: a link or a pipe of this name is neither followed nor waited for.
            with open(temporary, "xb") as handle:
                handle.write(orders.model_dump_json().encode())
            os.replace(temporary, file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _file(self, kind: str) -> Path:
        return self._folder / f"{self.attempt}.{kind}.json"


def earlier(run: Path, attempt: int) -> Iterator[Handover]:
    """Of attempts before this one those that an engine had, oldest first."""
    numbers = [file.name.partition(".")[0] for file in run.glob("attempts/*.task.json")]
    yield from (Handover(run, each) for each in sorted(map(int, filter(str.isdecimal, numbers))) if each < attempt)


def _read(file: Path, kind: type[Content]) -> Content | None:
    """None: it is not there (yet)."""
    try:
        return kind.model_validate_json(read_regular(file))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{file} cannot be read: {error.errors()[0]['msg']}") from None


# -- node line ---------------------------------------------------------------------------------------------------------
# The line of the box to the node of one task: orders and signs of life go there, what the node reports comes here.
#
# What a disk does not take or give is tried again with the next call: the task trains on meanwhile.

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
