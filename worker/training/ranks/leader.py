"""Rank 0: it starts a process for every other rank, tells them what to do, and knows why one is gone.

They are its children (`worker/training/follow.py`) rather than torchrun's, which would hide what a rank ended with and
give each 30 s to end. It writes what they are to do to their stdin, a line of JSON each, and ends them by closing it.
What a follower has to say of its own end it writes to `attempts/<n>-rank-<r>.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore

from jobs.attempt import Finished, parse_line
from jobs.disk.rundir import RunDir
from jobs.errors import HostOutOfMemory, RankLost, RankSilent, StageError
from jobs.plan import Plan
from jobs.process.lifeline import PARENT_PID
from jobs.text.units import format_duration
from worker.training.journal import Journal
from worker.training.machine.host import ended_for_memory, oom_kills
from worker.training.ranks.group import SILENT_S, RankGroup, join, leave, share_cores
from worker.training.ranks.ranks import Failure, Vote
from worker.training.tasks.task import Limit

JOIN = "join"
"""Key in the store of an attempt: rank 0 is ready."""
LOOK_S = 1.0
END_S = 10.0
"""A rank that was told to end is killed after so long."""
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class RankProcess:
    """The process of another rank."""

    rank: int
    device: str
    """For people."""
    process: subprocess.Popen[str]
    file: Path
    """What it writes of itself."""
    oom_kills: int | None
    """Before it was started."""

    def tell(self, what: Mapping[str, object]) -> None:
        """Say what to do. One that has ended does not hear it; the next vote finds out."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def why_ended(self, wait_s: float = 0.0) -> StageError | None:
        """None: it runs."""
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        if code == -signal.SIGKILL and ended_for_memory(self.oom_kills):
            return HostOutOfMemory(f"the kernel ended rank {self.rank} ({self.device}), for the host's memory ran out")
        end = last_line(self.file)
        if end is not None and end.error is not None:
            kinds = {kind.reason: kind for kind in StageError.__subclasses__()}
            kind, fault = kinds.get(end.reason, partial(StageError, reason=end.reason)), end.error
            return kind(f"rank {self.rank} ({self.device}): {fault.message}", code=fault.code, hint=fault.hint)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RankLost(f"rank {self.rank} ({self.device}) {how}; what it wrote is in the trainer's log")


class Leader:
    """`Ranks` with others. Make it before the model is loaded: they load theirs meanwhile."""

    def __init__(self, run: RunDir, attempt: int, plan: Plan, devices: Sequence[str], journal: Journal) -> None:
        """`devices`: of every rank, this one first: as CUDA_VISIBLE_DEVICES names a GPU; empty: the CPU."""
        self.count = len(devices)
        share_cores(torch.device("cuda" if devices[0] else "cpu"), self.count)
        self._journal, self._silent_s = journal, SILENT_S
        journal.fence()
        for left in run.path.glob("ranks-*"):  # by an attempt that was killed
            shutil.rmtree(left)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=run.path))
        file = os.fspath(self._folder / "store")
        self._store = FileStore(file, self.count)
        self._followers = [start(run, attempt, rank, devices[rank]) for rank in range(1, self.count)]
        self._group: RankGroup | None = None
        told = {
            "count": self.count,
            "store": file,
            "silent_s": self._silent_s,
            "plan": plan.model_dump(mode="json"),
        }
        for follower in self._followers:
            follower.tell(told)

    def join(self, trained: Sequence[nn.Parameter], state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """See `Ranks`."""
        self._wait_for_all()
        self._store.set(JOIN, "yes")
        try:
            join(self._store, 0, self.count, device)
        except RuntimeError as error:
            raise self._why_lost(str(error)[:300]) from error
        self._group = RankGroup(trained, self._silent_s, self._why_lost)
        agree(self._group, state)
        log.info("%d ranks train together: %s", self.count, ", ".join(each.device for each in self._followers))

    @property
    def group(self) -> RankGroup:
        """Once they have joined."""
        assert self._group is not None, "they join before the first step"
        return self._group

    def begin(self, step: int, learning_rate: float, limit: Limit) -> None:
        """See `Ranks`."""
        safe = {bucket: asdict(known) for bucket, known in limit.safe.items()}
        self._tell(do="pass", step=step, learning_rate=learning_rate, micro_batch=limit.micro_batch, safe=safe)

    def vote(self, own: Failure | None, target_tokens: int, pass_s: float) -> Vote:
        """See `Ranks`."""
        return self.group.vote(own, target_tokens, pass_s)

    def add_up(self, loss: torch.Tensor | None) -> torch.Tensor:
        """See `Ranks`."""
        return self.group.add_up(loss)

    def check_equal(self) -> None:
        """See `Ranks`."""
        self._tell(do="check")
        self.group.check_equal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Every other rank ends: by itself, or at once after an error, in which it may be waiting for this one."""
        for follower in self._followers:
            assert follower.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                follower.process.stdin.close()
        until = time.monotonic() + (END_S if kind is None else 0.0)
        for follower in self._followers:
            try:
                follower.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                follower.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # one in a driver that hangs ends when that does
                    follower.process.wait(END_S)
        leave(at_once=kind is not None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_all(self) -> None:
        """Until every other rank has loaded its model. Raises what ended one."""
        said = [f"ready {follower.rank}" for follower in self._followers]
        while not self._store.check(said):
            with contextlib.suppress(RuntimeError):
                self._store.wait(said, timedelta(seconds=LOOK_S))
            self._raise_if_ended()
            self._journal.progress()
        self._raise_if_ended()

    def _tell(self, **what: object) -> None:
        for follower in self._followers:
            follower.tell(what)

    def _raise_if_ended(self) -> None:
        for follower in self._followers:
            if (why := follower.why_ended()) is not None:
                raise why

    def _why_lost(self, failure: str) -> StageError:
        """Called when a collective call has failed: a rank has ended, or was waited for in vain, or it is another."""
        until = time.monotonic() + LOOK_S
        for follower in self._followers:
            if (why := follower.why_ended(max(0.0, until - time.monotonic()))) is not None:
                return why
        if _TIMED_OUT.search(failure) is None:
            return RankLost(f"the ranks of this attempt cannot exchange data: {failure}")
        return RankSilent(
            f"one rank did not answer in time (at least {format_duration(self._silent_s)}): it hangs, or was stopped",
            code="rank_silent",
            hint="look at the GPUs (`nvidia-smi`, `journalctl -k | grep Xid`); the job tries again by itself, a "
            "limited number of times",
        )


def agree(group: RankGroup, state: Mapping[str, torch.Tensor]) -> None:
    """Let every rank begin with the weights and states of rank 0. `state`: of this rank, as `Trainable.state`."""
    group.share_state(state)
    group.check_equal()


def start(run: RunDir, attempt: int, rank: int, device: str) -> RankProcess:
    """Start the process of a rank. From the main thread only: it is killed when that ends."""
    file = run.attempt_file(f"{attempt}-rank-{rank}")
    file.unlink(missing_ok=True)
    kills = oom_kills()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "worker.training",
            "follow",
            os.fspath(run.path),
            "--attempt",
            str(attempt),
            "--rank",
            str(rank),
        ],
        stdin=subprocess.PIPE,
        env={**os.environ, PARENT_PID: str(os.getpid()), **({"CUDA_VISIBLE_DEVICES": device} if device else {})},
        text=True,
    )
    return RankProcess(rank, f"GPU {device}" if device else "CPU", process, file, kills)


def last_line(file: Path) -> Finished | None:
    """Why the process that wrote this attempt file has ended, as far as it could say it."""
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    last = parse_line(lines[-1], file) if lines else None
    return last if isinstance(last, Finished) else None
