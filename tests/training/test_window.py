"""Rows of metrics and the time left, by a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.spec import parse_spec
from tests.support.machine import Clock
from tests.support.samples import metric_row
from tests.training.gpu_stand_in import UUID, library
from tests.training.stepping import step_result
from worker.training.gpu_speed import GpuSpeed
from worker.training.machine.nvml import open_gpu
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.machine.usage import Cache, MemoryUse
from worker.training.pace import STEPS, Durations, Pace
from worker.training.window import Meter, ProgressLog, Window, fragmentation, is_fragmented

STEP_S, EVALUATION_S, SAVE_S, WARM_UP_S = 2.0, 30.0, 100.0, 77.0


class SimulatedRun:
    """A run as train.py drives one: steps, then the row, then what is due. Its clock says how long all of it took."""

    def __init__(self, steps: int, *, validation_rows: int = 10, asides: Durations | None = None, **parts: Any) -> None:
        training = {"epochs": 1, "batch_size": 8}
        self.spec = parse_spec({"data": {"train": "rows.jsonl"}, "training": training, **parts})
        data = DataPlan(train="x", input="x", target="x", rows=steps * 8, validation_rows=validation_rows)
        self.plan = make_plan(self.spec, ModelPlan(source="x", parameters=1), data)
        assert self.plan.steps == steps
        self.validated = validation_rows > 0
        self.clock = Clock()
        self.pace = Pace(self.spec, self.plan, asides or Durations(), self.clock)
        self.foretold: dict[int, tuple[float, float]] = {}
        """Step → (the clock when it was done, seconds left as foretold then)."""

    def go(self, start: int = 0, stop: int | None = None, warm_up_s: float = 0.0) -> float:
        """Steps `start` + 1 to `stop`; the clock at the end of all that follows the last step."""
        last = self.plan.steps
        if start == 0 and self.validated:
            self._evaluate()
        self.pace.begin()
        saved_at = self.clock.now
        for step in range(start + 1, (stop or last) + 1):
            self.clock.now += STEP_S + (warm_up_s if step == start + 1 else 0.0)
            self.pace.step()
            self.foretold[step] = (self.clock.now, self.pace.left_s(step))
            evaluated = self.validated and step % self.spec.evaluation.every_steps == 0
            if evaluated or (self.validated and step == last):
                self._evaluate()
            wanted = self.spec.checkpoint
            due = wanted.every_steps is not None and step % wanted.every_steps == 0
            if wanted.every_minutes is not None and (evaluated or not self.validated):
                due = due or self.clock.now - saved_at >= 60 * wanted.every_minutes
            if due or step == last:
                self.clock.now += SAVE_S
                self.pace.saved(SAVE_S)
                saved_at = self.clock.now
        return self.clock.now

    def _evaluate(self) -> None:
        self.clock.now += EVALUATION_S
        self.pace.evaluated(EVALUATION_S)


@pytest.mark.parametrize(
    ("evaluate_every", "every_steps", "validation_rows"), [(50, 100, 10), (30, 70, 10), (50, 100, 0), (50, None, 10)]
)
def test_the_time_left_is_what_it_then_takes(
    evaluate_every: int, every_steps: int | None, validation_rows: int
) -> None:
    run = SimulatedRun(
        400,
        validation_rows=validation_rows,
        evaluation={"every_steps": evaluate_every},
        checkpoint={"every_steps": every_steps, "every_minutes": None, "best": None},
    )
    end = run.go(warm_up_s=WARM_UP_S)
    known = SAVE_S if every_steps else 0.0  # how long a checkpoint takes is known from the first one on
    for step in (every_steps + 1 if every_steps else 2, 150, 299, 399, 400):
        at, left = run.foretold[step]
        assert at + left == pytest.approx(end - SAVE_S + known), step
    at, left = run.foretold[2]
    saves = 1 if every_steps is None else 400 // every_steps + (400 % every_steps != 0)
    assert at + left == pytest.approx(end - saves * SAVE_S)


def test_checkpoints_by_the_minute_come_at_evaluations() -> None:
    saved = {"every_steps": None, "every_minutes": 10, "best": None}
    run = SimulatedRun(1000, evaluation={"every_steps": 50}, checkpoint=saved)
    end = run.go()
    # 50 steps and an evaluation take 130 s: one is due every 5 evaluations, so 4 in all, the last at the end.
    assert end - 1000 == EVALUATION_S * 21 + 1000 * STEP_S + SAVE_S * 4
    at, left = run.foretold[251]
    assert at + left == pytest.approx(end)
    bare = SimulatedRun(1000, validation_rows=0, checkpoint={"every_steps": None, "every_minutes": 10})
    end = bare.go()
    at, left = bare.foretold[500]
    assert at + left == pytest.approx(end)


def test_each_evaluation_may_be_the_best_and_be_saved() -> None:
    always, best = (
        SimulatedRun(400, evaluation={"every_steps": 50}, checkpoint={"every_minutes": None} | more)
        for more in ({"every_steps": 50, "best": None}, {"best": "loss"})
    )
    end = always.go()
    best.pace.saved(SAVE_S)
    best.go()
    (at, left), (_, foretold) = always.foretold[51], best.foretold[51]
    assert foretold == left == pytest.approx(end - at)


def test_a_resumed_run_still_knows_what_evaluations_and_checkpoints_cost() -> None:
    parts: dict[str, Any] = {"evaluation": {"every_steps": 50}, "checkpoint": {"every_steps": 100, "best": None}}
    first = SimulatedRun(400, **parts)
    first.go(stop=160)
    written = Window(asides=first.pace.asides).model_dump_json()
    second = SimulatedRun(400, asides=Window.model_validate_json(written).asides, **parts)
    end = second.go(start=100)
    at, left = second.foretold[102]
    assert at + left == pytest.approx(end)


def test_the_first_step_of_an_attempt_does_not_stand_for_the_others() -> None:
    run = SimulatedRun(100, validation_rows=0, checkpoint={"every_steps": None, "every_minutes": None})
    run.go(warm_up_s=WARM_UP_S)
    assert run.foretold[1][1] == 99 * (STEP_S + WARM_UP_S), "for want of anything better"
    assert run.foretold[2][1] == 98 * STEP_S


def test_the_pace_is_that_of_the_last_50_steps() -> None:
    run = SimulatedRun(1000, validation_rows=0)
    run.pace.begin()
    for seconds, count in ((9.0, 200), (1.0, STEPS)):
        for _ in range(count):
            run.clock.now += seconds
            assert run.pace.step() == seconds
    assert run.pace.left_s(250) == 750 * 1.0
    run.clock.now += 8 * 3600.0  # the container was paused
    assert run.pace.step() == 8 * 3600.0
    assert run.pace.left_s(251) == 749 * 1.0


# -- rows ----------------------------------------------------------------------------------------------------


def meter_of(run: SimulatedRun) -> Meter:
    return Meter(Cache(torch.device("cpu")), attempt=1, pace=run.pace, window=Window(asides=run.pace.asides))


def test_a_row_has_real_tokens_flops_and_the_share_of_the_gpus_peak() -> None:
    run = SimulatedRun(100)
    meter = meter_of(run)
    run.clock.now += EVALUATION_S
    run.pace.evaluated(EVALUATION_S)  # before the first step: no part of any
    run.pace.begin()
    rows = []
    for step in range(1, 5):
        run.clock.now += STEP_S
        meter.add(step_result(step))
        run.clock.now += SAVE_S
        run.pace.saved(SAVE_S)
        if step % 2 == 0:
            meter.peak = None if step == 2 else 10e12
            rows.append(meter.row(step_result(step), now=1.0))
    for row in rows:
        assert (row.step_s, row.rows_per_s, row.target_tokens_per_s) == (STEP_S, 4.0, 150.0)
        assert (row.tokens_per_s, row.model_flops_per_s) == (450.0, 2e12)
        assert row.padding_fraction == pytest.approx(0.1)
        assert row.data_wait_fraction == pytest.approx(0.05)
    assert [row.mfu for row in rows] == [None, 0.2]


def test_what_cannot_be_counted_is_null_and_not_zero() -> None:
    run = SimulatedRun(100)
    meter = meter_of(run)
    meter.peak = 10e12
    run.pace.begin()
    run.clock.now += STEP_S
    meter.add(step_result(1, flops=0.0))
    row = meter.row(step_result(1, flops=0.0), now=1.0)
    assert (row.model_flops_per_s, row.mfu) == (None, None)
    assert row.tokens_per_s == 450.0


# -- fragmentation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allocated", "reserved", "share", "clears"),
    [
        (60, 95, 35 / 95, True),
        (60, 89, 29 / 89, False),
        (75, 95, 20 / 95, False),
        (95, 95, 0.0, False),
        (0, 0, 0, False),
    ],
)
def test_a_budget_nearly_used_up_by_what_is_not_in_use_clears_the_cache(
    allocated: int, reserved: int, share: float, clears: bool
) -> None:
    run = SimulatedRun(100)
    meter = meter_of(run)
    run.pace.begin()
    meter.add(step_result(1))
    use = MemoryUse(allocated, reserved)
    row = meter.row(step_result(1), now=1.0).model_copy(
        update={"memory_reserved_bytes": reserved, "memory_fragmentation": fragmentation(use)}
    )
    assert row.memory_fragmentation == pytest.approx(share)
    assert is_fragmented(row, budget=100) is clears


def test_on_a_cpu_fragmentation_is_not_known_and_clears_nothing() -> None:
    run = SimulatedRun(100)
    meter = meter_of(run)
    run.pace.begin()
    meter.add(step_result(1))
    row = meter.row(step_result(1), now=1.0)
    assert row.memory_fragmentation is None
    assert not is_fragmented(row, budget=1)


def test_a_row_says_what_was_planned_what_others_hold_and_what_clearing_gave_back(tmp_path: Path) -> None:
    gpu = open_gpu(UUID, library(tmp_path))
    run = SimulatedRun(100)
    meter = Meter(
        Cache(torch.device("cpu")),
        attempt=1,
        pace=run.pace,
        window=Window(asides=run.pace.asides),
        planned_bytes=26 * 2**30,
        monitor=ProcessMonitor(gpu, torch.device("cpu")),
        speed=GpuSpeed(tmp_path, UUID, "a GPU", "580.95", parameters=8, compiled=True, recomputed=0.0),
    )
    run.pace.begin()
    meter.add(step_result(1))
    meter.cache.clear()
    meter.cache.freed = 12345
    row = meter.row(step_result(1), now=1.0)
    assert (row.memory_planned_bytes, row.gpu_memory_other_processes_bytes) == (26 * 2**30, int(29.5 * 2**30))
    assert (row.cache_clears, row.cache_freed_bytes) == (1, 12345)
    for step in range(2, 300):
        run.clock.now += STEP_S
        meter.add(step_result(step))
    assert not (tmp_path / ".gpus").exists(), "what the model reaches beside others is not kept"


def test_the_log_shows_progress_at_most_twice_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    progress = ProgressLog(clock)
    for step in range(10, 101, 10):
        progress.add(metric_row(step, eta_s=3600.0), 100)
        clock.now += 10
    assert [record.getMessage() for record in caplog.records] == [
        *(f"step {step} of 100: training loss 2.0000, 10 rows/s, 1 h left" for step in (10, 40, 70)),
        "step 100 of 100: training loss 2.0000, 10 rows/s",
    ]
