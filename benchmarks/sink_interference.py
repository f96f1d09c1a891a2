"""Step time while Discord and W&B are in trouble, against the same job without them. Through the real stack.

    python -m benchmarks.sink_interference [--rounds 3] [--steps 1000]      about 15 minutes on two cores

Every round trains the same tiny job twice, with Redis, service, workers and publish of its own each time: once without
sinks, and once with a Discord that answers 429 (retry_after 65 s), then 500, then nothing any more, and a W&B that
takes every call and answers none. Which of the two comes first alternates. Afterwards Discord answers again, and what
each sink was owed is counted.

Step times are `step_s` of metrics.jsonl, the first tenth left out. `step_time_ratio` is the median over rounds of
(median with trouble / median without), since other load on the machine drifts from round to round; `noise_ratio` is the
largest of the medians without sinks over the smallest: what chance alone does here. `publish_cores` is the processor
time of publish and its children over the time that the job trained, without sinks and with trouble: all that a sink can
take from a step, and hardly disturbed by other load.

JSON on the last line. Exit code 1 when the ratio is above 1.02 or anything is missing in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.events import MetricRow
from jobs.rundir import RunDir
from tests.conftest import ROWS
from tests.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.sinks.driving import closed
from tests.sinks.test_wandb import history, offline_files
from tests.stack import ROLES, Stack, tiny_job

RATIO_LIMIT = 1.02
RETRY_AFTER_S = 65.0
SLOWEST_S = 900.0
ROWS_TRAINED, BATCH = 64, 8


@dataclass(frozen=True)
class Trouble:
    """What the sinks went through while the job ran, and what they had in the end."""

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
    parser.add_argument("--steps", type=int, default=1000, help="enough for the job to outlast the 65 s and more")
    arguments = parser.parse_args(argv)
    quiet: list[float] = []
    quiet_cores: list[float] = []
    troubled: list[float] = []
    troubles: list[Trouble] = []
    for number in range(arguments.rounds):
        for in_trouble in (False, True) if number % 2 == 0 else (True, False):
            if in_trouble:
                rows, trouble = with_trouble(arguments.steps)
                troubled.append(median_step_s(rows))
                troubles.append(trouble)
            else:
                rows, cores = without_sinks(arguments.steps)
                quiet.append(median_step_s(rows))
                quiet_cores.append(cores)
            which, last = ("with trouble", troubled) if in_trouble else ("no sinks", quiet)
            load = os.getloadavg()[0]
            print(f"round {number + 1}, {which}: {last[-1] * 1000:.2f} ms a step, load {load:.1f}", flush=True)
    result = {
        "step_time_ratio": round(statistics.median(b / a for a, b in zip(quiet, troubled, strict=True)), 4),
        "noise_ratio": round(max(quiet) / min(quiet), 4),
        "publish_cores": [
            round(statistics.median(each), 4) for each in (quiet_cores, [trouble.cores for trouble in troubles])
        ],
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "step_ms_without_sinks": [round(each * 1000, 3) for each in quiet],
        "step_ms_with_trouble": [round(each * 1000, 3) for each in troubled],
        "discord_answers": [shorter(trouble.discord_answers) for trouble in troubles],
        "wandb_unanswered": [trouble.wandb_unanswered for trouble in troubles],
        "discord_complete": all(trouble.discord_complete for trouble in troubles),
        "wandb_complete": all(trouble.wandb_complete for trouble in troubles),
    }
    print(json.dumps(result))
    complete = result["discord_complete"] and result["wandb_complete"]
    return 0 if result["step_time_ratio"] <= RATIO_LIMIT and complete else 1


def without_sinks(steps: int) -> tuple[list[MetricRow], float]:
    """Rows of metrics of a job that no sink but the log and the curve is told of; cores that publish used."""
    with tempfile.TemporaryDirectory() as name, Stack(Path(name) / "home", data=make_data(Path(name))) as stack:
        run, cores = train(stack, steps, integrations={"discord": False, "wandb": None})
        return run.metrics(), cores


def with_trouble(steps: int) -> tuple[list[MetricRow], Trouble]:
    """Rows of metrics of the same job with both sinks, and what became of these."""
    with tempfile.TemporaryDirectory() as name, FakeDiscord() as discord, FakeWandb() as wandb:
        discord.answer_next(429, retry_after=RETRY_AFTER_S)
        discord.answer_next(500)
        wandb.hang()
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        with Stack(Path(name) / "home", data=make_data(Path(name)), environment=told) as stack:
            run, cores = train(stack, steps, discord=discord)
            answers = [seen.status for seen in discord.requests]
            if answers[:3] != [429, 500, 0]:
                raise SystemExit(f"the job was over before all trouble had come ({answers}): give more --steps")
            unanswered = len(wandb.requests)
            discord.release()
            discord.wait_for(lambda: "tiny: done" in discord.titles, timeout_s=90)
            stack.wait_for(lambda: closed(run, "wandb") or None, "the W&B run to end", 120)
        rows = run.metrics()
        (file,) = offline_files(run)
        return rows, Trouble(
            cores=cores,
            discord_answers=answers,
            wandb_unanswered=unanswered,
            discord_complete=discord.titles == ["tiny: attempt 1 over", "tiny: done"],
            wandb_complete=history(file, "train/loss") == [(row.step, row.loss) for row in rows],
        )


def train(stack: Stack, steps: int, discord: FakeDiscord | None = None, **more: Any) -> tuple[RunDir, float]:
    """Run the job to its end; the cores that publish used meanwhile. Discord falls silent after its two answers."""
    stack.start(*ROLES)
    schedule = {"epochs": steps * BATCH // ROWS_TRAINED, "batch_size": BATCH, "learning_rate": 0.001}
    seldom = {"evaluate": {"every_steps": 500, "samples": 2}, "checkpoint": {"every_minutes": 60, "every_steps": None}}
    run = stack.submit(tiny_job(schedule=schedule, log={"every_steps": 10}, max_restarts=0, **seldom, **more))
    began = stack.wait_for_event(run, "attempt.started", "job.failed")
    before = processor_s(stack.processes["publish"].pid)
    if discord is not None:
        discord.wait_for(lambda: len(discord.requests) == 2, timeout_s=SLOWEST_S)
        discord.hang()
    end = stack.wait_for_event(run, "job.succeeded", "job.failed", timeout=SLOWEST_S)
    assert end.type == "job.succeeded", stack.logs()
    return run, (processor_s(stack.processes["publish"].pid) - before) / (end.at - began.at)


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


def median_step_s(rows: list[MetricRow]) -> float:
    """Seconds a step, the first tenth left out."""
    return statistics.median(row.step_s for row in rows[len(rows) // 10 :])


def shorter(answers: list[int]) -> str:
    """`429 500 and 3 unanswered`."""
    said = [str(status) for status in answers if status]
    return f"{' '.join(said)} and {len(answers) - len(said)} unanswered"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
