"""The node's side of a run directory that travels through a bucket (`bucket_copies.py`)."""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path

from jobs.disk.rundir import RunDir
from worker.engines.bucket import Bucket
from worker.engines.bucket_copies import EVERY_S, Receiver, Sender, get_file, read_listing, unavailable
from worker.engines.bucket_stores import receive_stores
from worker.engines.copied_file import BucketListing, by_node, files_in, remove
from worker.engines.engine import EngineUnavailable
from worker.engines.handover import Handover, NodeReport, Orders

log = logging.getLogger("longhaul.engines")


class NodeStorage:
    """Of one run directory, for one start of one task. The first `pull` copies all that the attempt begins with. Where
    another start, or another task, is the attempt, nothing is sent.
    """

    def __init__(self, url: str, attempt: int, token: str, every_s: float = EVERY_S) -> None:
        """Raises ValueError: nothing that is installed reads this URL."""
        self._bucket, self._every_s = Bucket(url), every_s
        self._head = BucketListing(attempt=attempt, token=token, start=uuid.uuid4().hex[:8], files={})
        self._push_at = self._pull_at = 0.0
        self._sender: Sender | None = None
        """None: nothing is copied yet, or nothing may be (any more)."""
        self._receiver: Receiver | None = None
        self._second = False
        """Another start, or another task, is the attempt."""

    def push(self, run: Path) -> None:
        """Send what is new of what the trainer writes."""
        if self._sender is not None and time.monotonic() >= self._push_at:
            with unavailable():
                self._sender.send(by_node, wait=False)
            self._push_at = time.monotonic() + self._every_s

    def finish(self, run: Path) -> None:
        """Send it, and return when all of it is there, also what is large."""
        if self._sender is not None:
            with unavailable():
                self._sender.send(by_node, wait=True)

    def pull(self, run: Path) -> bool:
        """Receive what is new of what the box writes: its orders. Those of another task are orders to end this one."""
        if time.monotonic() >= self._pull_at:
            with unavailable():
                self._pull(RunDir(run))
            self._pull_at = time.monotonic() + self._every_s
        return True

    def _pull(self, run: RunDir) -> None:
        box = read_listing(self._bucket, f"{run.id}/.box.json")
        if box is None or box.attempt < self._head.attempt:
            raise EngineUnavailable(f"the box has put nothing of attempt {self._head.attempt} into the bucket")
        if box.place != self._head.of_box:
            log.error("job %s: attempt %d is the newest, not this one", run.id, box.attempt)
            self._end(run)
            return
        node = read_listing(self._bucket, f"{run.id}/{box.place}/.node.json")
        if node is not None and node.start != self._head.start:
            if self._sender is not None:
                log.error("job %s: another start of this task trains", run.id)
                self._end(run)
            else:
                self._hear_first(run, node)
        elif self._sender is None and not self._second:
            self._join(run, box)
        elif self._receiver is not None:
            self._receiver.receive({name: file for name, file in box.files.items() if not by_node(name)}, wait=False)

    def _join(self, run: RunDir, box: BucketListing) -> None:
        """All that the box has put there comes here."""
        self._receiver = self._receiver or Receiver(self._bucket, run.path)
        if not self._receiver.receive(box.files, wait=True):
            raise EngineUnavailable("something that the attempt begins with is not in the bucket as it is listed")
        remove(run.path, [name for name in files_in(run.path) if by_node(name) and name not in box.files])
        receive_stores(self._bucket, run)
        head = self._head.model_copy(
            update={"files": {name: each for name, each in box.files.items() if by_node(name)}}
        )
        sender = Sender(self._bucket, run.path, head.place, f"{run.id}/{box.place}/.node.json", head)
        sender.list()
        self._sender = sender

    def _hear_first(self, run: RunDir, node: BucketListing) -> None:
        """Where the task was started before, what that start says comes here, and nothing else."""
        self._second = True
        handover, name = Handover(run.path, self._head.attempt), f"attempts/{self._head.attempt}.node.json"
        if (report := node.files.get(name)) is not None:
            get_file(self._bucket, f"{run.id}/{report.place}/{name}", report, run.path / name)
        elif handover.report() is None:
            (run.path / "attempts").mkdir(parents=True, exist_ok=True)
            handover.write_report(NodeReport(token=self._head.token, host=""))

    def _end(self, run: RunDir) -> None:
        self._sender, self._second = None, True
        (run.path / "attempts").mkdir(parents=True, exist_ok=True)
        Handover(run.path, self._head.attempt).write_orders(Orders(token="", order="kill", beat=0))
