"""The jobs of the soak: one after the other, the same each time, and how each has to end."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import Any

import requests

from jobs.disk.rundir import RunDir
from jobs.state import Status
from tests.fakes import FakeDiscord, FakeWandb
from tests.processes import trainers
from tests.sinks.wandb_runs import history, offline_files
from tests.stack import Stack, tiny_job

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
