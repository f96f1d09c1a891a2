"""Step time while a finished model writes beside training on the CPU, against steps while it stands still.

    python -m benchmarks.try_interference [--pairs 30]      about 5 minutes on two cores

A job trains on all cores (`python -m worker.training train`). Beside it `python -m worker.training generate` writes
without end, as the worker `generate` starts it. It is stopped (SIGSTOP) and let go in turns: what else runs on the
machine falls on both alike.

`ratio` is the mean step while it wrote over the mean step while it stood, the median over all pairs of neighbouring
turns; `low` and `high` are its bootstrap interval (95 %). `words_per_s` is what it wrote meanwhile.

Below 1 it says that the cores of a virtual machine wake up faster when something keeps them awake.

JSON on the last line. Exit code 1 when the ratio is above 1.01, or nothing was written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.command_line import parse
from benchmarks.corpus import prepared_job
from jobs.disk.rundir import RunDir
from jobs.metrics import MetricRow
from jobs.process.lifeline import PARENT_PID
from tests.support.recipes import ROWS
from worker.child import JsonChild

KEYS = ("ratio", "low", "high", "pairs", "words_per_s")
RATIO_LIMIT = 1.01
EDGE_S = 0.3
"""After a change of turns, a step belongs to neither."""
LONG = {
    "rows": [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()[:64]],
    "temperature": 2.0, "seed": 0, "max_new_tokens": 4096,
}  # fmt: skip
ENOUGH_EPOCHS = 10_000


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.try_interference")
    parser.add_argument("--pairs", type=int, default=30, help="turns that it writes, each beside one that it stands")
    parser.add_argument("--turn", type=float, default=4.0, help="seconds; at least until a step has been made in it")
    arguments = parse(parser, argv, pairs=1, turn=1.0)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), arguments.pairs, arguments.turn)
    print(json.dumps(result))
    return int(not result["words_per_s"] or (result["ratio"] > RATIO_LIMIT and not arguments.smoke))


def measure(scratch: Path, pairs: int, turn_s: float) -> dict[str, Any]:
    """All turns of one job."""
    parts: dict[str, Any] = {
        "checkpoint": {"every_steps": 10**6}, "evaluation": {"every_steps": 10**6, "samples": 0},
        "log": {"every_steps": 1},
    }  # fmt: skip
    small = {"data": {"validation": 0.1, "max_input_tokens": 64, "max_target_tokens": 64}, **parts}
    finished = prepared_job(ROWS, scratch, training={"epochs": 1, "batch_size": 32}, **small)
    subprocess.run(trainer(finished), check=True, env=environment(), stderr=subprocess.DEVNULL)
    job = prepared_job(ROWS, scratch, training={"epochs": ENOUGH_EPOCHS, "batch_size": 32}, **small)
    writer = JsonChild(
        [sys.executable, "-m", "worker.training", "generate", os.fspath(finished.path)],
        environment() | {PARENT_PID: str(os.getpid())},
    )
    try:
        ask(writer)  # before training begins: it is given little time beside it
        while (part := answer(writer, 300.0)) is None or part["type"] != "text":
            pass
        with subprocess.Popen(trainer(job), env=environment(), stderr=subprocess.DEVNULL) as training:
            try:
                turns, words = take_turns(job, training, writer, pairs, turn_s)
            finally:
                training.kill()
    finally:
        writer.kill()
    written = sum(end - start for start, end, writes in turns if writes)
    return summary(ratios(job.metrics(), turns)) | {"words_per_s": words / written}


def trainer(run: RunDir) -> list[str]:
    """The command of one attempt."""
    return [sys.executable, "-m", "worker.training", "train", os.fspath(run.path)]


def environment() -> dict[str, str]:
    """As the workers of a CPU give it."""
    return {**os.environ, "LONGHAUL_DEVICE": "cpu"}


def take_turns(
    job: RunDir, training: subprocess.Popen[bytes], writer: JsonChild, pairs: int, turn_s: float
) -> tuple[list[tuple[float, float, bool]], int]:
    """(start, end, whether it wrote) of each turn, and the words that it wrote in all of them.

    Raises RuntimeError where training has ended.
    """

    def stepped(since: float) -> bool:
        if (code := training.poll()) is not None:
            raise RuntimeError(f"training ended with code {code}")
        return bool(steps(job.metrics(), since, time.time()))

    while not stepped(0.0):
        time.sleep(0.5)
    turns, words = [], 0
    for turn in range(2 * pairs):
        writes = turn % 4 in (0, 3)  # wrote, stood, stood, wrote: a drift falls on both alike
        os.kill(writer.pid, signal.SIGCONT if writes else signal.SIGSTOP)
        start = time.time()
        while (left := start + turn_s - time.time()) > 0 or not stepped(start):
            part = answer(writer, max(left, EDGE_S))
            if part is not None and part["type"] == "text":
                words += len(part["data"]["text"].split())
            if part is not None and part["type"] == "done":
                ask(writer)
        turns.append((start, time.time(), writes))
    return turns, words


def ask(writer: JsonChild) -> None:
    """Many more texts, one after the other."""
    writer.ask({"id": "long", "body": LONG})


def answer(writer: JsonChild, timeout_s: float) -> dict[str, Any] | None:
    """A part of what it wrote; None: there was none in time. Raises RuntimeError where it could not."""
    part: dict[str, Any] | None = writer.answer(timeout_s)
    if part is not None and (part["type"] == "error" or part["data"].get("error")):
        raise RuntimeError(f"the model does not write: {part['data']}")
    return part


def ratios(rows: Sequence[MetricRow], turns: Sequence[tuple[float, float, bool]]) -> list[float]:
    """Of each pair of neighbouring turns of both kinds: the mean step of the one over that of the other."""
    means = []
    for start, end, writes in turns:
        means.append((writes, statistics.fmean(steps(rows, start, end))))
    return [
        (one / other) if writes else (other / one)
        for (writes, one), (others, other) in pairwise(means)
        if writes != others
    ]


def steps(rows: Sequence[MetricRow], start: float, end: float) -> list[float]:
    """Seconds of each step that began and ended within a turn."""
    return [row.step_s for row in rows if row.step_s and start + EDGE_S <= row.at - row.step_s and row.at <= end]


def summary(found: Sequence[float]) -> dict[str, float]:
    """The median, and an interval of it."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(2000))
    return {"ratio": statistics.median(found), "low": medians[50], "high": medians[1949], "pairs": len(found)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
