"""Trainers as processes of their own, forked from one that has imported what they import: that takes longer than they.

That process may not ask CUDA for anything, or none of its children could use it. So it sees no GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from jobs.disk.rundir import RunDir
from jobs.reasons import Reason
from tests.training.attempts import finished
from worker.training.__main__ import main, set_library_switches

WITHIN_S = 900.0
TURING: dict[str, Any] = {"SIMGPU_CC": "7.5", "SIMGPU_NAME": "Quadro RTX 6000", "SIMGPU_TOTAL_MIB": "24220"}
"""A GPU of compute capability 7.5, in the environment of a trainer."""
_WHILE_IMPORTING = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
"""torchao looks for a GPU when it is imported; numpy and scipy would start threads."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "tests.simulated_gpu.trainers", "worker.training.train", "worker.training.optimizers.adamw",
        "transformers.models.auto.tokenization_auto", "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.t5.modeling_t5",
    ]
)  # fmt: skip


class SimulatedTrainer:
    """`python -m worker.training train RUN --attempt NUMBER` on the GPU, with more in its environment."""

    def __init__(self, run: RunDir, number: int = 1, **environment: str) -> None:
        self._log = run.path / f"said-{number}.txt"
        words = ["train", str(run.path), "--attempt", str(number)]
        variables = os.environ | {"LONGHAUL_DEVICE": "cuda"} | environment
        self.process: ForkServerProcess = _FORKS.Process(target=_become, args=(words, variables, self._log))
        with mock.patch.dict(os.environ, _WHILE_IMPORTING):
            set_library_switches("train")
            self.process.start()

    def end(self) -> str:
        """Wait for it; returns its log."""
        self.process.join(WITHIN_S)
        assert self.process.exitcode is not None, self._log.read_text()
        return self._log.read_text()


@contextlib.contextmanager
def training(run: RunDir, number: int = 1, **environment: str) -> Iterator[SimulatedTrainer]:
    """A trainer that does not outlive this."""
    trainer = SimulatedTrainer(run, number, **environment)
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.join()


def train(run: RunDir, until: Reason = Reason.DONE, number: int = 1, **environment: str) -> str:
    """One attempt, which ends for that reason; returns its log."""
    with training(run, number, **environment) as trainer:
        log = trainer.end()
        assert trainer.process.exitcode == until.exit_code and finished(run, number).reason is until, log
    return log


def _become(words: list[str], environment: Mapping[str, str], log: Path) -> None:
    """In the child."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)
    if environment["LD_LIBRARY_PATH"] != os.environ["LD_LIBRARY_PATH"]:  # the loader has read it
        os.execve(sys.executable, [sys.executable, "-m", "worker.training", *words], environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(words))
