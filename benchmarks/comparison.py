"""`GET /compare` on loopback: every pair of 200 jobs, each with plan, events and rows of metrics; real uvicorn.

    python -m benchmarks.comparison [JOBS [ROWS [PAIRS]]]

ROWS: of metrics, of each job (2,500 without it; a run of days has 25,000). PAIRS: at most so many, drawn at random; all
without it. The pairs come in random order, so hardly any is among the files that the service keeps parsed. Then ten
jobs at once. JSON on the last line. Exit code 1 when the limit of the project is broken: p99 of 300 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

from benchmarks.api_latency import wait
from benchmarks.command_line import ROOT, parse
from jobs.disk.rundir import RunDir, create
from jobs.events import AnyFact, AttemptStarted, JobQueued, JobSubmitted
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.spec import parse_spec
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, MemoryMeasured, ModelLoaded
from tests.support.redis_server import RedisServer, free_port
from tests.support.samples import checked, memory_plan, metric_row, prepared

KEYS = (
    "jobs", "metric_rows", "pairs", "pair_median_ms", "pair_p99_ms", "pair_max_ms", "ten_jobs_median_ms",
    "ten_jobs_max_ms",
)  # fmt: skip
LIMIT_MS = 300.0
EVALUATIONS = 50
TENS = 50


def make(runs: Path, number: int, rows: int) -> str:
    """A job in training that has been evaluated and saved 50 times; no two have the same settings."""
    spec = parse_spec(
        {
            "name": f"job {number}",
            "model": "builtin:t5-tiny",
            "data": {"train": "rows.jsonl", "max_input_tokens": 64 + 8 * (number % 20)},
            "training": {"seed": number, "learning_rate": 1e-4 * (1 + number % 7)},
            "memory": {"micro_batch": 1 + number % 5},
            "metadata": {"number": str(number)},
        }
    )
    submitted = JobSubmitted(name=spec.name, model=spec.model, spec_sha256="", metadata=spec.metadata, version="0.2.0")
    run, _ = create(runs, f"job-{number:020}", spec, submitted)
    memory = memory_plan(micro_batch=1 + number % 5, input_tokens=64 + 8 * (number % 20))
    data = DataPlan(train="rows.jsonl", input="x", target="y", rows=10_000)
    run.write_plan(make_plan(spec, ModelPlan(source=spec.model, parameters=10**6), data, "cuda", memory))
    run.append([checked(), prepared(25_000), JobQueued(), AttemptStarted(worker="w", device="cuda"), *_trained()])
    lines = (metric_row(10 * step, loss=3 / step).model_dump_json() for step in range(1, rows + 1))
    run.metrics_file.write_text("".join(f"{line}\n" for line in lines))
    return RunDir(run.path).id


def _trained() -> list[AnyFact]:
    facts: list[AnyFact] = [
        ModelLoaded(parameters=1, parameter_bytes=2, dtype="bfloat16", device="cuda:0", seconds=1.0, peak_ratio=1.0),
        MemoryMeasured(step=1, measured_bytes=9, predicted_bytes=10, peak_bytes=10, budget_bytes=20),
    ]
    for place in range(1, EVALUATIONS + 1):
        step = 500 * place
        facts.append(EvaluationFinished(step=step, loss=3 / place, rows=2000, seconds=9.0, best=True))
        facts.append(CheckpointSaved(step=step, path=f"checkpoints/step-{step:08}", bytes=10**9, seconds=2.0))
    return facts


def milliseconds(session: requests.Session, url: str, jobs: tuple[str, ...]) -> float:
    """Of one comparison, as a client measures it."""
    start = time.perf_counter()
    answer = session.get(f"{url}/compare", params={"jobs": ",".join(jobs)}, timeout=30)
    taken = (time.perf_counter() - start) * 1000
    assert answer.status_code == 200, answer.text
    assert answer.json()["groups"], "they differ"
    return taken


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description="How fast jobs are compared.")
    parser.add_argument("jobs", type=int, nargs="?", default=200)
    parser.add_argument("rows", type=int, nargs="?", default=2500)
    parser.add_argument("pairs", type=int, nargs="?", help="all without it")
    arguments = parse(parser, argv, jobs=10, rows=20, pairs=2)
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis") as redis:
        runs = Path(name) / "runs"
        runs.mkdir()
        ids = [make(runs, number, arguments.rows) for number in range(arguments.jobs)]
        port = free_port()
        environment = {
            **os.environ,
            "LONGHAUL_REDIS_URL": redis.url,
            "LONGHAUL_RUNS": str(runs),
            "LONGHAUL_DATA": f"{name}/data",
            "LONGHAUL_HOST": "127.0.0.1",
            "LONGHAUL_PORT": str(port),
            "LONGHAUL_API_KEY": "",
        }
        pairs = list(itertools.combinations(ids, 2))
        draw.shuffle(pairs)
        command = [sys.executable, "-m", "service"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as service:
            try:
                url = f"http://127.0.0.1:{port}"
                wait(url)
                with requests.Session() as session:
                    times = sorted(milliseconds(session, url, pair) for pair in pairs[: arguments.pairs])
                    tens = sorted(milliseconds(session, url, tuple(draw.sample(ids, 10))) for _ in range(TENS))
            finally:
                service.terminate()
    p99 = times[int(len(times) * 0.99)]
    result = {
        "jobs": len(ids),
        "metric_rows": arguments.rows,
        "pairs": len(times),
        "pair_median_ms": round(times[len(times) // 2], 1),
        "pair_p99_ms": round(p99, 1),
        "pair_max_ms": round(times[-1], 1),
        "ten_jobs_median_ms": round(tens[len(tens) // 2], 1),
        "ten_jobs_max_ms": round(tens[-1], 1),
    }
    print(json.dumps(result))
    return 0 if p99 <= LIMIT_MS or arguments.smoke else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
