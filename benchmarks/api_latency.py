"""Import time of the service, and `POST /jobs` on loopback: real uvicorn, real Redis (AOF, every write synced).

    python -m benchmarks.api_latency [REQUESTS]

JSON on the last line. Exit code 1 when a limit of the project is broken (import 1.5 s, median 15 ms).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

from benchmarks.command_line import ROOT, parse
from tests.support.redis_server import RedisServer, free_port

KEYS = ("import_seconds", "post_median_ms", "post_p99_ms", "requests")
WARM_UP = 50
IMPORT_LIMIT_S = 1.5
MEDIAN_LIMIT_MS = 15.0
JOB = {"model": "builtin:t5-tiny", "data": {"train": "recipes.jsonl"}}


def import_seconds(interpreters: int) -> float:
    """Median of so many fresh interpreters."""
    code = "import time; t = time.perf_counter(); import service.main; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return statistics.median(float(subprocess.check_output(command, cwd=ROOT)) for _ in range(interpreters))


def post_milliseconds(count: int) -> list[float]:
    """Durations of `count` submissions, one after the other over one connection, as a client measures them."""
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name) / "redis", aof=True) as redis:
        port = free_port()
        environment = {
            **os.environ,
            "LONGHAUL_REDIS_URL": redis.url,
            "LONGHAUL_RUNS": f"{name}/runs",
            "LONGHAUL_DATA": f"{name}/data",
            "LONGHAUL_HOST": "127.0.0.1",
            "LONGHAUL_PORT": str(port),
            "LONGHAUL_API_KEY": "",
        }
        command = [sys.executable, "-m", "service"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as service:
            try:
                url = f"http://127.0.0.1:{port}"
                wait(url)
                with requests.Session() as session:
                    for _ in range(WARM_UP):
                        _post(session, url)
                    return [_post(session, url) for _ in range(count)]
            finally:
                service.terminate()


def wait(url: str) -> None:
    """Return once the service answers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            requests.get(f"{url}/health/ready", timeout=5).raise_for_status()
            return
        except requests.ConnectionError:
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.05)


def _post(session: requests.Session, url: str) -> float:
    start = time.perf_counter()
    answer = session.post(f"{url}/jobs", json=JOB, timeout=10)
    taken = (time.perf_counter() - start) * 1000
    assert answer.status_code == 202, answer.text
    return taken


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api_latency", description="Import time, and POST.")
    parser.add_argument("requests", type=int, nargs="?", default=500)
    parser.add_argument("--interpreters", type=int, default=5, help="of which each imports the service")
    arguments = parse(parser, argv, requests=5, interpreters=1)
    seconds = import_seconds(arguments.interpreters)
    times = sorted(post_milliseconds(arguments.requests))
    median = statistics.median(times)
    result = {
        "import_seconds": round(seconds, 3),
        "post_median_ms": round(median, 2),
        "post_p99_ms": round(times[int(len(times) * 0.99)], 2),
        "requests": len(times),
    }
    print(json.dumps(result))
    good = seconds < IMPORT_LIMIT_S and median < MEDIAN_LIMIT_MS
    return 0 if good or arguments.smoke else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
