"""A job of random weights and random rows, prepared as far as training asks, for the trainer's own code to run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jobs.attempt import Phase
from jobs.dataset_report import DatasetSummary, LengthSummary, Percentiles, SideLengths
from jobs.disk.rundir import RunDir, create
from jobs.events import AnyFact, JobSubmitted
from jobs.memory_plan import MemoryPlan
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.spec import JobSpec
from jobs.trainer_facts import ModelLoaded
from worker.training.dataset.data import Writer
from worker.training.journal import Journal
from worker.training.steps.order import MULTIPLE
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

FIRST_TOKEN, END = 3, 1
Widths = tuple[int, int]
"""Of inputs and targets, in tokens."""


class ListeningJournal(Journal):
    """A journal that remembers what went into it."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.facts: list[AnyFact] = []
        self.phases: list[tuple[Phase, float]] = []
        """Each with when it began, by time.perf_counter()."""
        self.loaded_at = 0.0
        """When the model was ready to train, by the same clock."""

    def phase(self, phase: Phase, *, step: int | None = None) -> None:
        """See `Journal`."""
        self.phases.append((phase, time.perf_counter()))
        super().phase(phase, step=step)

    def note(self, fact: AnyFact) -> None:
        """See `Journal`."""
        self.facts.append(fact)
        if isinstance(fact, ModelLoaded):
            self.loaded_at = time.perf_counter()
        super().note(fact)


def make_run(
    runs: Path,
    spec: JobSpec,
    config: Mapping[str, Any],
    model: Path,
    memory: MemoryPlan,
    train: tuple[int, Widths],
    others: tuple[int, Widths],
    task: Task | None = None,
) -> RunDir:
    """A run directory that an attempt can begin in. `train` and `others` (its validation rows): how many, how long.

    `model` is the folder of the weights, which has `config` in it. `task` None: seq2seq.
    """
    task = task or Seq2Seq()
    prepared = runs / "prepared"
    prepared.mkdir(parents=True)
    counts = [train[0], others[0]]
    with Writer(prepared, config["vocab_size"]) as writer:
        draw = np.random.default_rng(0)
        for count, widths in (train, others):
            writer.add(*_rows(draw, count, widths, config["vocab_size"], apart=task.targets_apart))
        parts = {"train": np.arange(counts[0]), "validation": np.arange(counts[0], sum(counts))}
        writer.finish(parts, _summary(*counts))
    run, _ = create(runs, "doctor", spec, JobSubmitted(name="doctor", model=spec.model, spec_sha256=spec.sha256()))
    run.write_plan(
        make_plan(
            spec,
            ModelPlan(source=spec.model, folder=str(model), parameters=1),
            DataPlan(
                train=spec.data.train, input="", target="", prepared=str(prepared), rows=counts[0],
                validation_rows=counts[1], complete=True,
            ),
            memory.device,
            memory,
            task=task.name,
        )
    )  # fmt: skip
    return run


def _rows(
    draw: np.random.Generator, count: int, widths: Widths, vocabulary: int, *, apart: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Inputs, and targets: texts of their own, or the positions of all tokens of the input but the first."""
    inputs = _texts(draw, count, widths[0], vocabulary)
    return inputs, _texts(draw, count, widths[1], vocabulary) if apart else [[*range(1, len(row))] for row in inputs]


def _texts(draw: np.random.Generator, count: int, width: int, vocabulary: int) -> list[list[int]]:
    """Tokens of so many texts, all of this padded width, most of them a little shorter, as in a real batch."""
    lengths = width - draw.integers(0, MULTIPLE, count)
    return [[*draw.integers(FIRST_TOKEN, vocabulary, length - 1).tolist(), END] for length in lengths.tolist()]


def _summary(rows: int, others: int) -> DatasetSummary:
    """Of rows of which nobody asks."""
    nothing = Percentiles(p50=0, p90=0, p95=0, p99=0, max=0)
    side = LengthSummary(limit=0, before=nothing, after=nothing)
    return DatasetSummary(
        rows_read=rows + others, kept=rows + others, rejected={}, duplicates=0, train_rows=rows,
        validation_rows=others, validation_asked=0.0, validation_share=0.0, validation_inputs_in_training=0,
        truncated_inputs=0, truncated_targets=0, input_tokens=0, target_tokens=0, unknown_tokens=0,
        unknown_token_rate=0.0, unknown_characters={}, normalized={}, noticed={}, rewritten={},
        lengths=SideLengths(input=side, target=side),
    )  # fmt: skip
