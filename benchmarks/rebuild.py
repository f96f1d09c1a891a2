"""How long a wiped Redis takes to be given every run directory again, by a reconciler of its own.

    python -m benchmarks.rebuild --jobs 2000

Each job has succeeded with `--evaluations` evaluations of three samples and as many checkpoints, but for the last
tenth, which wait for a GPU. JSON on the last line: `seconds` from the first look to the last job, `complete` whether
Redis then knows all of them. Exit code 1 when it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import parse
from jobs.disk.rundir import RunDir
from jobs.events import AnyFact, AttemptEnded, AttemptStarted, Event, JobQueued, JobSubmitted, JobSucceeded
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.spec import parse_spec
from jobs.state import Status
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, ModelLoaded, Sample
from tests.support.redis_server import RedisServer
from tests.support.samples import checked, prepared, time_summary
from worker.reconcile import Reconciler

KEYS = ("jobs", "events", "cores", "seconds", "complete")
SPEC = parse_spec({"name": "chef", "data": {"train": "rows.jsonl"}, "metadata": {"team": "kitchen"}})
TEXT = "Boil the rice until it is soft, then stir in the butter and a little of the stock. " * 3


def story(evaluations: int) -> tuple[list[AnyFact], list[AnyFact]]:
    """What happens to a job until it waits for a GPU, and from there to its end."""
    samples = [Sample(input=TEXT, target=TEXT, generated=TEXT)] * 3
    waiting: list[AnyFact] = [
        JobSubmitted(name="chef", model=SPEC.model, spec_sha256=SPEC.sha256(), metadata=SPEC.metadata),
        checked(steps=1000, time=time_summary(hours_expected=5.0, text="5 h")),
        prepared(1000, train_rows=128_000),
        JobQueued(),
    ]
    trained: list[AnyFact] = [
        AttemptStarted(worker="train-box-1-a1b2c3", device="cuda"),
        ModelLoaded(parameters=10, parameter_bytes=20, dtype="bfloat16", device="cuda:0", seconds=9.0, peak_ratio=1.01),
    ]
    for number in range(1, evaluations + 1):
        step = 1000 * number // evaluations
        trained.append(EvaluationFinished(step=step, loss=2.0, rows=512, seconds=9.0, best=True, samples=samples))
        trained.append(
            CheckpointSaved(step=step, path=f"checkpoints/step-{step:08}", bytes=1, seconds=1.0, validation_loss=2.0)
        )
    return waiting, [*trained, AttemptEnded(reason="done", step=1000), JobSucceeded(model="model", step=1000, loss=2.0)]


def main(argv: list[str]) -> int:
    """Make the jobs, begin with an empty Redis, rebuild."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--evaluations", type=int, default=10)
    arguments = parse(parser, argv, jobs=20, evaluations=1)
    waiting, trained = story(arguments.evaluations)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis", aof=True) as server:
        runs = Path(folder) / "runs"
        runs.mkdir()
        for number in range(arguments.jobs):
            write(
                RunDir(runs / f"job-{number:06}"), waiting if number * 10 >= arguments.jobs * 9 else waiting + trained
            )
        client = connect(server.url)
        client.flushall()
        store = Store(client)
        start = time.monotonic()
        Reconciler(runs, store, Tickets(client)).run_once()
        seconds = time.monotonic() - start
        complete = len(store.maintenance.known()) == arguments.jobs
        complete = complete and client.zcard(f"longhaul:status:{Status.QUEUED.value}") == arguments.jobs // 10
    print(json.dumps({
        "jobs": arguments.jobs, "events": len(waiting + trained), "cores": os.cpu_count(),
        "seconds": round(seconds, 2), "complete": complete,
    }))  # fmt: skip
    return 0 if complete else 1


def write(run: RunDir, facts: list[AnyFact]) -> None:
    """A run directory with these events, as `RunDir.append` writes them, but without waiting for the disk."""
    run.path.mkdir()
    run.spec_file.write_text(SPEC.model_dump_json())
    attempt = 0
    with open(run.events_file, "w") as file:
        for number, fact in enumerate(facts, start=1):
            attempt += isinstance(fact, AttemptStarted)
            event = Event(number=number, job=run.id, at=time.time(), attempt=attempt, fact=fact)
            file.write(event.model_dump_json() + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
