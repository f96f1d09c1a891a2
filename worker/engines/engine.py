"""What Longhaul asks of an engine, such as Slurm: start one program with the GPUs it needs, and say how it goes.

A task is one attempt at one job. Its program is `python -m worker.engines.node` (`EngineTask.command`): it trains in a
run directory, which is all that the box and the node share (`worker/engines/process.py` is the other side). An engine
renders, submits, looks and cancels; retries, checkpoints, pause and order of jobs stay with the supervisor.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from jobs.process.secrets import minimal_environment
from jobs.text.units import format_duration, printable


class EngineError(Exception):
    """The engine did not do what it was asked to. The message has the engine's own words, for people."""


class EngineUnavailable(EngineError):
    """It did not answer, or cannot at the moment. Whether it did what it was asked to is not known."""


class EngineRefused(EngineError):
    """It answered, and did not do it: an unknown partition, a quota, more GPUs than a node has."""


@dataclass(frozen=True)
class EngineTask:
    """One attempt at one job, as an engine starts it. Paths are absolute, and the same on the node as on the box:
    plan.json and checkpoints name them."""

    job: str
    attempt: int
    name: str
    """Unique in the engine for good: `find` looks for it. Lower-case letters, digits and `-`, at most 63 characters."""
    command: tuple[str, ...]
    """The program and its arguments. It needs no shell, no standard input and no network."""
    environment: Mapping[str, str]
    """All that it needs beside what the node itself sets (PATH, CUDA_VISIBLE_DEVICES). No secret is in it."""
    gpus: int
    """GPUs, all on one node; 0: it trains on the CPU."""
    run: Path
    """The run directory."""
    directory: Path
    """Where the program starts: a clone of Longhaul, from which `worker` can be imported."""
    stores: tuple[Path, ...]
    """The folders of the prepared model and data. To a node without the box's disks they are copied."""


class TaskStatus(StrEnum):
    """How a task is. The last five are ends: once an engine says so, nothing of the task runs any more."""

    QUEUED = "queued"
    """It does not run: it waits for its turn, its node starts, or it is suspended."""
    RUNNING = "running"
    """It runs, or is just ending."""
    ENDED = "ended"
    """The program has ended by itself, with exit code 0."""
    FAILED = "failed"
    """The program has ended with another code, or could not be started."""
    OUT_OF_MEMORY = "out_of_memory"
    """The host's memory ran out, or the task took more of it than it may."""
    PREEMPTED = "preempted"
    """The engine ended it, and it did nothing wrong: preemption, a lost node, the time limit, a cancel by somebody."""
    GONE = "gone"
    """The engine does not know the task (any more)."""

    @property
    def over(self) -> bool:
        """Whether it is an end."""
        return self not in (TaskStatus.QUEUED, TaskStatus.RUNNING)


@dataclass(frozen=True)
class TaskState:
    """What an engine says of a task."""

    status: TaskStatus
    message: str = ""
    """In the engine's own words, such as `PENDING (Resources)`. One line, for people."""


class Storage(Protocol):
    """How the run directory comes to a node that does not share the box's disks, and back.

    All calls copy what has changed since the last one. They are made by one thread, and raise EngineUnavailable; the
    next call then copies what is missing. `push` and `pull` may be called as often as one likes.
    """

    # fmt: off
    def push(self, run: Path) -> None:
        """What this side has written goes to the other side."""
    def pull(self, run: Path) -> bool:
        """What the other side has written comes here. Returns whether all of it is here that can be had. Raises
        EngineRefused, too: of what the other side has left, something cannot be had."""
    def finish(self, run: Path) -> None:
        """As `push`, and when it returns, all of it is there."""
    # fmt: on


class SharedStorage:
    """The node has the same disks, so that there is nothing to copy."""

    def push(self, run: Path) -> None:
        """It is there."""

    def pull(self, run: Path) -> bool:
        """It is here."""
        return True

    def finish(self, run: Path) -> None:
        """It is there."""


class Engine(Protocol):
    """An engine, by the options of its section in LONGHAUL_ENGINES. Each call is bounded in time by the engine.

    All calls raise EngineUnavailable when the engine does not answer; `submit` raises EngineRefused, too.
    """

    storage: Storage
    """Of the box's side."""

    # fmt: off
    def render(self, task: EngineTask) -> str:
        """What `submit` hands to the engine: a script or a manifest. The same text for the same task."""
    def submit(self, task: EngineTask) -> str:
        """Hand the task over. Returns the engine's id of it."""
    def find(self, name: str) -> str | None:
        """The id of the task of this name; None: the engine has none. For one whose id was lost in a crash."""
    def state(self, task: str) -> TaskState:
        """How the task with this id is."""
    def logs(self, task: str) -> str:
        """The last lines that the engine has of the task's own output, for people; empty where it has none."""
    def cancel(self, task: str) -> None:
        """End the task soon. One that has ended, or is unknown, is no error. `state` says when it has ended."""
    # fmt: on


# -- commands ----------------------------------------------------------------------------------------------------------
# Programs of an engine, such as `sbatch`: run with a time limit, their own words in the error.

LIMIT_S = 60.0
_OVERRIDES = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SLURM_")
"""Variables that change what Slurm's programs do and say, also against the script, such as SBATCH_EXPORT."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Those by which they find the cluster, and may use it."""


class NoProgram(EngineUnavailable):
    """There is no such program in the PATH."""


def run(command: Sequence[str], given: str = "", *, limit_s: float = LIMIT_S, any_code: bool = False) -> str:
    """What the command prints. `given`: its standard input. Raises EngineRefused if it ends with an error (`any_code`:
    it may), and EngineUnavailable if it is not there or does not end within `limit_s`.
    """
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace",
            env={
                name: value for name, value in minimal_environment(os.environ, ()).items()
                if name in _KEPT or not name.startswith(_OVERRIDES)
            },
        )  # fmt: skip
    except FileNotFoundError:
        raise NoProgram(f"{command[0]} is not in the PATH") from None
    except OSError as error:
        raise EngineUnavailable(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EngineUnavailable(f"{command[0]} did not end within {format_duration(limit_s)}") from None
    if done.returncode and not any_code:
        words = " ".join((done.stderr.strip() or done.stdout.strip()).split())[:300]
        raise EngineRefused(printable(f"{command[0]} ended with code {done.returncode}: {words}"))
    return done.stdout


def ask(command: Sequence[str]) -> str:
    """As `run`, where the engine has nothing to refuse: an error is an outage. Raises EngineUnavailable."""
    try:
        return run(command)
    except EngineRefused as error:
        raise EngineUnavailable(str(error)) from None
