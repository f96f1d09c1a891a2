"""Random faults for so many minutes, then checks: did every job end as if nothing had happened, and was all reported?

    python -m benchmarks.soak [--minutes 20] [--seed 1] [--steps 600]

A real stack (Redis with its log on disk, service, workers, publish, a Discord and a W&B of our own) trains the same
small job again and again. Every 5 to 20 s something is killed (-9), stopped, emptied, removed, damaged, lost, full or
silent, one thing or two, and comes back after 0 to 3 s. The seed says in which order; each kind has its turn before one
comes again. When the time is over the faults end, the jobs do, and everything is compared with a job that ran
undisturbed before. Jobs that a fault cancels or damages are not compared: they have to end as cancelled, and to be
shown as damaged and deleted.

JSON on the last line: `ok`, `faults`, how many `kinds` of them, and what was found. Exit code 1 unless `ok`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.sink_interference import make_data
from benchmarks.soak_faults import Faults
from benchmarks.soak_jobs import Jobs
from jobs.disk.rundir import RunDir
from jobs.text.units import format_duration
from tests.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.sinks.driving import closed
from tests.stack import ROLES, Stack

EVERY_S = (5.0, 20.0)


def has_closed(run: RunDir, sink: str) -> bool | None:
    """None where the sink has not been told the end yet."""
    return closed(run, sink) or None


def go_on(jobs: Jobs, faults: Faults, until: float) -> None:
    """Faults, and jobs enough that there is always one to train."""
    while time.monotonic() < until:
        if all(run.record().status.terminal for run in jobs.runs):
            jobs.submit()
        jobs.watch(faults.chance.uniform(*EVERY_S))
        for name in faults.draw(faults.chance.choice([1, 1, 1, 2])):
            faults.do(name)


def main(argv: list[str]) -> int:
    """Run, and print the JSON line."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as name, FakeDiscord() as discord, FakeWandb() as wandb:
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        data = make_data(Path(name))
        with Stack(Path(name) / "home", data=data, environment=told) as stack:
            jobs = Jobs(stack, arguments.steps)
            faults = Faults(jobs, discord, wandb, random.Random(arguments.seed))
            stack.start(*ROLES)
            begun = time.monotonic()
            jobs.wait_for_end(jobs.submit())
            print(f"undisturbed: {format_duration(time.monotonic() - begun)}", flush=True)
            begun = time.monotonic()
            go_on(jobs, faults, begun + 60 * arguments.minutes)
            minutes = (time.monotonic() - begun) / 60
            for run in [*jobs.runs, *jobs.cancelled]:
                jobs.wait_for_end(run)
            for run in jobs.runs:
                for sink in ("discord", "wandb"):
                    stack.wait_for(partial(has_closed, run, sink), f"{sink} of {run.id}", 180)
            found = jobs.findings(discord, wandb)
    equal = ("succeeded", "weights_equal", "metrics_equal", "events_gapless", "discord_complete", "wandb_complete")
    ok = all(found[key] == found["jobs"] for key in equal) and found["cancelled"] == found["cancels"]
    ok = ok and not faults.found_wrong and found["trainers_left"] == 0
    result = {
        "ok": ok,
        "faults": sum(faults.done.values()),
        "kinds": len(faults.done),
        "by_kind": dict(sorted(faults.done.items())),
        "found_wrong": faults.found_wrong,
        "gpus_lost": faults.gpus_lost,
        "evaluations_stopped": faults.evaluations_stopped,
        **found,
        "minutes": round(minutes, 1),
        "seed": arguments.seed,
        "steps": arguments.steps,
    }
    print(json.dumps(result))
    return 0 if ok else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Random faults, then checks.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="of the faults; their effects depend on the machine, too")
    parser.add_argument("--steps", type=int, default=600, help="of each job")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
