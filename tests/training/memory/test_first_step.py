"""What the first step of an attempt took, beside what was predicted: with figures in place of a card's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from jobs.events import MemoryMeasured
from jobs.memory_plan import GIB
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.rundir import RunDir
from tests.training.attempts import facts
from tests.training.conftest import tiny_model, tiny_spec
from tests.training.test_start import CONTEXT, OtherWays, planned
from tests.training.test_window import result
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.loop import steps
from worker.training.machine.usage import Cache
from worker.training.memory import first_step
from worker.training.memory.first_step import compared, corrected, foresee, tell
from worker.training.optimizers.adamw import AdamW
from worker.training.planning.prediction import Setting, Shape
from worker.training.steps.limits import Limit
from worker.training.steps.order import StepOrder


class Recorded(OtherWays):
    """Remembers what was asked; 17 GiB are static, a row takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[Shape, Setting]] = []

    def parts(self, shape: Shape, setting: Setting) -> dict[str, int]:
        """As in `planned`, but for the rows."""
        self.shapes.append((shape, setting))
        return {"weights": 5 * GIB, "gradients": 5 * GIB, "optimizer": 6 * GIB, "activations": shape.rows * GIB,
                "context": CONTEXT}  # fmt: skip


def test_what_does_not_grow_stays_and_the_rest_is_scaled() -> None:
    assert corrected(measured=30, predicted=30, worst=50, static=20) == 50
    assert corrected(measured=25, predicted=30, worst=50, static=20) == 35, "half of what was predicted beside 20"
    assert corrected(measured=32, predicted=30, worst=50, static=20) == 56, "more than predicted"
    assert corrected(measured=19, predicted=30, worst=50, static=20) == 20


def test_the_step_is_compared_with_the_prediction_for_its_own_largest_micro_batch() -> None:
    ways, memory = Recorded(), planned()
    event = compared(memory, 41, (4, 200, 128), 18 * GIB, ways)
    assert ways.shapes == [(Shape(4, 200, 128), Setting(0, "adamw_8bit"))]
    assert event == MemoryMeasured(
        step=41,
        measured_bytes=19 * GIB,  # with the context
        predicted_bytes=21 * GIB,
        peak_bytes=17 * GIB + 9 * GIB // 2,  # of 9 GiB that depend on the batch, half
        budget_bytes=31 * GIB,
    )


def test_the_step_that_comes_is_foreseen_before_it_begins(dataset: PreparedDataset, journal: Journal) -> None:
    spec, model = tiny_spec(), tiny_model()
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), DataPlan(train="x", input="x", target="x", rows=41))
    rows, schedule = dataset.train, spec.schedule
    order = StepOrder(rows, schedule.batch_size, schedule.epochs, schedule.seed)
    optimizer = AdamW(list(model.named_parameters()), weight_decay=0.0, max_grad_norm=1.0, fused=False)
    cache = Cache(torch.device("cpu"))
    for done in steps(
        model, optimizer, rows, order, spec, plan, after=0, micro_batch=4, pad_id=0, cache=cache, journal=journal
    ):
        ways, groups, limit = Recorded(), order.groups_of(done.step - 1), Limit.of(rows, 4)
        foresee(torch.device("cpu"), planned(), rows, groups, limit, ways)
        assert ways.shapes == []
        foresee(torch.device("cuda"), planned(), rows, groups, limit, ways)
        assert ways.shapes == [(Shape(*done.largest), Setting(0, "adamw_8bit"))]
    assert done.step == 21


def test_on_a_card_it_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    run, step = RunDir(tmp_path / "run"), dataclasses.replace(result(7), largest=(4, 200, 128))
    journal, card = Journal(run.attempt_file(1)), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 18 * GIB)
    tell(journal, card, None, step, Recorded())
    tell(journal, torch.device("cpu"), planned(), step, Recorded())
    assert facts(run, MemoryMeasured) == []
    tell(journal, card, planned(), step, Recorded())
    assert [(fact.step, fact.measured_bytes) for fact in facts(run, MemoryMeasured)] == [(7, 19 * GIB)]


def test_measuring_begins_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    first_step.begin(torch.device("cpu"))
    assert begun == []
    first_step.begin(torch.device("cuda"))
    assert begun == [torch.device("cuda")]
