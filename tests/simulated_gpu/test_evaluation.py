"""Evaluations with torch's CUDA build: memory that runs out while texts are written, and jobs that only evaluate.

A GPU that computes nothing never says that a text has ended: here each does after so many tokens.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from jobs.disk.rundir import RunDir
from jobs.gpus import GpuFacts
from jobs.reasons import Reason
from jobs.text.units import GIB, MIB
from jobs.trainer_facts import DeviceWaiting, EvaluationFinished, OomRecovered
from tests.training.attempts import facts, finished
from tests.training.conftest import MakeRun, write_model
from tests.training.workplace import Workplace, pairs
from worker.training.journal import Journal, StopSignal
from worker.training.settings import TrainerSettings
from worker.training.train import train

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
TOKENS = 600
"""Of each text."""
GPU = GpuFacts("NVIDIA GeForce RTX 5090", 32_113 * MIB)
JOB: dict[str, Any] = {
    "evaluation": {"every_steps": 1000, "samples": 4, "max_rows": 4},
    "training": {"epochs": 1},
    "speed": {"compile": False},
}


class GenerateCalls:
    """How many rows each `generate` was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.written = 0
        self.neighbour: NeighbourWhileWriting | None = None


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    """What torch has kept of the tests before would be had beside a limit."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> GenerateCalls:
    """What was asked for."""
    found, real = GenerateCalls(), GenerationMixin.generate

    def generate(model: Any, **options: Any) -> Any:
        if found.neighbour is not None and not found.rows:
            found.neighbour.take()
        found.rows.append(len(options["input_ids"]))
        found.written = 0
        return real(model, **options)

    def unfinished(*_: object, **__: object) -> bool:
        found.written += 1
        return found.written <= TOKENS

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.setattr(GenerationMixin, "_has_unfinished_sequences", unfinished)
    return found


@pytest.fixture
def wide(model_folder: Path) -> None:
    """A model whose memory is what it has written so far: 128 KiB a token in each cache."""
    write_model(model_folder, d_kv=16384)


class NeighbourWhileWriting(StopSignal):
    """Takes all that is free of the GPU when the first text is written, and gives it back at the third look."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0
        self._simgpu: Any = importlib.import_module("simgpu")

    def take(self) -> None:
        """All."""
        self._simgpu.foreign(self._simgpu.room())
        self._looks = 1

    def asked(self) -> bool:
        if self._looks:
            self._looks += 1
            if self._looks == 4:
                self._simgpu.foreign(0)
        return super().asked()


def attempt(run: RunDir, stop: StopSignal) -> None:
    """One in this process, which completes."""
    settings = TrainerSettings(data=Path(), prepared=Path(), models=Path(), device="cuda", offline=True)
    train(run, settings, Journal(run.attempt_file(1)), stop, 1)
    assert finished(run).reason is Reason.DONE


def test_memory_that_runs_out_while_texts_are_written_makes_them_be_written_in_smaller_batches(
    make_run: MakeRun, wide: None, texts: GenerateCalls
) -> None:
    kept = torch.cuda.memory_allocated() / GIB  # by libraries, since the tests before
    # Two texts fit from 1.22 to 1.45 GiB.
    run = make_run(memory={"budget": 1.34 + kept}, **JOB)
    attempt(run, StopSignal())
    assert texts.rows[:3] == [4, 2, 2], "the first evaluation begins again with the half"
    assert [len(seen.samples) for seen in facts(run, EvaluationFinished)] == [4, 4]
    assert facts(run, OomRecovered) == [], "training does not hear of it"


def test_others_that_take_the_gpu_while_texts_are_written_are_waited_for(
    make_run: MakeRun, wide: None, texts: GenerateCalls
) -> None:
    run = make_run(memory={"budget": 8}, **JOB)
    texts.neighbour = neighbour = NeighbourWhileWriting()
    attempt(run, neighbour)
    [waiting] = facts(run, DeviceWaiting)
    assert "others hold 31.4 GiB by python3 (pid 4711)" in waiting.message
    assert texts.rows == [4, 4, 4], "as before, and then those of the second evaluation"


@pytest.mark.parametrize("model", ["builtin:t5-tiny", "builtin:qwen-tiny"])
def test_a_job_that_only_evaluates_writes_texts_within_its_plan(
    tmp_path: Path, texts: GenerateCalls, model: str
) -> None:
    torch.cuda.reset_peak_memory_stats()
    workplace = Workplace(tmp_path)
    workplace.settings = dataclasses.replace(workplace.settings, device="cuda", gpu=GPU)
    workplace.rows("rows.jsonl", pairs(40))
    run = workplace.job(kind="evaluate", model=model, evaluation={"samples": 2}, memory={"budget": 2})
    workplace.prepare(run)
    attempt(run, StopSignal())
    memory, [measured] = run.plan().memory, facts(run, EvaluationFinished)
    assert memory is not None and memory.evaluation
    assert torch.cuda.max_memory_allocated() + memory.parts["context"] <= memory.peak_bytes
    assert (texts.rows, measured.rows, len(measured.samples)) == ([20, 20], 40, 2)
