"""A second box is cut off, or killed, while it trains a job: what is lost, done twice, and told, and how soon.

    python -m benchmarks.boxes [--seconds 60 600] [--only network|everything|killed]

Two boxes by network namespaces (root only): everything but a train worker here, that one there, and one here that is
idle. Both see the same folders. Each case begins with a new job in training on the other box:

- `network`: no packet passes for so many seconds; the folders are there.
- `everything`: the other box stands still, too, for it waits for its folders; after 90 s their server
  forgets its locks.
- `killed`: every process of the other box is killed. Here its locks are free at once, over NFS after 90 s.

Seconds count from the cut. JSON on the last line: `ok` (no event or row of metrics is missing or there twice, nothing
was written by an attempt that was over), and the figures of each case. Exit code 1 unless `ok`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import parse, skipped
from benchmarks.sink_interference import make_data
from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted, Event
from jobs.metrics import MetricRow
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.trainer_facts import ModelLoaded
from tests.support.boxes import NAMES, OTHER, TwoBoxes, forget_locks, why_no_namespace
from tests.support.samples import read_lines
from tests.support.stack import tiny_job

KEYS = ("ok", "cases")
FORGOTTEN_S = 90.0
"""After which Linux's NFS server gives up the locks of a client."""
BATCH = 8


@dataclass
class Case:
    """A job that trains on the other box, and what becomes of it."""

    boxes: TwoBoxes
    store: Store

    def begin(self) -> RunDir:
        """A job that has done some steps since its first checkpoint."""
        self.boxes.start_if_gone(OTHER)
        self.boxes.wait_for(lambda: self.heard() or None, "the other box")
        if "train" in self.boxes.processes:
            self.boxes.stop("train")
        training = {"epochs": 10_000, "batch_size": BATCH, "learning_rate": 1e-4}
        run = self.boxes.submit(
            tiny_job(
                training=training, log={"every_steps": 1}, checkpoint={"every_steps": 25, "keep": 2},
                evaluation={"every_steps": 1_000_000, "samples": 1},
            )
        )  # fmt: skip
        self.wait_for_step(run, 30)
        self.boxes.start("train")
        self.boxes.wait_for(lambda: self.heard(NAMES[1]) or None, "the idle worker here")
        return run

    def heard(self, box: str = NAMES[0]) -> bool:
        """Whether a train worker of a box is among those of the last minute."""
        return any(each.stage == "train" and each.box == box for each in self.store.workers.all())

    def wait_for_step(self, run: RunDir, step: int, attempt: int = 1) -> None:
        """Until that attempt has logged it."""

        def look() -> bool | None:
            rows = run.metrics()
            return (bool(rows) and (rows[-1].attempt, rows[-1].step) >= (attempt, step)) or None

        self.boxes.wait_for(look, f"step {step} of {run.id}")

    def network(self, seconds: float) -> dict[str, Any]:
        """No packet passes."""
        run = self.begin()
        step, began = run.metrics()[-1].step, time.time()
        self.boxes.cut()
        missed_s = self._until(lambda: not self.heard(), seconds)
        time.sleep(max(0.0, began + seconds - time.time()))
        steps, told = run.metrics()[-1].step - step, self.store.number(run.id)
        events = run.record().number
        self.boxes.join()
        joined = time.time()
        self.boxes.wait_for(lambda: self._renewed(run, joined) or None, "the lease to be renewed")
        back_s = time.time() - joined
        return self.end(run) | {
            "seconds": seconds, "steps_meanwhile": steps, "events_not_told_at_its_end": events - told,
            "missing_from_workers_after_s": missed_s, "lease_renewed_after_join_s": round(back_s, 1),
        }  # fmt: skip

    def everything(self, seconds: float) -> dict[str, Any]:
        """It stands still, and its locks are forgotten."""
        run = self.begin()
        began = time.time()
        self.boxes.freeze_other()
        self.boxes.cut()
        done = run.metrics()[-1].step
        time.sleep(min(FORGOTTEN_S, seconds))
        if seconds > FORGOTTEN_S:
            forget_locks(run)
            self.boxes.wait_for_event(run, "attempt.ended")
            self.wait_for_step(run, 1, attempt=2)
        time.sleep(max(0.0, began + seconds - time.time()))
        said = run.attempt_file(1).read_bytes()
        self.boxes.join()
        self.boxes.thaw_other()
        joined = time.time()
        if seconds > FORGOTTEN_S:
            # Its worker hears that another one has its job, and waits for the next.
            self.boxes.wait_for(lambda: self._idle() or None, "the other box to be idle")
        else:
            self.boxes.wait_for(lambda: self._renewed(run, joined) or None, "the lease to be renewed")
        written = len(run.attempt_file(1).read_bytes()) - len(said) if seconds > FORGOTTEN_S else 0
        return self.end(run, began, done) | {
            "seconds": seconds, "bytes_written_by_the_attempt_that_was_over": written,
            "back_at_work_after_s": round(time.time() - joined, 1),
        }  # fmt: skip

    def killed(self) -> dict[str, Any]:
        """Every process of it ends."""
        run = self.begin()
        began = time.time()
        self.boxes.kill_other()
        done = run.metrics()[-1].step
        self.wait_for_step(run, 1, attempt=2)
        return self.end(run, began, done)

    def end(self, run: RunDir, began: float = 0.0, done: int = 0) -> dict[str, Any]:
        """Cancel the job. What became of it; where an attempt was lost after `done` steps, how soon that was told."""
        rows = run.metrics()
        self.boxes.post(run, "cancel")
        self.boxes.wait_for_event(run, "job.cancelled")
        events = run.events()
        written = read_lines(run.metrics_file, MetricRow)
        found: dict[str, Any] = {
            "attempts": [e.fact.box for e in events if isinstance(e.fact, AttemptStarted)],
            "rows_trained_twice": 0,
            "whole": [e.number for e in events] == list(range(1, len(events) + 1))
            and [row.step for row in written] == list(range(1, len(written) + 1)) and len(written) >= len(rows),
        }  # fmt: skip
        ended = _first(events, "attempt.ended", 1)
        if ended is not None and len(found["attempts"]) > 1:
            loaded = _first(events, "model.loaded", 2)
            assert loaded is not None and isinstance(loaded.fact, ModelLoaded)
            found["rows_trained_twice"] = BATCH * (done - (loaded.fact.resumed_step or 0))
            found |= {"told_after_s": round(ended.at - began, 1), "trained_on_after_s": round(loaded.at - began, 1)}
        return found

    def _renewed(self, run: RunDir, since: float) -> bool:
        """Whether the lease ends later than one that was renewed before `since` would."""
        client = connect(self.boxes.redis.admin_url)
        with client:
            ends = client.zscore("longhaul:leases", run.id)
        return ends is not None and float(str(ends)) / 1000 > since + 30

    def _idle(self) -> bool:
        """Whether the other box's worker is heard of, and works on nothing."""
        found = [each for each in self.store.workers.all() if each.stage == "train" and each.box == NAMES[0]]
        return any(each.heartbeat_age_s < 5 and not each.busy and each.job is None for each in found)

    def _until(self, look: Callable[[], bool], seconds: float) -> float | None:
        """Seconds until it is so, at most so long; None: it never was."""
        began = time.time()
        while time.time() < began + seconds:
            if look():
                return round(time.time() - began, 1)
            time.sleep(0.5)
        return None


def _first(events: list[Event], kind: str, attempt: int) -> Event | None:
    return next((event for event in events if event.type == kind and event.attempt == attempt), None)


def main(argv: list[str]) -> int:
    """Run, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0, 600.0], help="of each partition")
    parser.add_argument("--only", choices=("network", "everything", "killed"), help="this case alone")
    arguments = parse(parser, argv, seconds=[1.0], only="network")
    if (why := why_no_namespace()) is not None:
        return skipped(arguments, why)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, TwoBoxes(Path(name) / "home", data=make_data(Path(name))) as boxes:
        boxes.start("service", "check", "prepare", "publish", OTHER)
        case = Case(boxes, Store(connect(boxes.redis.url)))
        for kind in (arguments.only,) if arguments.only else ("network", "everything", "killed"):
            for seconds in arguments.seconds if kind != "killed" else (0.0,):
                figures = case.killed() if kind == "killed" else getattr(case, kind)(seconds)
                found.append({"case": kind, **figures})
                print(json.dumps(found[-1]), flush=True)
    ok = all(each["whole"] and not each.get("bytes_written_by_the_attempt_that_was_over") for each in found)
    print(json.dumps({"ok": ok, "cases": found}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
