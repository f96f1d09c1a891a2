"""The program of a task, on a node of an engine: it trains one attempt in a run directory. There is no Redis here.

    python -m worker.engines.node RUN_DIR --attempt N --token TOKEN [--bucket URL]

It starts the trainer, passes SIGTERM on to it (the engine wants the node back), and does what the box orders in
`attempts/<n>.orders.json` (`handover.py`). Nothing trains that the box does not know of: the trainer starts with the
first sign of life of a box whose orders name this task, and stops when there has been none for long.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

from jobs.disk.rundir import RunDir
from jobs.process.lifeline import PARENT_PID
from jobs.process.logs import configure
from jobs.reasons import Reason
from worker.engines.bucket import Bucket
from worker.engines.bucket_copies import EVERY_S, Receiver, Sender, get_file, read_listing, unavailable
from worker.engines.bucket_stores import receive_stores
from worker.engines.copied_file import BucketListing, by_node, files_in, remove
from worker.engines.engine import EngineUnavailable, SharedStorage, Storage
from worker.engines.handover import LONGEST_HOST, Handover, NodeReport, Orders

bucket_log = logging.getLogger("longhaul.engines")


# -- a run directory that travels through a bucket (bucket_copies.py) ----------------------------------------


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
            bucket_log.error("job %s: attempt %d is the newest, not this one", run.id, box.attempt)
            self._end(run)
            return
        node = read_listing(self._bucket, f"{run.id}/{box.place}/.node.json")
        if node is not None and node.start != self._head.start:
            if self._sender is not None:
                bucket_log.error("job %s: another start of this task trains", run.id)
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


log = logging.getLogger("longhaul.node")
Copied = TypeVar("Copied")
LOOK_S = 0.5
RETRY_S = 5.0
"""Between two tries to reach the box where the program needs it."""
GRACE_S = 120.0
"""For the first start of a task that the engine starts again: it was told to end, or is gone."""
STOPPED = Reason.INTERRUPTED.exit_code


# -- the program ---------------------------------------------------------------------------------------------


class Supervision:
    """What is heard of the box."""

    def __init__(self, handover: Handover, token: str, alone_s: float) -> None:
        self._handover, self._token, self._alone_s = handover, token, alone_s
        self._beat: int | None = None
        self._heard = monotonic()
        self.there = False
        """It has given a sign of life since this program began."""

    def order(self) -> str:
        """`train`, `stop` or `kill`. Without a sign of life for long it is `stop`, and after twice as long `kill`."""
        now = monotonic()
        try:
            orders = self._handover.orders()
        except (OSError, ValueError) as error:  # of a network's disk: they may come back
            log.warning("the orders cannot be read: %s", error)
            orders = None
        if orders is not None and orders.token != self._token:  # another task is the attempt
            return "kill"
        if orders is not None and orders.beat != self._beat:
            self.there = self.there or self._beat is not None
            self._beat, self._heard = orders.beat, now
        order = "train" if orders is None else orders.order
        if order == "kill" or now - self._heard > 2 * self._alone_s:
            return "kill"
        return "stop" if order == "stop" or now - self._heard > self._alone_s else "train"


def main(argv: list[str]) -> int:
    """Train; returns the exit code of the trainer, of a signal plus 128."""
    parser = argparse.ArgumentParser(prog="python -m worker.engines.node", description="One attempt at one job.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True, help="its number")
    parser.add_argument("--token", required=True, help="that the orders name")
    parser.add_argument("--alone-s", type=float, default=300.0, help="seconds without a sign of life until it stops")
    parser.add_argument("--bucket", metavar="URL", help="through which the run directory comes here, and back")
    parser.add_argument("--exit-0", action="store_true", help="end with code 0 once the box can read the trainer's")
    given = parser.parse_args(argv)
    configure("text")
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    run = RunDir(given.run_dir.resolve())
    try:
        storage = SharedStorage() if given.bucket is None else NodeStorage(given.bucket, given.attempt, given.token)
    except ValueError as error:  # nothing here reaches such a bucket
        log.error("job %s: %s", run.id, error)
        return 0 if given.exit_0 else STOPPED
    try:
        code = attend(run, given.attempt, given.token, given.alone_s, asked, storage)
    except EngineUnavailable as error:
        log.error("job %s: %s", run.id, error)
        code = STOPPED
    return 0 if given.exit_0 else code


def attend(run: RunDir, attempt: int, token: str, alone_s: float, asked: threading.Event, storage: Storage) -> int:
    """Wait for the box, train, and say how it ended. `asked`: set by SIGTERM. Raises EngineUnavailable if the box is
    out of reach for long.
    """
    handover = Handover(run.path, attempt)
    box = Supervision(handover, token, alone_s)
    insist(lambda: storage.pull(run.path), alone_s)
    if (before := insist(handover.report, alone_s)) is not None and before.token == token:
        log.error("job %s: the engine has started task %s again; the box starts another", run.id, token)
        return end_for_another(run, handover, before, storage, alone_s)
    report = NodeReport(token=token, host=platform.node()[:LONGEST_HOST])
    while not box.there:
        order = box.order()
        if order == "kill":
            log.error("job %s: the box does not want this task (any more)", run.id)
            return STOPPED
        if order == "stop" or asked.is_set():
            tell_end(run, handover, report, STOPPED, storage, alone_s)
            return STOPPED
        asked.wait(LOOK_S)
        exchange(run, storage)
    with open(run.trainer_log, "ab") as output:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "worker.training", "train", os.fspath(run.path), "--attempt", str(attempt)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            env={**os.environ, PARENT_PID: str(os.getpid())},
        )
    told = reported = False
    while not ended(trainer, LOOK_S):
        reported = reported or written(handover, report)
        exchange(run, storage)
        order = box.order()
        if order == "kill":
            trainer.kill()
        elif not told and (order == "stop" or asked.is_set()):
            told = True
            log.info("job %s: the trainer is asked to stop", run.id)
            trainer.terminate()
    tell_end(run, handover, report, trainer.returncode, storage, alone_s)
    return trainer.returncode if trainer.returncode >= 0 else 128 - trainer.returncode


def ended(trainer: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether it has, after at most so long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        trainer.wait(within_s)
    return trainer.returncode is not None


def tell_end(
    run: RunDir, handover: Handover, report: NodeReport, code: int, storage: Storage, alone_s: float
) -> None:  # fmt: skip
    """The box hears of the end when it has all that the attempt left."""
    insist(lambda: storage.finish(run.path), 2 * alone_s)
    insist(lambda: handover.write_report(report.model_copy(update={"code": code})), 2 * alone_s)
    insist(lambda: storage.finish(run.path), 2 * alone_s)


def written(handover: Handover, report: NodeReport) -> bool:
    """Whether the report is on disk now: a full one must not end the training."""
    try:
        handover.write_report(report)
    except OSError as error:
        log.warning("the box does not hear yet that the trainer runs: %s", error)
        return False
    return True


def end_for_another(
    run: RunDir, handover: Handover, report: NodeReport, storage: Storage, alone_s: float
) -> int:  # fmt: skip
    """Where the task was started before: what that start says of its end, if it says so soon; else that it was
    interrupted. Through a bucket a second start says nothing; that it ends without a word says the same.
    """
    until = monotonic() + min(GRACE_S, alone_s)
    while report.code is None and monotonic() < until:
        sleep(LOOK_S)
        exchange(run, storage)
        with contextlib.suppress(OSError, ValueError):  # it is read again
            report = handover.report() or report
    if report.code is None:
        tell_end(run, handover, report, STOPPED, storage, alone_s)
    return STOPPED


def insist(copy: Callable[[], Copied], within_s: float) -> Copied:
    """Copy, also if the box or its disk can be reached only later. Raises EngineUnavailable after that time."""
    until = monotonic() + within_s
    while True:
        try:
            return copy()
        except (EngineUnavailable, OSError, ValueError) as error:
            if monotonic() >= until:
                raise EngineUnavailable(str(error)) from error
            log.warning("%s; it is tried again", error)
            sleep(RETRY_S)


def exchange(run: RunDir, storage: Storage) -> None:
    """With the box, where the two do not share disks."""
    try:
        storage.push(run.path)
        storage.pull(run.path)
    except (EngineUnavailable, OSError) as error:
        log.warning("job %s: nothing comes from the box, and nothing goes there: %s", run.id, error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
