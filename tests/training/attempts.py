"""Running training attempts in this process, and reading what they left."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file

from jobs.attempt import Finished, Noted, TrainResult
from jobs.disk.rundir import RunDir
from jobs.events import AnyFact
from jobs.metrics import MetricRow
from tests.support.samples import read_lines
from worker.training.journal import Journal, StopSignal
from worker.training.settings import TrainerSettings
from worker.training.train import train

Kind = TypeVar("Kind")


class StopAt(StopSignal):
    """Asks to stop at the `n`-th look (0: never). A look is one of: loaded, a step done, a batch evaluated."""

    def __init__(self, n: int = 0) -> None:
        super().__init__()
        self._looks, self._n = 0, n

    def asked(self) -> bool:
        self._looks += 1
        return 0 < self._n <= self._looks or super().asked()


def attempt(run: RunDir, number: int = 1, stop_at: int = 0) -> int:
    """One attempt, up to its exit code; StageErrors are raised."""
    settings = TrainerSettings(data=Path(), prepared=Path(), models=Path(), device="cpu", offline=True)
    return train(run, settings, Journal(run.attempt_file(number)), StopAt(stop_at), number)


def facts(run: RunDir, kind: type[Kind], number: int = 1) -> list[Kind]:
    """Facts of one kind that an attempt noted, in order."""
    found: list[AnyFact] = [line.fact for line in run.attempt_lines(number) if isinstance(line, Noted)]
    return [fact for fact in found if isinstance(fact, kind)]


def finished(run: RunDir, number: int = 1) -> Finished:
    """The last line of an attempt."""
    last = run.attempt_lines(number)[-1]
    assert isinstance(last, Finished)
    return last


def trained(run: RunDir, number: int = 1) -> TrainResult:
    """What came of an attempt that was done."""
    result = finished(run, number).result
    assert isinstance(result, TrainResult)
    return result


def logged(run: RunDir) -> list[tuple[int, float, float | None, float]]:
    """What must be equal bit for bit in two runs of the same job: step, loss, norm, learning rate of every line.

    None where nothing has been logged.
    """
    rows = read_lines(run.metrics_file, MetricRow) if run.metrics_file.exists() else []
    return [(row.step, row.loss, row.grad_norm, row.learning_rate) for row in rows]


def checkpoints(run: RunDir) -> list[str]:
    """Names in `checkpoints/`."""
    return sorted(path.name for path in run.checkpoints.iterdir())


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two safetensors files hold the same bits."""
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
