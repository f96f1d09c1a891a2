"""One thing that the trainer of attempt 1 writes.

Of `during` and `stale`, another attempt begins after the first tensor of a checkpoint is written; of `stale` that one
is saving the same step when the first learns that its file is gone.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from functools import partial

import torch

from jobs.disk.files import LineWriter
from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted, JobQueued
from jobs.reasons import Reason
from jobs.spec import CheckpointSpec
from tests.support.samples import metric_row
from worker.training.checkpoints.checkpoint import OPTIMIZER, WEIGHTS, TrainState
from worker.training.checkpoints.saving import write
from worker.training.checkpoints.tensorfile import WriteProgress
from worker.training.journal import Journal, end_if_over


class AnotherBox:
    """Told of progress, it takes the job over, once."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def progress(self) -> None:
        """See `WriteProgress`."""
        if self._run.record().attempt == 1:
            take_over(self._run)


class Nobody:
    """Takes nothing over."""

    def progress(self) -> None:
        """See `WriteProgress`."""


class KilledMidway(BaseException):
    """A process at its first tensor."""

    def progress(self) -> None:
        """See `WriteProgress`."""
        raise self


class Stale:
    """Another box takes the job over, and saves the same step; then the server does not know the file any more."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def progress(self) -> None:
        """See `WriteProgress`."""
        take_over(self._run)
        with contextlib.suppress(KilledMidway):
            save(self._run, KilledMidway(), partial(end_if_over, self._run, 2))
        raise OSError(errno.ESTALE, "Stale file handle")


def save(run: RunDir, progress: WriteProgress, fence: Callable[[], None]) -> None:
    """A checkpoint of step 1."""
    tensors = {file: {"a": torch.ones(2), "b": torch.ones(2)} for file in (WEIGHTS, OPTIMIZER)}
    write(run, TrainState(spec_sha256="s", micro_batch=1, step=1), tensors, CheckpointSpec(), progress, fence)


def take_over(run: RunDir) -> None:
    """What reconcile and the supervisor of another box write."""
    run.append([AttemptEnded(reason=Reason.WORKER_LOST), JobQueued()])
    run.append([AttemptStarted(worker="train-other", device="cpu")])


def main(what: str, run: RunDir) -> None:
    """Write it."""
    fence = partial(end_if_over, run, 1)
    match what:
        case "heartbeat":
            Journal(run.attempt_file(1), fence=fence).phase("step", step=1)
        case "metrics":
            LineWriter(run.metrics_file, fence).write(metric_row(1))
        case _:
            others: dict[str, WriteProgress] = {"during": AnotherBox(run), "stale": Stale(run)}
            save(run, others.get(what, Nobody()), fence)
