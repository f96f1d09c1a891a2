"""The program of a task, on a node of an engine: it trains one attempt in a run directory. There is no Redis here.

    python -m worker.engines.node RUN_DIR --attempt N --token TOKEN

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
from pathlib import Path
from time import monotonic

from jobs.disk.rundir import RunDir
from jobs.process.lifeline import PARENT_PID
from jobs.process.logs import configure
from jobs.reasons import Reason
from worker.engines.engine import EngineUnavailable, SharedStorage, Storage
from worker.engines.handover import Handover, NodeReport

log = logging.getLogger("longhaul.node")
LOOK_S = 0.5
STOPPED = Reason.INTERRUPTED.exit_code


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
    given = parser.parse_args(argv)
    configure("text")
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    run = RunDir(given.run_dir.resolve())
    return attend(run, given.attempt, given.token, given.alone_s, asked, SharedStorage())


def attend(run: RunDir, attempt: int, token: str, alone_s: float, asked: threading.Event, storage: Storage) -> int:
    """Wait for the box, train, and say how it ended. `asked`: set by SIGTERM."""
    handover = Handover(run.path, attempt)
    box = Supervision(handover, token, alone_s)
    exchange(run, storage)
    if (before := handover.report()) is not None and before.token == token:
        log.error("job %s: the engine has started task %s again; the box starts another", run.id, token)
        return STOPPED
    report = NodeReport(token=token, host=platform.node())
    while not box.there:
        order = box.order()
        if order == "kill":
            log.error("job %s: the box does not want this task (any more)", run.id)
            return STOPPED
        if order == "stop" or asked.is_set():
            handover.write_report(report.model_copy(update={"code": STOPPED}))
            exchange(run, storage)
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
    handover.write_report(report)
    told = False
    while not ended(trainer, LOOK_S):
        exchange(run, storage)
        order = box.order()
        if order == "kill":
            trainer.kill()
        elif not told and (order == "stop" or asked.is_set()):
            told = True
            log.info("job %s: the trainer is asked to stop", run.id)
            trainer.terminate()
    handover.write_report(report.model_copy(update={"code": trainer.returncode}))
    exchange(run, storage)
    return trainer.returncode if trainer.returncode >= 0 else 128 - trainer.returncode


def ended(trainer: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether it has, after at most so long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        trainer.wait(within_s)
    return trainer.returncode is not None


def exchange(run: RunDir, storage: Storage) -> None:
    """With the box, where the two do not share disks."""
    try:
        storage.push(run.path)
        storage.pull(run.path)
    except EngineUnavailable as error:
        log.warning("job %s: nothing comes from the box, and nothing goes there: %s", run.id, error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
