"""What is done about memory that ran out, cause by cause, seen from the steps of a real loop.

The GPU is a stand-in: it refuses a micro-batch of more rows than its bucket is allowed, in the words of torch.
"""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.errors import OutOfMemory
from jobs.memory_plan import Candidate, MemoryPlan
from jobs.text.units import GIB
from jobs.trainer_facts import GpuProcess, OomRecovered
from tests.support.samples import dataset_summary
from tests.training.attempts import attempt, facts
from tests.training.conftest import MakeRun, tiny_model, tiny_spec
from tests.training.contexts import as_loaded, plan_of, training_context
from tests.training.stepping import Noting, farthest, optimizer_for, weights
from worker.training import loop
from worker.training.checkpoints import checkpoint
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.dataset.data import PreparedDataset, Writer
from worker.training.machine import out_of_memory
from worker.training.machine.out_of_memory import Figures, MemoryShortage
from worker.training.machine.process_monitor import OtherProcessesUse
from worker.training.machine.usage import Cache
from worker.training.memory import recovery
from worker.training.memory.recovery import MOST_FOLDERS, OomReports
from worker.training.steps.order import StepOrder
from worker.training.steps.result import StepResult
from worker.training.steps.shape import SafeSize
from worker.training.tasks.seq2seq.batches import PairBatch, PairLimit

SHORT, LONG = "input ≤ 64, target ≤ 64", "input ≤ 128, target ≤ 64"
ROWS, BATCH, EPOCHS = 24, 8, 3
PYTHON = OtherProcessesUse(6 * GIB, (GpuProcess(pid=4711, name="python3", memory_bytes=6 * GIB),))


class FakeGpu:
    """Refuses micro-batches of more rows than `allowed` for their bucket."""

    def __init__(self) -> None:
        self.allowed: dict[str, int] = {}
        self.seen: list[tuple[str, int]] = []
        """Bucket and rows of each micro-batch that came, refused or not."""
        self.refused = 0
        """Which of them is refused besides, from 1."""

    def look(self, batch: PairBatch) -> None:
        bucket = batch.shape.bucket
        self.seen.append((bucket, len(batch.rows)))
        if len(batch.rows) > self.allowed.get(bucket, ROWS) or len(self.seen) == self.refused:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Others:
    """MemoryProbe that hold so much, and leave, or not, when they are waited for."""

    def __init__(self, gpu: FakeGpu, *, leave: bool) -> None:
        self.gpu, self.leave = gpu, leave
        self.waits: list[int] = []

    def use(self) -> OtherProcessesUse:
        return PYTHON

    def wait(self, needed: int, journal: Any, stop: Any) -> bool:
        self.waits.append(needed)
        if self.leave:
            self.gpu.allowed.clear()
        return self.leave


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found, real = FakeGpu(), PairBatch.loss_sum

    def looked_at(batch: PairBatch, model: Any) -> torch.Tensor:
        found.look(batch)
        return real(batch, model)

    monkeypatch.setattr(PairBatch, "loss_sum", looked_at)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> PreparedDataset:
    """Every other row has 100 tokens of input, the others 20; all targets have 20."""
    draw = np.random.default_rng(2)
    folder = tmp_path / "rows"
    folder.mkdir()
    with Writer(folder, 64) as writer:
        writer.add(
            [draw.integers(2, 64, 100 if n % 2 else 20) for n in range(ROWS)],
            [draw.integers(2, 64, 20) for _ in range(ROWS)],
        )
        writer.finish({"train": np.arange(ROWS), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(folder)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, now: Figures, later: Figures | None = None) -> None:
    """From here on a shortage has these figures of a GPU; `later`: those after its cache was cleared."""
    real = MemoryShortage.of

    def of(error: BaseException, device: torch.device, *, details: bool = False) -> MemoryShortage | None:
        found = real(error, device, details=details)
        return None if found is None else replace(found, device="cuda", figures=now)

    monkeypatch.setattr(MemoryShortage, "of", of)
    monkeypatch.setattr(recovery, "figures", lambda device: later or now)


FULL = Figures(allocated=20 * GIB, reserved=21 * GIB, free=GIB)
IN_PIECES = Figures(allocated=20 * GIB, reserved=24 * GIB, free=0)


def running(
    rows: PreparedDataset,
    journal: Noting,
    *,
    memory: dict[str, Any] | None = None,
    plan_memory: Any = None,
    model: Any = None,
    state: TrainState | None = None,
    **options: Any,
) -> Iterator[StepResult]:
    """All steps of a run over these rows in micro-batches of 4; its run directory is the journal's folder."""
    spec = tiny_spec(
        training={"epochs": EPOCHS, "batch_size": BATCH, "learning_rate": 0.01},
        memory={"micro_batch": 4} | (memory or {}),
    )
    loaded = as_loaded(model or tiny_model(dropout_rate=0.0).double(), spec)
    plan = plan_of(spec, ROWS).model_copy(update={"memory": plan_memory})
    options |= {} if state is None else {"state": state}
    optimizer = optimizer_for(loaded.model)
    return loop.steps(training_context(journal.folder, loaded, rows, spec, optimizer, journal, plan=plan, **options))


def recoveries(journal: Noting) -> list[tuple[int, str | None, int, int, str | None]]:
    return [
        (fact.step, fact.bucket, fact.micro_batch_before, fact.micro_batch_after, fact.cause) for fact in journal.facts
    ]


# -- exhausted -------------------------------------------------------------------------------------------------------


def test_each_bucket_finds_its_own_size_in_one_step_and_keeps_it(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting
) -> None:
    undisturbed, model = (tiny_model(dropout_rate=0.0).double() for _ in range(2))
    expected = list(running(rows, noting, model=undisturbed))
    assert noting.facts == [] and [result.micro_batch for result in expected] == [4] * 9
    gpu.allowed = {LONG: 1, SHORT: 2}
    found = list(running(rows, noting, model=model))
    assert recoveries(noting) == [
        (1, LONG, 4, 2, "exhausted"),
        (1, LONG, 2, 1, "exhausted"),
        (1, SHORT, 4, 2, "exhausted"),
    ]
    assert [(result.step, result.rows, result.target_tokens) for result in found] == [
        (result.step, result.rows, result.target_tokens) for result in expected
    ]
    assert [result.loss.item() for result in found] == pytest.approx([result.loss.item() for result in expected])
    assert farthest(weights(model), weights(undisturbed)) < 1e-10
    assert dict(found[-1].safe) == {LONG: SafeSize(1), SHORT: SafeSize(2)}
    assert [result.micro_batch for result in found] == [1] * 9
    for fact in noting.facts:
        assert isinstance(fact, OomRecovered)
        assert fact.requested_bytes == 2 * GIB and fact.milliseconds_lost > 0
        assert fact.allocated_bytes and fact.reserved_bytes and fact.other_processes_bytes is None


def test_the_last_micro_batch_costs_its_own_bucket_and_the_others_are_done_again_as_they_were(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting
) -> None:
    next(running(rows, noting))
    first = list(gpu.seen)
    bucket, count = first[-1]
    gpu.seen, gpu.refused = [], len(first)
    result = next(running(rows, noting))
    assert [(fact.bucket, fact.micro_batch_before) for fact in noting.facts] == [(bucket, 4)]
    assert result.safe.keys() == {bucket}
    again = gpu.seen[len(first) :]
    others = [max(rows for name, rows in some if name != bucket) for some in (first, again)]
    assert others[0] <= others[1] <= 4 * 104 // 24, "not halved"
    assert sum(rows for _, rows in again) == BATCH
    assert max(rows for name, rows in again if name == bucket) < max(2, count)


def test_a_later_attempt_begins_with_the_safe_sizes(rows: PreparedDataset, gpu: FakeGpu, noting: Noting) -> None:
    gpu.allowed = {LONG: 1}
    first = running(rows, noting)
    results = [next(first) for _ in range(3)]
    state = TrainState(spec_sha256="x", step=3, micro_batch=4, safe=dict(results[-1].safe))
    state = TrainState.model_validate_json(state.model_dump_json())
    assert state.safe == {LONG: SafeSize(1)}
    noting.facts.clear()
    again = list(running(rows, noting, state=state))
    assert [result.step for result in again] == [4, 5, 6, 7, 8, 9] and noting.facts == []
    assert TrainState.model_validate_json('{"spec_sha256": "x", "micro_batch": 4}').safe == {}, "of earlier versions"


def test_nothing_of_the_failed_pass_is_held_when_the_step_is_redone(
    rows: PreparedDataset, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PairBatch.loss_sum
    kept: list[weakref.ref[torch.Tensor]] = []

    def failing_once(batch: PairBatch, model: Any) -> torch.Tensor:
        if not kept:
            activations = torch.zeros(1000)
            kept.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert kept[0]() is None
        assert all(parameter.grad is None for parameter in model.parameters()) or len(seen) > 0
        seen.append(len(batch.rows))
        return real(batch, model)

    seen: list[int] = []
    monkeypatch.setattr(PairBatch, "loss_sum", failing_once)
    gc.disable()  # what only the collector would find is held, too
    monkeypatch.setattr(gc, "collect", lambda: 0)
    try:
        next(running(rows, noting))
    finally:
        gc.enable()
    assert sum(seen) == BATCH


# -- fragmentation ---------------------------------------------------------------------------------------------------


def test_memory_in_pieces_is_cleared_and_the_same_size_does(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, IN_PIECES)
    clear, clears = Cache.clear, []

    def cleared(cache: Cache) -> None:
        clear(cache)
        clears.append(cache)
        gpu.allowed.clear()

    monkeypatch.setattr(Cache, "clear", cleared)
    gpu.allowed = {LONG: 1}
    result = next(running(rows, noting))
    assert recoveries(noting) == [(1, LONG, 4, 4, "fragmentation")]
    assert (result.micro_batch, dict(result.safe), len(clears)) == (4, {}, 1)


def test_once_a_step_then_smaller_and_with_the_next_epoch_one_error_a_bucket_at_most(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, IN_PIECES)
    gpu.allowed = {LONG: 1, SHORT: 2}
    results = list(running(rows, noting))
    assert [result.step for result in results] == list(range(1, 10))
    cause = "fragmentation"
    assert recoveries(noting)[:4] == [
        (1, LONG, 4, 4, cause),  # the cache is cleared, once in this step
        (1, LONG, 4, 2, cause),
        (1, LONG, 2, 1, cause),
        (1, SHORT, 4, 2, cause),
    ]
    # Three steps make an epoch. The old size is tried, and what is known to do comes next.
    later = [((step - 1) // 3, *rest) for step, *rest in recoveries(noting)[4:]]
    assert sorted(later) == [
        (1, LONG, 4, 1, cause),
        (1, SHORT, 4, 2, cause),
        (2, LONG, 4, 1, cause),
        (2, SHORT, 4, 2, cause),
    ]
    assert results[2].safe[LONG] == SafeSize(1, former=4)


@pytest.mark.parametrize("epoch", [41, 48, 9, 8, 3])
def test_the_first_step_that_begins_in_an_epoch_opens_it(epoch: int) -> None:
    class CountedEpochs(StepOrder):
        def __init__(self) -> None:
            pass

        def epoch_of(self, step: int) -> float:
            return (step + 1) * 8 / epoch

    begins = [8 * (number - 1) // epoch for number in range(1, 30)]
    opened = [number for number in range(2, 30) if begins[number - 1] > begins[number - 2]]
    assert [number for number in range(1, 30) if loop.opens_epoch(CountedEpochs(), number)] == opened


def test_a_size_that_goes_back_stays_where_it_does(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, IN_PIECES)
    gpu.allowed = {LONG: 2}
    steps = running(rows, noting)
    assert [next(steps).micro_batch for _ in range(3)] == [2, 2, 2]
    gpu.allowed = {}
    assert [result.micro_batch for result in steps] == [4] * 6
    assert len(noting.facts) == 2


# -- others on the GPU ----------------------------------------------------------------------------------------------


def test_others_are_waited_for_and_the_same_size_does(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, FULL, later=Figures(allocated=8 * GIB, reserved=9 * GIB, free=13 * GIB))
    gpu.allowed, others = {LONG: 1}, Others(gpu, leave=True)
    result = next(running(rows, noting, monitor=others))
    assert recoveries(noting) == [(1, LONG, 4, 4, "other_processes")]
    assert others.waits == [(21 - 9 + 2) * GIB], "all that the pass held and wanted, not only the last piece"
    assert dict(result.safe) == {}
    assert noting.facts[0].other_processes_bytes == 6 * GIB
    assert "others hold 6.0 GiB by python3 (pid 4711)" in noting.facts[0].message


@pytest.mark.parametrize("policy", ["wait", "fail"])
def test_others_that_stay_cost_half_until_the_next_epoch_and_are_waited_for_once(
    policy: str, rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, FULL)
    gpu.allowed, others = {LONG: 1}, Others(gpu, leave=False)
    results = list(running(rows, noting, memory={"other_processes": policy}, monitor=others))
    assert recoveries(noting) == [
        (1, LONG, 4, 2, "other_processes"),
        (1, LONG, 2, 1, "other_processes"),
        (4, LONG, 4, 1, "other_processes"),
        (7, LONG, 4, 1, "other_processes"),
    ]
    assert len(others.waits) == (policy == "wait"), "and not again for as much as before"
    assert len(results) == 9


# -- where it ends ---------------------------------------------------------------------------------------------------


def candidate(recompute: int, peak: float, *, micro_batch: int = 4, optimizer: Any = "adamw") -> Candidate:
    return Candidate(
        optimizer=optimizer,
        activation_checkpointing=recompute,
        micro_batch=micro_batch,
        peak_bytes=int(peak * GIB),
        slowdown=1.0,
        score=1.0,
    )


def memory_plan(*candidates: Candidate) -> MemoryPlan:
    first = candidates[0]
    return MemoryPlan(
        device="cuda",
        gpu="RTX",
        budget_bytes=24 * GIB,
        budget_source="job",
        margin_bytes=0,
        input_tokens=104,
        target_tokens=24,
        micro_batch=first.micro_batch,
        activation_checkpointing=first.activation_checkpointing,
        optimizer=first.optimizer,
        parts={"weights": 14 * GIB, "context": GIB},
        peak_bytes=first.peak_bytes,
        candidates=list(candidates),
        why="",
        seconds=0.0,
    )


def ends(rows: PreparedDataset, noting: Noting, **options: Any) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        next(running(rows, noting, **options))
    return caught.value


def test_at_the_floor_the_fastest_setting_predicted_to_fit_is_named(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, Figures(allocated=11 * GIB, reserved=12 * GIB, free=0))
    gpu.allowed = {LONG: 0}
    plan = memory_plan(
        candidate(0, 15.0), candidate(2, 14.0), candidate(1, 11.2), candidate(1, 8, optimizer="adafactor")
    )
    error = ends(rows, noting, plan_memory=plan)
    assert (error.reason, error.detail_code) == ("out_of_memory", "out_of_memory")
    assert "in step 1 at micro-batch 1, one row of input ≤ 128, target ≤ 64: CUDA out of memory." in str(error)
    assert error.hint == (
        "set memory.activation_checkpointing: 1, memory.micro_batch: 4 "
        "(predicted 11.2 GiB instead of 15.0 GiB; the process got 13.0 GiB)"
    )
    assert [fact.micro_batch_after for fact in noting.facts] == [2, 1]


def test_at_the_floor_without_such_a_setting_it_says_so_and_who_has_the_rest(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, FULL)
    gpu.allowed = {LONG: 0}
    plan = memory_plan(candidate(0, 15.0), candidate(1, 23.0))
    error = ends(rows, noting, plan_memory=plan, monitor=Others(gpu, leave=False))
    assert str(error.hint).startswith("the process got 22.0 GiB, and no setting is predicted to need less: ")
    assert "data.max_input_tokens" in str(error.hint)
    assert "others hold 6.0 GiB by python3 (pid 4711)" in str(error.hint) and "pid 4711" in str(error)


def test_a_prediction_that_fails_at_the_floor_hides_nothing(
    rows: PreparedDataset,
    gpu: FakeGpu,
    noting: Noting,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def failing(*arguments: Any) -> int:
        raise RuntimeError("no such model")

    monkeypatch.setattr(recovery, "_got", failing)
    gpu.allowed = {LONG: 0}
    error = ends(rows, noting, plan_memory=memory_plan(candidate(0, 15.0)))
    assert "at micro-batch 1, one row of" in str(error) and "memory.activation_checkpointing: 1" in str(error.hint)
    assert "no such model" in caplog.text


def test_on_oom_fail_says_what_would_have_done(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, tmp_path: Path
) -> None:
    gpu.allowed = {LONG: 2}
    error = ends(rows, noting, memory={"on_oom": "fail"})
    assert "at micro-batch 4, and memory.on_oom is fail" in str(error)
    assert "memory.micro_batch: 2" in str(error.hint)
    assert noting.facts == [] and len(list((tmp_path / "oom_reports").iterdir())) == 1


@pytest.mark.parametrize("where", [(PairLimit, "batches"), (loop, "seed_step")])
def test_memory_that_runs_out_before_the_first_micro_batch_is_recovered(
    where: tuple[Any, str], rows: PreparedDataset, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(*where), []

    def failing_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(*where, failing_once)
    assert [result.step for result in running(rows, noting)] == list(range(1, 10))
    assert recoveries(noting) == [(1, LONG, 4, 2, "exhausted")]


def test_memory_that_runs_out_while_the_cache_is_cleared_stops_nothing(
    rows: PreparedDataset,
    gpu: FakeGpu,
    noting: Noting,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def failing(cache: Cache) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Cache, "clear", failing)
    gpu.allowed = {LONG: 2}
    next(running(rows, noting))
    assert recoveries(noting) == [(1, LONG, 4, 2, "exhausted")]
    assert "while it was given back" in caplog.text


@pytest.mark.parametrize("where", ["zero_grad", "note"])
def test_memory_that_runs_out_in_the_recovery_is_a_typed_end(
    where: str, rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any, **options: Any) -> None:
        raise MemoryError("not even for this")

    model = tiny_model(dropout_rate=0.0).double()
    monkeypatch.setattr(model if where == "zero_grad" else noting, where, failing)
    gpu.allowed = {LONG: 2}
    error = ends(rows, noting, model=model)
    assert "in step 1" in str(error) and "and again while room was made" in str(error)
    assert "not even for this" in str(error)


def test_another_error_in_the_recovery_is_not_hidden(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr(noting, "note", failing)
    gpu.allowed = {LONG: 2}
    with pytest.raises(RuntimeError, match="a fault of our own"):
        next(running(rows, noting))


# -- report --------------------------------------------------------------------------------------------------------


def test_report_says_what_was_in_the_model(rows: PreparedDataset, gpu: FakeGpu, noting: Noting, tmp_path: Path) -> None:
    gpu.allowed = {SHORT: 2}
    next(running(rows, noting))
    (fact,) = noting.facts
    assert fact.report == "oom_reports/step-00000001-1"
    report = json.loads((tmp_path / fact.report / "report.json").read_text())
    assert report["step"] == 1 and report["cause"] == "exhausted" and report["bucket"] == SHORT
    assert report["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert report["requested_bytes"] == 2 * GIB and report["allocated_bytes"] > 0
    assert any("looked_at" in line for line in report["traceback"])
    assert report["versions"]["torch"] == torch.__version__
    assert (report["micro_batch"], report["safe"], report["processes"]) == (4, {}, [])
    assert sum(shape["rows"] for shape in report["micro_batches"]) == BATCH
    failed = [shape for shape in report["micro_batches"] if shape["failed"]]
    assert len(failed) == 1 and failed[0]["rows"] > 2 and failed[0]["input_width"] <= 64


def test_an_attempt_that_is_over_leaves_no_report(
    rows: PreparedDataset, gpu: FakeGpu, noting: Noting, tmp_path: Path
) -> None:
    def over() -> None:
        raise SystemExit(85)

    noting.fence = over
    gpu.allowed = {SHORT: 2}
    with pytest.raises(SystemExit):
        next(running(rows, noting))
    assert not (tmp_path / "oom_reports").exists()


def test_ten_folders_are_enough(rows: PreparedDataset, gpu: FakeGpu, noting: Noting, tmp_path: Path) -> None:
    (tmp_path / "oom_reports").mkdir()
    for number in range(1, MOST_FOLDERS):
        (tmp_path / "oom_reports" / f"step-00000001-{number}").mkdir()
    gpu.allowed = {LONG: 1}
    next(running(rows, noting))
    assert [fact.report for fact in noting.facts] == ["oom_reports/step-00000001-10", None]
    assert len(list((tmp_path / "oom_reports").iterdir())) == MOST_FOLDERS


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), MemoryError(), RuntimeError("no driver")])
def test_no_room_for_report_stops_nothing(
    trouble: Exception,
    rows: PreparedDataset,
    gpu: FakeGpu,
    noting: Noting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: Any, **options: Any) -> int:
        raise trouble

    monkeypatch.setattr(Path, "write_text", full)
    gpu.allowed = {LONG: 2}
    assert next(running(rows, noting)).step == 1
    assert [fact.report for fact in noting.facts] == [None]
    assert list((tmp_path / "oom_reports").iterdir()) == [], "no half of a folder"
    (tmp_path / "file").touch()
    assert OomReports(tmp_path / "file").keep(1, MemoryShortage("m", None, Figures(), "cpu"), {}) is None


def test_of_a_gpu_the_allocators_own_report_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = {"segments": [{"address": 1, "total_size": 2}], "device_traces": [[]]}
    monkeypatch.setattr(out_of_memory, "figures", lambda device: FULL)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda device: "| PyTorch CUDA memory summary |")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "RTX")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\nGCC version: 12\n")
    monkeypatch.setattr(recovery, "DRIVER", tmp_path / "version")
    error, device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), torch.device("cuda")
    assert (plain := MemoryShortage.of(error, device)) is not None and plain.snapshot is None
    shortage = MemoryShortage.of(error, device, details=True)
    assert shortage is not None
    name = OomReports(tmp_path).keep(7, shortage.beside(PYTHON), {})
    assert name == "oom_reports/step-00000007-1"
    assert pickle.loads((tmp_path / name / "snapshot.pickle").read_bytes()) == snapshot
    assert "CUDA memory summary" in (tmp_path / name / "memory_summary.txt").read_text()
    report = json.loads((tmp_path / name / "report.json").read_text())
    assert (report["cause"], report["other_processes_bytes"]) == ("other_processes", 6 * GIB)
    assert report["processes"] == [{"pid": 4711, "name": "python3", "memory_bytes": 6 * GIB}]
    assert (report["versions"]["gpu"], report["versions"]["driver"].split()[-1]) == ("RTX", "580.65.06")

    def silent() -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", silent)
    without = MemoryShortage.of(error, device, details=True)
    assert without is not None and without.snapshot is None and without.message == error.args[0]


# -- a whole attempt -------------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_keeps_its_safe_sizes_and_its_planned_one(make_run: MakeRun, gpu: FakeGpu) -> None:
    run = make_run()
    gpu.allowed = {SHORT: 2}
    assert attempt(run, 1, stop_at=9) == 75
    found = facts(run, OomRecovered)
    assert [(fact.bucket, fact.micro_batch_before, fact.micro_batch_after) for fact in found] == [
        (SHORT, 4, 2),
        (SHORT, 2, 1),
    ]
    assert found[0].report is not None and (run.path / found[0].report / "report.json").exists()
    newest = checkpoint.verify(max(run.checkpoints.iterdir()))
    assert (newest.micro_batch, newest.safe) == (4, {SHORT: SafeSize(1)})
    assert attempt(run, 2) == 0
    assert facts(run, OomRecovered, 2) == []
    assert [row.micro_batch for row in run.metrics()] == [1] * len(run.metrics())
    assert [row.step for row in run.metrics()] == [4, 8, 12, 16, 20, 21]
