"""Step time while Discord and W&B are in trouble, against steps of the same job while publish stands still.

    python -m benchmarks.sink_interference [--rounds 3] [--steps 2000]      about 8 minutes on two cores

Every round trains a tiny job through the real stack: Redis, service, workers, publish, a Discord that answers 429
(retry_after 65 s), then 500, then nothing any more, and a W&B that takes every call and answers none. All along,
publish and its children are stopped (SIGSTOP) for 5 s and let go for 5 s: a sink that stands takes nothing from a step,
and what else runs on the machine falls on both alike. Afterwards Discord answers again, and what each sink was owed
is counted.

`step_time_ratio` is the mean step while publish ran over the mean step while it stood, the mean over all pairs of
turns; `standard_error` is that of this mean. `publish_cores` is the processor time of publish and its children over the
time that the job trained (half of which it stood): all that a sink can take from a step.

JSON on the last line. Exit code 1 when the ratio is above 1.02 or anything is missing in the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.command_line import parse
from jobs.disk.rundir import RunDir
from jobs.metrics import MetricRow
from tests.sinks.driving import closed
from tests.sinks.wandb_runs import history, offline_files
from tests.support.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.support.recipes import ROWS
from tests.support.stack import ROLES, Stack, tiny_job

KEYS = (
    "step_time_ratio", "standard_error", "pairs", "by_round", "step_ms", "publish_cores", "steps", "discord_answers",
    "wandb_unanswered", "discord_complete", "wandb_complete",
)  # fmt: skip
RATIO_LIMIT = 1.02
SLOWEST_S = 900.0
LEAST_ROWS = 5
"""Of a turn; a row is the mean of five steps."""
ROWS_TRAINED, BATCH = 64, 8


@dataclass(frozen=True)
class Interval:
    """Some seconds in which publish stood or ran; Unix seconds."""

    start: float
    end: float
    standing: bool


@dataclass(frozen=True)
class Round:
    """One job: its pairs of turns, what the sinks went through meanwhile, and what they had in the end."""

    ratios: list[float]
    step_s: float
    cores: float
    """Processor time of publish and its children / time of the attempt."""
    discord_answers: list[int]
    """Statuses in order, while the job ran; 0: none."""
    wandb_unanswered: int
    discord_complete: bool
    wandb_complete: bool


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sink_interference")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000, help="enough for the job to outlast the 65 s and more")
    parser.add_argument("--retry-after", type=float, default=65.0, help="seconds that Discord asks for")
    parser.add_argument("--turn", type=float, default=5.0, help="seconds that publish stands, and runs")
    arguments = parse(parser, argv, rounds=1, steps=80, retry_after=0.1, turn=0.2)
    rounds: list[Round] = []
    for number in range(arguments.rounds):
        rounds.append(one_round(arguments))
        found, load = rounds[-1].ratios, os.getloadavg()[0]
        print(f"round {number + 1}: {mean(found)} in {len(found)} pairs of turns, load {load:.1f}", flush=True)
    ratios = [ratio for each in rounds for ratio in each.ratios]
    result = {
        "step_time_ratio": mean(ratios),
        "standard_error": round(statistics.stdev(ratios) / math.sqrt(len(ratios)), 4) if len(ratios) > 1 else None,
        "pairs": len(ratios),
        "by_round": [mean(each.ratios) for each in rounds],
        "step_ms": round(1000 * statistics.median(each.step_s for each in rounds), 3),
        "publish_cores": round(statistics.median(each.cores for each in rounds), 4),
        "steps": arguments.steps,
        "discord_answers": [shorter(each.discord_answers) for each in rounds],
        "wandb_unanswered": [each.wandb_unanswered for each in rounds],
        "discord_complete": all(each.discord_complete for each in rounds),
        "wandb_complete": all(each.wandb_complete for each in rounds),
    }
    print(json.dumps(result))
    complete = result["discord_complete"] and result["wandb_complete"]
    good = arguments.smoke or (bool(ratios) and statistics.mean(ratios) <= RATIO_LIMIT)
    return 0 if good and complete else 1


def mean(ratios: list[float]) -> float | None:
    """None: turns were too short for steps to be compared."""
    return round(statistics.mean(ratios), 4) if ratios else None


def one_round(arguments: argparse.Namespace) -> Round:
    """Train with both sinks in trouble, publish standing every other turn; then see what each sink received."""
    with tempfile.TemporaryDirectory() as name, FakeDiscord() as discord, FakeWandb() as wandb:
        discord.answer_next(429, retry_after=arguments.retry_after)
        discord.answer_next(500)
        wandb.hang()
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        with Stack(Path(name) / "home", data=make_data(Path(name)), environment=told) as stack:
            run, turns, cores = train(stack, arguments, discord)
            answers = [seen.status for seen in discord.requests]
            if answers[:3] != [429, 500, 0] and not arguments.smoke:
                raise SystemExit(f"the job was over before all trouble had come ({answers}): give more --steps")
            unanswered = len(wandb.requests)
            discord.release()
            discord.wait_for(lambda: "tiny: done" in discord.titles, timeout_s=90)
            stack.wait_for(lambda: closed(run, "wandb") or None, "the W&B run to end", 120)
        rows = run.metrics()
        kept = {pair for file in offline_files(run) for pair in history(file, "train/loss")}
        return Round(
            ratios=pair_ratios(turns, rows),
            step_s=statistics.median(row.step_s for row in rows),
            cores=cores,
            discord_answers=answers,
            wandb_unanswered=unanswered,
            discord_complete=discord.titles == ["tiny: attempt 1 ended", "tiny: done"],
            wandb_complete=kept == {(row.step, row.loss) for row in rows},
        )


def train(stack: Stack, arguments: argparse.Namespace, discord: FakeDiscord) -> tuple[RunDir, list[Interval], float]:
    """Run the job to its end; the turns, and the cores that publish used meanwhile."""
    stack.start(*ROLES)
    training = {"epochs": arguments.steps * BATCH // ROWS_TRAINED, "batch_size": BATCH, "learning_rate": 0.001}
    seldom = {
        "evaluation": {"every_steps": 500, "samples": 2},
        "checkpoint": {"every_minutes": 60, "every_steps": None},
    }
    run = stack.submit(tiny_job(training=training, log={"every_steps": 5}, max_restarts=0, **seldom))
    began = stack.wait_for_event(run, "attempt.started", "job.failed")
    publish = stack.processes["publish"].pid
    before = processor_s(publish)
    turns: list[Interval] = []
    threading.Thread(target=fall_silent, args=[discord], daemon=True).start()
    try:
        while not run.record().status.terminal:
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                for pid in family(publish):
                    os.kill(pid, signum)
                start = time.time()
                time.sleep(arguments.turn)  # a turn is this long: there is nothing to wait for
                turns.append(Interval(start, time.time(), standing=signum == signal.SIGSTOP))
    finally:
        for pid in family(publish):
            os.kill(pid, signal.SIGCONT)
    end = run.events()[-1]
    assert end.type == "job.succeeded", stack.logs()
    return run, turns, (processor_s(publish) - before) / (end.at - began.at)


def fall_silent(discord: FakeDiscord) -> None:
    """No more answers after the first two."""
    discord.wait_for(lambda: len(discord.requests) >= 2, timeout_s=SLOWEST_S)
    discord.hang()


def pair_ratios(turns: list[Interval], rows: list[MetricRow]) -> list[float]:
    """For each turn with publish standing and the next with it running: the mean step of this over that."""
    ratios = []
    for standing, running in zip(turns[::2], turns[1::2], strict=True):
        means = [
            [row.step_s for before, row in pairwise(rows) if turn.start <= before.at and row.at <= turn.end]
            for turn in (standing, running)
        ]
        if all(len(each) >= LEAST_ROWS for each in means):
            ratios.append(statistics.mean(means[1]) / statistics.mean(means[0]))
    return ratios


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:  # it has just ended
        return []
    return [pid, *(each for child in children for each in family(child))]


def processor_s(pid: int) -> float:
    """Processor time so far of a process and its descendants, with those that have ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:  # it has just ended
        return 0.0
    own = sum(int(ticks) for ticks in text[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_s(child) for child in children)


def make_data(folder: Path) -> Path:
    """A data directory like that of the tests."""
    data = folder / "data"
    data.mkdir()
    lines = ROWS.read_text().splitlines(keepends=True)
    (data / "rows.jsonl").write_text("".join(lines[:ROWS_TRAINED]))
    (data / "held_out.jsonl").write_text("".join(lines[ROWS_TRAINED : ROWS_TRAINED + 12]))
    return data


def shorter(answers: list[int]) -> str:
    """`429 500 and 3 unanswered`."""
    said = [str(status) for status in answers if status]
    return f"{' '.join(said)} and {len(answers) - len(said)} unanswered"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
