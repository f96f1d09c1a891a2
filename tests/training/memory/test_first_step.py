"""What the first step of an attempt took, beside what was predicted: with figures in place of a GPU's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from jobs.disk.rundir import RunDir
from jobs.text.units import GIB
from jobs.trainer_facts import MemoryMeasured
from tests.training.attempts import facts
from tests.training.conftest import tiny_model, tiny_spec
from tests.training.contexts import as_loaded, training_context
from tests.training.planned import CONTEXT, FakeAlternatives, planned
from tests.training.stepping import Noting, step_result
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.loop import steps
from worker.training.memory import first_step
from worker.training.memory.first_step import compare, correct, predict, report
from worker.training.optimizers.adamw import AdamW
from worker.training.planning.ladder import Setting
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.seq2seq.batches import PairLimit


class Recorded(FakeAlternatives):
    """Remembers what was asked; 17 GiB are static, a row takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[MicroBatchShape, Setting]] = []

    def parts(self, shape: MicroBatchShape, setting: Setting) -> dict[str, int]:
        """As in `planned`, but for the rows."""
        self.shapes.append((shape, setting))
        return {"weights": 5 * GIB, "gradients": 5 * GIB, "optimizer": 6 * GIB, "activations": shape.rows * GIB,
                "context": CONTEXT}  # fmt: skip


def test_what_does_not_grow_stays_and_the_rest_is_scaled() -> None:
    assert correct(measured=30, predicted=30, worst=50, static=20) == 50
    assert correct(measured=25, predicted=30, worst=50, static=20) == 35, "half of what was predicted beside 20"
    assert correct(measured=32, predicted=30, worst=50, static=20) == 56, "more than predicted"
    assert correct(measured=19, predicted=30, worst=50, static=20) == 20


def test_the_step_is_compared_with_the_prediction_for_its_own_largest_micro_batch() -> None:
    alternatives, memory = Recorded(), planned()
    event = compare(memory, 41, MicroBatchShape(4, 200, 128), 18 * GIB, alternatives)
    assert alternatives.shapes == [(MicroBatchShape(4, 200, 128), Setting(0, "adamw_8bit"))]
    assert event == MemoryMeasured(
        step=41,
        measured_bytes=19 * GIB,  # with the context
        predicted_bytes=21 * GIB,
        peak_bytes=17 * GIB + 9 * GIB // 2,  # of 9 GiB that depend on the batch, half
        budget_bytes=31 * GIB,
    )


def test_the_step_that_comes_is_foreseen_before_it_begins(dataset: PreparedDataset, noting: Noting) -> None:
    spec, model = tiny_spec(), tiny_model()
    optimizer = AdamW(list(model.named_parameters()), weight_decay=0.0, max_grad_norm=1.0, fused=False)
    context = training_context(noting.folder, as_loaded(model, spec), dataset, spec, optimizer, noting)
    rows = dataset.train
    for done in steps(context):
        alternatives, groups, limit = Recorded(), context.order.groups_of(done.step - 1), PairLimit.of(rows, 4)
        predict(torch.device("cpu"), planned(), rows, groups, limit, alternatives)
        assert alternatives.shapes == []
        predict(torch.device("cuda"), planned(), rows, groups, limit, alternatives)
        assert alternatives.shapes == [(done.largest, Setting(0, "adamw_8bit"))]
    assert done.step == 21


def test_on_a_gpu_it_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    run, step = RunDir(tmp_path / "run"), dataclasses.replace(step_result(7), largest=MicroBatchShape(4, 200, 128))
    journal, gpu = Journal(run.attempt_file(1)), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 18 * GIB)
    report(journal, gpu, None, step, Recorded())
    report(journal, torch.device("cpu"), planned(), step, Recorded())
    assert facts(run, MemoryMeasured) == []
    report(journal, gpu, planned(), step, Recorded())
    assert [(fact.step, fact.measured_bytes) for fact in facts(run, MemoryMeasured)] == [(7, 19 * GIB)]


def test_measuring_begins_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    first_step.begin(torch.device("cpu"))
    assert begun == []
    first_step.begin(torch.device("cuda"))
    assert begun == [torch.device("cuda")]
