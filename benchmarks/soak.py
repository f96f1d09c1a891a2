"""Random faults for so many minutes, then checks: did every job end as if nothing had happened, and was all of it told?

    python -m benchmarks.soak [--minutes 20] [--seed 1] [--steps 600]

A real stack (Redis with its log on disk, service, workers, publish, a Discord and a W&B of our own) trains the same
small job again and again. Every 5 to 20 s something is killed (-9), stopped, emptied, damaged or falls silent, one
thing or two, chosen by the seed, and comes back after 0 to 3 s. When the time is over the faults end, the jobs do, and
everything is compared with a job that ran undisturbed before.

JSON on the last line: `ok`, `faults` by kind, and what was found. Exit code 1 unless `ok`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sink_interference import make_data
from jobs.rundir import RunDir
from tests.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.processes import trainers
from tests.sinks.driving import closed
from tests.sinks.test_wandb import history, offline_files
from tests.stack import ROLES, Stack, tiny_job

ROWS_TRAINED, BATCH = 64, 8
EVERY_S = (5.0, 20.0)
BACK_AFTER_S = 3.0
LONGEST_S = 600.0


class Soak:
    """The stack, what is done to it, and what it has trained so far."""

    def __init__(self, stack: Stack, discord: FakeDiscord, wandb: FakeWandb, steps: int, seed: int) -> None:
        self.stack, self.discord, self.wandb, self.steps = stack, discord, wandb, steps
        self.chance = random.Random(seed)
        self.runs: list[RunDir] = []
        self.done: Counter[str] = Counter()
        self.most_trainers = 0
        self.kinds: dict[str, Callable[[], None]] = {
            "trainer killed": self.kill_trainer,
            "horse killed": self.kill_horse,
            "train worker killed": lambda: self.restart("train", signal.SIGKILL),
            "train worker stopped": lambda: self.restart("train", signal.SIGTERM),
            "publish killed": lambda: self.restart("publish", signal.SIGKILL),
            "service killed": lambda: self.restart("service", signal.SIGKILL),
            "preparing workers killed": lambda: self.restart("check", signal.SIGKILL, "prepare"),
            "Redis killed": self.kill_redis,
            "Redis emptied": self.stack.redis.flush,
            "everything killed": self.kill_everything,
            "newest checkpoint damaged": self.damage,
            "Discord says 429 and 500": self.refuse,
            "Discord silent": lambda: self.silence(self.discord),
            "W&B silent": lambda: self.silence(self.wandb),
        }

    # -- the job ---------------------------------------------------------------------------------------------

    def job(self) -> dict[str, Any]:
        """The same every time; a checkpoint every 40 steps."""
        schedule = {"epochs": self.steps * BATCH // ROWS_TRAINED, "batch_size": BATCH, "learning_rate": 0.001}
        return tiny_job(
            schedule=schedule,
            log={"every_steps": 5},
            evaluate={"every_steps": 200, "samples": 1},
            checkpoint={"every_steps": 40, "keep": 2},
            max_restarts=100,
        )

    def submit(self) -> RunDir:
        """One more."""
        run = self.stack.submit(self.job())
        self.runs.append(run)
        return run

    def wait_for_end(self, run: RunDir) -> None:
        """Until it is over, one way or the other."""
        self.stack.wait_for(lambda: run.record().status.terminal or None, f"the end of {run.id}", LONGEST_S)

    # -- faults ----------------------------------------------------------------------------------------------

    def go_on(self, until: float) -> None:
        """Faults, and jobs enough that there is always one to train."""
        while time.monotonic() < until:
            if all(run.record().status.terminal for run in self.runs):
                self.submit()
            self.watch(self.chance.uniform(*EVERY_S))
            for name in self.chance.sample(sorted(self.kinds), self.chance.choice([1, 1, 1, 2])):
                print(f"{time.strftime('%H:%M:%S')} {name} (job {len(self.runs)}, {self.where()})", flush=True)
                self.kinds[name]()
                self.done[name] += 1

    def watch(self, seconds: float) -> None:
        """Let it run, and count the trainers of one job: a second one finds the job's lock taken, and leaves."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.most_trainers = max([self.most_trainers, *(len(trainers(run)) for run in self.runs[-2:])])
            time.sleep(0.25)

    def where(self) -> str:
        """Step of the job at hand."""
        record = self.runs[-1].record()
        rows = self.runs[-1].metrics()
        return f"{record.status.value}, step {rows[-1].step if rows else 0}"

    def pause(self) -> None:
        """Before something comes back."""
        self.watch(self.chance.uniform(0, BACK_AFTER_S))

    def restart(self, role: str, number: int, *more: str) -> None:
        """Signal roles and start them again."""
        for each in (role, *more):
            self.stack.stop(each, number)
        self.pause()
        self.stack.start(role, *more)

    def kill_trainer(self) -> None:
        """Whatever it is doing."""
        for run in self.runs[-1:]:
            for pid in trainers(run):
                kill(pid)

    def kill_horse(self) -> None:
        """The supervisors: children of the train worker."""
        worker = self.stack.processes["train"].pid
        for child in children(worker):
            kill(child)

    def kill_redis(self) -> None:
        """It comes back with what its log has."""
        self.stack.redis.stop()
        self.pause()
        self.stack.redis.start()

    def kill_everything(self) -> None:
        """As a power failure does."""
        for role in ROLES:
            self.stack.kill(role)
        self.stack.redis.stop()
        self.pause()
        self.stack.redis.start()
        self.stack.start(*ROLES)

    def damage(self) -> None:
        """One bit of the newest checkpoint, then the trainer, so that it is asked for."""
        folders = sorted(self.runs[-1].checkpoints.glob("step-*"))
        if folders:
            try:
                with open(folders[-1] / "model.safetensors", "r+b") as file:
                    file.seek(-100, os.SEEK_END)
                    byte = file.read(1)[0]
                    file.seek(-100, os.SEEK_END)
                    file.write(bytes([byte ^ 4]))
            except FileNotFoundError:  # pruned at this very moment
                return
        self.kill_trainer()

    def refuse(self) -> None:
        """The next answers of Discord."""
        self.discord.answer_next(429, retry_after=2.0)
        self.discord.answer_next(500)

    def silence(self, server: FakeDiscord | FakeWandb) -> None:
        """It takes calls and answers none."""
        server.hang()
        self.watch(self.chance.uniform(2, 8))
        server.release()

    # -- findings --------------------------------------------------------------------------------------------

    def findings(self, undisturbed: RunDir) -> dict[str, Any]:
        """What must hold, for each of the jobs."""
        weights, rows = digest(undisturbed), series(undisturbed)
        told = [title for title in self.discord.titles if title.endswith(": done")]
        return {
            "jobs": len(self.runs),
            "succeeded": sum(run.record().status.value == "succeeded" for run in self.runs),
            "weights_equal": sum(digest(run) == weights for run in self.runs),
            "metrics_equal": sum(series(run) == rows for run in self.runs),
            "events_gapless": sum(
                [event.number for event in run.events()] == list(range(1, len(run.events()) + 1)) for run in self.runs
            ),
            "discord_complete": min(len(told), len(self.runs)),
            "discord_repeats": len(told) - len(self.runs),
            "wandb_complete": sum(self.in_wandb(run) == {row[0] for row in series(run)} for run in self.runs),
            "attempts": sum(run.record().attempt for run in self.runs),
            "most_trainers_of_a_job": self.most_trainers,
            "trainers_left": sum(len(trainers(run)) for run in self.runs),
        }

    def in_wandb(self, run: RunDir) -> set[int]:
        """Steps that W&B has, or will have after `wandb sync` of what was written while it was silent."""
        online = self.wandb.runs.get(run.id)
        steps = {int(step) for step, _ in online.rows("train/step", "train/loss")} if online else set()
        return steps.union(*({step for step, _ in history(file, "train/loss")} for file in offline_files(run)))


def main(argv: list[str]) -> int:
    """Run, and print the JSON line."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as name, FakeDiscord() as discord, FakeWandb() as wandb:
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        data = make_data(Path(name))
        with Stack(Path(name) / "home", data=data, environment=told) as stack:
            soak = Soak(stack, discord, wandb, arguments.steps, arguments.seed)
            stack.start(*ROLES)
            undisturbed = soak.submit()
            begun = time.monotonic()
            soak.wait_for_end(undisturbed)
            print(f"undisturbed: {time.monotonic() - begun:.0f} s", flush=True)
            begun = time.monotonic()
            soak.go_on(begun + 60 * arguments.minutes)
            minutes = (time.monotonic() - begun) / 60
            for run in soak.runs:
                soak.wait_for_end(run)
            for run in soak.runs:
                for sink in ("discord", "wandb"):
                    stack.wait_for(lambda run=run, sink=sink: closed(run, sink) or None, f"{sink} of {run.id}", 180)
            found = soak.findings(undisturbed)
    jobs = found["jobs"]
    equal = ("succeeded", "weights_equal", "metrics_equal", "events_gapless", "discord_complete", "wandb_complete")
    ok = all(found[key] == jobs for key in equal)
    ok = ok and found["trainers_left"] == 0
    result = {
        "ok": ok,
        "faults": sum(soak.done.values()),
        "by_kind": dict(sorted(soak.done.items())),
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


def digest(run: RunDir) -> str:
    """Of the final weights; empty without any."""
    file = run.model / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def series(run: RunDir) -> list[tuple[int, float, float, float]]:
    """What must be equal bit for bit."""
    return [(row.step, row.loss, row.grad_norm, row.learning_rate) for row in run.metrics()]


def children(pid: int) -> list[int]:
    """Of all threads of a process; none if it is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def kill(pid: int) -> None:
    """-9, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
