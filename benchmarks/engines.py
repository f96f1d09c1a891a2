"""How fast a job on an engine is heard of, and how fast it is back after a preemption: a fake Slurm on this machine.

    python -m benchmarks.engines [--preemptions 3]      about 3 minutes on two cores

A tiny job trains through the real stack, its trainers started by programs that stand for Slurm's, and is preempted
again and again. `event_delay_s`: from the moment that a trainer writes a fact until that is an event of the job, which
includes what the machine's load adds. `handed_over_s`: from `attempt.started` until the node says that the trainer
runs; the node waits for a second sign of life before it starts one. `back_s`: from SIGTERM to the program on the node
until the trainer of the next attempt runs, with the last step and its checkpoint.

JSON on the last line. Exit code 1 when an event took 10 s or more, or the job did not end as it should.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.command_line import parse
from jobs.attempt import Noted
from jobs.disk.rundir import RunDir
from jobs.events import Event
from jobs.reasons import Reason
from tests.fake_slurm.slurm import FakeSlurm
from tests.support.recipes import ROWS
from tests.support.samples import reasons
from tests.support.stack import ROLES, Stack, tiny_job

KEYS = ("events", "event_delay_s", "handed_over_s", "back_s", "ended_as_it_should")
LIMIT_S = 10.0


def delays(run: RunDir) -> list[float]:
    """Seconds of each fact of each trainer, from its line in the attempt file to its event."""
    found = []
    for attempt in range(1, run.record().attempt + 1):
        noted = [line.at for line in run.attempt_lines(attempt) if isinstance(line, Noted)]
        events = [event.at for event in run.events() if event.attempt == attempt and event.fact.by_trainer]
        found += [event - line for line, event in zip(noted, events, strict=True)]
    return found


def at(run: RunDir, kind: str) -> list[float]:
    """When each event of this type came."""
    return [event.at for event in run.events() if event.type == kind]


def saved(run: RunDir, attempt: int) -> Event | None:
    """The first checkpoint of an attempt."""
    return next((e for e in run.events() if e.type == "checkpoint.saved" and e.attempt == attempt), None)


def main(argv: list[str]) -> int:
    """Run the job; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preemptions", type=int, default=3)
    arguments = parse(parser, argv, preemptions=1)
    preemptions = arguments.preemptions
    with tempfile.TemporaryDirectory() as name:
        folder, preempted = Path(name), []
        data = folder / "data"
        data.mkdir()
        lines = ROWS.read_text().splitlines(keepends=True)
        (data / "rows.jsonl").write_text("".join(lines[:64]))
        (data / "held_out.jsonl").write_text("".join(lines[64:76]))
        with FakeSlurm(folder) as slurm, Stack(folder / "home", data=data, environment=slurm.environment()) as stack:
            stack.start(*ROLES)
            epochs = {"epochs": 4 * (preemptions + 1), "batch_size": 8, "learning_rate": 0.003}
            run = stack.submit(tiny_job(training=epochs, resources={"engine": "cluster"}))
            for attempt in range(1, preemptions + 1):
                stack.wait_for(partial(saved, run, attempt), f"a checkpoint of attempt {attempt}", 300)
                slurm.end(str(attempt), "preempt")
                preempted.append(time.time())
            stack.wait_for_event(run, "job.succeeded", "job.failed", timeout=600)
        found, started = delays(run), at(run, "task.started")
        handed_over = [there - began for began, there in zip(at(run, "attempt.started"), started, strict=True)]
        back = [there - told for told, there in zip(preempted, started[1:], strict=True)]
        ended = reasons(run) == [*[Reason.INTERRUPTED] * preemptions, Reason.DONE]
    figures = {
        "events": len(found),
        "event_delay_s": {"median": round(statistics.median(found), 2), "most": round(max(found), 2)},
        "handed_over_s": [round(each, 1) for each in handed_over],
        "back_s": [round(each, 1) for each in back],
        "ended_as_it_should": ended,
    }
    print(json.dumps(figures))
    return 0 if ended and (max(found) < LIMIT_S or arguments.smoke) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
