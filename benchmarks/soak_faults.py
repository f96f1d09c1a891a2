"""The faults of the soak, by kind."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable

import requests

from benchmarks.soak_jobs import Jobs
from jobs.reasons import Reason
from tests.e2e.fake_gpu import machine
from tests.fakes import FakeDiscord, FakeWandb
from tests.processes import children, phase, trainers
from tests.stack import ROLES

BACK_AFTER_S = 3.0
MOMENT_S = 60.0
"""For what a fault waits for: an evaluation, a trainer without GPU, the sight of damage."""


class Faults:
    """What is done to a stack and to its jobs, one kind after the other."""

    def __init__(self, jobs: Jobs, discord: FakeDiscord, wandb: FakeWandb, chance: random.Random) -> None:
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

    def draw(self, count: int) -> list[str]:
        """The next kinds: of a shuffled deck, and when it is used up of another."""
        if len(self.deck) < count:
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
