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
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import requests

from benchmarks.command_line import parse
from benchmarks.sink_interference import make_data
from jobs.disk.rundir import RunDir
from jobs.reasons import Reason
from jobs.state import Status
from jobs.text.units import format_duration
from tests.e2e.fake_gpu import machine
from tests.sinks.driving import closed
from tests.sinks.wandb_runs import history, offline_files
from tests.support.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.support.processes import children, phase, trainers
from tests.support.stack import ROLES, Stack, tiny_job

KEYS = (
    "ok", "faults", "kinds", "by_kind", "found_wrong", "gpus_lost", "evaluations_stopped", "jobs", "succeeded",
    "weights_equal", "metrics_equal", "events_gapless", "discord_complete", "discord_repeats", "wandb_complete",
    "attempts", "most_trainers_of_a_job", "cancelled", "cancels", "trainers_left", "minutes", "seed", "steps",
)  # fmt: skip


def has_closed(run: RunDir, sink: str) -> bool | None:
    """None where the sink has not been told the end yet."""
    return closed(run, sink) or None


def go_on(jobs: Jobs, faults: Faults, until: float, every: list[float]) -> None:
    """Faults, and jobs enough that there is always one to train."""
    while time.monotonic() < until:
        if all(run.record().status.terminal for run in jobs.runs):
            jobs.submit()
        jobs.watch(faults.chance.uniform(*every))
        for name in faults.draw(faults.chance.choice([1, 1, 1, 2])):
            faults.do(name)


def main(argv: list[str]) -> int:
    """Run, and print the JSON line."""
    arguments = parsed(argv)
    with tempfile.TemporaryDirectory() as name, FakeDiscord() as discord, FakeWandb() as wandb:
        told = {"DISCORD_WEBHOOK": discord.url, "WANDB_API_KEY": WANDB_KEY, "WANDB_BASE_URL": wandb.url}
        data = make_data(Path(name))
        with Stack(Path(name) / "home", data=data, environment=told) as stack:
            jobs = Jobs(stack, arguments.steps)
            faults = Faults(jobs, discord, wandb, random.Random(arguments.seed), arguments.kinds)
            stack.start(*ROLES)
            begun = time.monotonic()
            jobs.wait_for_end(jobs.submit())
            print(f"undisturbed: {format_duration(time.monotonic() - begun)}", flush=True)
            begun = time.monotonic()
            go_on(jobs, faults, begun + 60 * arguments.minutes, arguments.every)
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


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Random faults, then checks.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="of the faults; their effects depend on the machine, too")
    parser.add_argument("--steps", type=int, default=600, help="of each job")
    parser.add_argument("--every", type=float, nargs=2, default=[5.0, 20.0], help="seconds from fault to fault")
    parser.add_argument("--kinds", nargs="+", help="only these faults")
    return parse(parser, argv, minutes=0.001, steps=16, every=[0.0, 0.1], kinds=["service killed"])


# -- jobs --------------------------------------------------------------------------------------------------------------


ROWS_TRAINED, BATCH = 64, 8
LONGEST_S = 600.0


class Jobs:
    """Those that are compared in the end, and those that a fault had cancelled."""

    def __init__(self, stack: Stack, steps: int) -> None:
        self.stack, self.steps = stack, steps
        self.runs: list[RunDir] = []
        self.cancelled: list[RunDir] = []
        self.most_trainers = 0

    def job(self) -> dict[str, Any]:
        """The same every time; a checkpoint every 40 steps."""
        training = {"epochs": self.steps * BATCH // ROWS_TRAINED, "batch_size": BATCH, "learning_rate": 0.001}
        return tiny_job(
            training=training,
            log={"every_steps": 5},
            evaluation={"every_steps": 100, "samples": 1},
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

        def over() -> bool | None:
            self.begin_again(run)
            return run.record().status.terminal or None

        self.stack.wait_for(over, f"the end of {run.id}", LONGEST_S)

    def begin_again(self, run: RunDir) -> None:
        """What a user without a backup asks for: else a job that has no valid checkpoint rests for ever."""
        if run.record().error is not None and run.record().status is Status.PAUSED:
            with contextlib.suppress(requests.ConnectionError, requests.Timeout):  # asked for again
                requests.post(f"{self.stack.url}/jobs/{run.id}/resume", json={"from_scratch": True}, timeout=10)

    def watch(self, seconds: float) -> None:
        """Let it run, and count the trainers of one job: a second one finds the job's lock taken, and leaves."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for run in self.runs[-2:]:
                self.begin_again(run)
            self.most_trainers = max([self.most_trainers, *(len(trainers(run)) for run in self.runs[-2:])])
            time.sleep(0.25)

    def where(self) -> str:
        """State and step of the job at hand."""
        return f"{self.runs[-1].record().status.value}, step {self.step()}"

    def step(self) -> int:
        """The newest of the job at hand that is in its metrics."""
        rows = self.runs[-1].metrics()
        return rows[-1].step if rows else 0

    def findings(self, discord: FakeDiscord, wandb: FakeWandb) -> dict[str, Any]:
        """What must hold, for each of the jobs. The first was not disturbed."""
        weights, rows = digest(self.runs[0]), series(self.runs[0])
        told = [title for title in discord.titles if title.endswith(": done")]
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
            "wandb_complete": sum(in_wandb(wandb, run) == {row[0] for row in series(run)} for run in self.runs),
            "attempts": sum(run.record().attempt for run in self.runs),
            "most_trainers_of_a_job": self.most_trainers,
            "cancelled": sum(run.record().status.value == "cancelled" for run in self.cancelled),
            "cancels": len(self.cancelled),
            "trainers_left": sum(len(trainers(run)) for run in self.runs),
        }


def in_wandb(wandb: FakeWandb, run: RunDir) -> set[int]:
    """Steps that W&B has, or will have after `wandb sync` of what was written while it was silent."""
    online = wandb.runs.get(run.id)
    steps = {int(step) for step, _ in online.rows("train/step", "train/loss")} if online else set()
    return steps.union(*({step for step, _ in history(file, "train/loss")} for file in offline_files(run)))


def digest(run: RunDir) -> str:
    """Of the final weights; empty without any."""
    file = run.model / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def series(run: RunDir) -> list[tuple[int, float, float | None, float]]:
    """What must be equal bit for bit."""
    return [(row.step, row.loss, row.grad_norm, row.learning_rate) for row in run.metrics()]


# -- faults ------------------------------------------------------------------------------------------------------------


BACK_AFTER_S = 3.0
MOMENT_S = 60.0
"""For what a fault waits for: an evaluation, a trainer without GPU, the sight of damage."""


class Faults:
    """What is done to a stack and to its jobs, one kind after the other."""

    def __init__(
        self, jobs: Jobs, discord: FakeDiscord, wandb: FakeWandb, chance: random.Random, only: list[str] | None
    ) -> None:
        """`only`: these kinds; None: all."""
        self.jobs, self.stack, self.discord, self.wandb, self.chance = jobs, jobs.stack, discord, wandb, chance
        self.done: Counter[str] = Counter()
        self.deck: list[str] = []
        self.gpus_lost = 0
        self.evaluations_stopped = 0
        self.found_wrong: list[str] = []
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
            "every checkpoint damaged": lambda: self.damage(every=True),
            "one directory damaged": self.damage_directory,
            "stores of data and models removed": self.remove_stores,
            "disk full during a cancel": self.cancel_on_a_full_disk,
            "stopped during an evaluation": self.stop_evaluation,
            "GPU lost and back": self.lose_gpu,
            "Discord says 429 and 500": self.refuse,
            "Discord silent": lambda: self.silence(self.discord),
            "W&B silent": lambda: self.silence(self.wandb),
        }
        if only is not None:
            self.kinds = {name: self.kinds[name] for name in only}

    def draw(self, count: int) -> list[str]:
        """The next kinds: of a shuffled deck, and when it is used up of another."""
        while len(self.deck) < count:
            self.deck = self.chance.sample(sorted(self.kinds), len(self.kinds)) + self.deck
        return [self.deck.pop() for _ in range(count)]

    def do(self, name: str) -> None:
        """One of them, until what it hit is back."""
        print(f"{time.strftime('%H:%M:%S')} {name} (job {len(self.jobs.runs)}, {self.jobs.where()})", flush=True)
        self.kinds[name]()
        self.done[name] += 1

    def pause(self) -> None:
        """Before something comes back."""
        self.jobs.watch(self.chance.uniform(0, BACK_AFTER_S))

    def restart(self, role: str, number: int, *more: str) -> None:
        """Signal roles and start them again."""
        for each in (role, *more):
            self.stack.stop(each, number)
        self.pause()
        self.stack.start(role, *more)

    def kill_trainer(self) -> None:
        """Whatever it is doing."""
        for run in self.jobs.runs[-1:]:
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

    def damage(self, *, every: bool = False) -> None:
        """One bit of the newest checkpoint, or of each, then the trainer, so that they are asked for."""
        folders = sorted(self.jobs.runs[-1].checkpoints.glob("step-*"))
        for folder in folders if every else folders[-1:]:
            try:
                with open(folder / "model.safetensors", "r+b") as file:
                    file.seek(-100, os.SEEK_END)
                    byte = file.read(1)[0]
                    file.seek(-100, os.SEEK_END)
                    file.write(bytes([byte ^ 4]))
            except FileNotFoundError:  # pruned at this very moment
                return
        self.kill_trainer()

    def damage_directory(self) -> None:
        """A line in the middle of the events of a job of its own: it is shown as damaged, and can be deleted."""
        run = self.stack.submit(self.jobs.job() | {"name": "damaged"})
        self.stack.wait_for_event(run, "job.prepared")
        with open(run.events_file, "r+b") as file:
            file.readline()
            file.seek(file.tell())
            file.write(b"#")
        url = f"{self.stack.url}/jobs/{run.id}"
        if not self.within(lambda: requests.get(url, timeout=10).json().get("status") == "damaged"):
            self.found_wrong.append(f"{run.id} is not shown as damaged: {requests.get(url, timeout=10).text[:300]}")
        if (answer := requests.delete(url, timeout=10)).status_code != 200:
            self.found_wrong.append(f"{run.id} cannot be deleted: {answer.text[:300]}")

    def remove_stores(self) -> None:
        """As `docker compose down --volumes` does, while a job trains."""
        if self.jobs.runs[-1].record().status.terminal:
            self.jobs.submit()
        self.within(lambda: self.jobs.step() > 0)
        roles = ("check", "prepare", "train")
        for role in roles:
            self.stack.stop(role)
        for store in ("prepared", "models"):
            shutil.rmtree(self.stack.home / store, ignore_errors=True)
        self.pause()
        self.stack.start(*roles)

    def cancel_on_a_full_disk(self) -> None:
        """The job at hand is cancelled; the service has no room to write that down, then it has."""
        if self.jobs.step() > self.jobs.steps / 2:  # it has ended, or may end before it is asked
            self.jobs.submit()
        run = self.jobs.runs.pop()
        self.jobs.cancelled.append(run)
        service = self.stack.processes["service"].pid
        unlimited = resource.prlimit(service, resource.RLIMIT_FSIZE)
        resource.prlimit(service, resource.RLIMIT_FSIZE, (run.events_file.stat().st_size + 10, unlimited[1]))
        try:
            answer = self.stack.post(run, "cancel")
        finally:
            resource.prlimit(service, resource.RLIMIT_FSIZE, unlimited)
        asked = any(event.type in ("job.cancel_requested", "job.cancelled") for event in run.events())
        if (answer.status_code, asked) not in ((200, True), (503, False)):
            self.found_wrong.append(f"cancel of {run.id}: {answer.status_code}, asked {asked}: {answer.text[:300]}")
        if (answer := self.stack.post(run, "cancel")).status_code not in (200, 409):  # 409: it has ended meanwhile
            self.found_wrong.append(f"cancel of {run.id} with room: {answer.text[:300]}")
        self.jobs.submit()

    def stop_evaluation(self) -> None:
        """The train worker, while its trainer evaluates."""
        self.evaluations_stopped += self.within(lambda: phase(self.jobs.runs[-1]) in ("evaluate", "generate"))
        self.restart("train", signal.SIGTERM)

    def lose_gpu(self) -> None:
        """A train worker finds a GPU, its trainer loses it, and the worker ends; the next has what it needs."""
        self.stack.stop("train")
        plain = self.stack.environment
        folder = self.stack.home / f"machine-{self.done['GPU lost and back']}"
        self.stack.environment = plain | machine(folder, plain["PATH"])[0]
        self.stack.start("train")
        worker = self.stack.processes.pop("train")
        self.stack.environment = plain
        if not self.within(lambda: worker.poll() is not None):  # there was nothing to train
            worker.terminate()
        self.gpus_lost += worker.wait(60) == Reason.GPU_LOST.exit_code
        for losses in self.stack.runs.glob(".locks/*.lost"):  # else it would be left alone for minutes
            losses.unlink()
        self.pause()
        self.stack.start("train")

    def within(self, condition: Callable[[], bool]) -> bool:
        """Whether it comes true in a while."""
        until = time.monotonic() + MOMENT_S
        while not (found := condition()) and time.monotonic() < until:
            time.sleep(0.02)
        return found

    def refuse(self) -> None:
        """The next answers of Discord."""
        self.discord.answer_next(429, retry_after=2.0)
        self.discord.answer_next(500)

    def silence(self, server: FakeDiscord | FakeWandb) -> None:
        """It takes calls and answers none."""
        server.hang()
        self.jobs.watch(self.chance.uniform(2, 8))
        server.release()


def kill(pid: int) -> None:
    """-9, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
