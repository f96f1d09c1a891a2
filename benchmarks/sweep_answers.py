"""How long the service takes to answer for sweeps with many trials.

    python -m benchmarks.sweep_answers [--sweeps 20] [--trials 1000] [--rounds 9]

A real service and Redis with so many ended sweeps, and ten trials with 1,000 rows of metrics each. JSON on the last
line, milliseconds over loopback, the first answer and the median of those after it: `list` and `list_page` of all
sweeps, `sweep_page` and `trials_list` of one, `compare` and `compare_page` of ten trials. Exit code 1 when a median is
not below 300.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import parse
from jobs.sweeps.directory import find
from service.settings import ServiceSettings
from tests.service.pages.showcase import furnish_sweep
from tests.service.running import Service
from tests.sinks import story
from tests.support.stack import Stack

KEYS = (
    "benchmark", "sweeps", "trials", "rounds", "smoke", "list", "list_page", "sweep_page", "trials_list", "compare",
    "compare_page",
)  # fmt: skip
LIMIT_MS = 300.0
COMPARED = 10
ROWS = 1000
HTML = {"Accept": "text/html"}


def main(argv: list[str]) -> int:
    """Make the sweeps, ask, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_answers")
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parse(parser, argv, sweeps=1, trials=COMPARED, rounds=1)
    with tempfile.TemporaryDirectory() as home, Stack(Path(home) / "home", data=Path(home)) as stack:
        stack.start("service")
        service = Service(
            ServiceSettings(
                redis_url=stack.redis.url, runs=stack.runs, data=stack.home, uploads=stack.home, port=stack.port
            )
        )
        sweeps = [furnish_sweep(service, options.trials) for _ in range(options.sweeps)]
        trials = find(stack.runs, sweeps[-1]).record().trials[:COMPARED]
        for trial in trials:
            run = story.submit(stack.runs, trial.jobs[0], f"trial {trial.number}", sweep=sweeps[-1])
            story.start(run)
            story.train(run, 10, 10 * ROWS)
            story.succeed(run)
        compared = f"/compare?jobs={','.join(trial.jobs[0] for trial in trials)}"
        found = {
            "list": times_ms(service, "/sweeps", options.rounds),
            "list_page": times_ms(service, "/sweeps", options.rounds, HTML),
            "sweep_page": times_ms(service, f"/sweeps/{sweeps[-1]}", options.rounds, HTML),
            "trials_list": times_ms(service, f"/sweeps/{sweeps[-1]}/trials", options.rounds),
            "compare": times_ms(service, compared, options.rounds),
            "compare_page": times_ms(service, compared, options.rounds, HTML),
        }
    print(json.dumps({"benchmark": "sweep_answers", **vars(options), **found}))
    return 0 if options.smoke or all(each["median_ms"] < LIMIT_MS for each in found.values()) else 1


def times_ms(service: Service, path: str, rounds: int, headers: dict[str, str] | None = None) -> dict[str, float]:
    """Of one path: the first answer, and those after it."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        service.get(path, headers=headers).raise_for_status()
        times.append(1000 * (time.perf_counter() - began))
    return {"first_ms": round(times[0], 1), "median_ms": round(statistics.median(times[1:]), 1)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
