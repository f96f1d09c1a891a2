"""The memory plan from end to end: check and prepare on real models, in their real shapes and without their weights."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory_prediction import CLASSIFIER
from jobs.errors import DiskFull, Rejected, StageError
from jobs.gpu_needs import GpuNeeds
from jobs.gpus import DRIVER_BYTES, MARGIN, REFERENCE, GpuFacts
from jobs.memory_plan import PICTURE, DType, MemoryPlan, OptimizerName
from jobs.plan import DataPlan, ModelPlan, make_plan, resolve
from jobs.spec import parse_spec
from jobs.text.units import GIB, format_bytes
from tests.support.machine import free_bytes
from tests.support.samples import memory_plan
from tests.training.conftest import CONFIG, XL
from tests.training.hub_server import running_hub
from tests.training.planning.test_prediction import BART, QWEN2, ROBERTA, T5
from tests.training.workplace import Workplace, pairs
from worker.training.dataset.data import PreparedDataset
from worker.training.planning.alternatives import Alternatives
from worker.training.planning.budget import Budget, find_budget, on_gpu
from worker.training.planning.memory_plan import fallbacks, plan_memory
from worker.training.planning.stages import draw, figure_of, is_current
from worker.training.start import apply_fallbacks
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

pytestmark = pytest.mark.usefixtures("traced_once")
NAME = "cooks/t5-xl"
SHORT = {"max_input_tokens": 256, "max_target_tokens": 256}
FIXED = {"optimizer": "adafactor", "activation_checkpointing": 0, "micro_batch": 4}
"""Nothing to choose: one step is traced."""
WHOLE = CONFIG | XL | {"dropout_rate": 0.1}
FLAT = WHOLE | {"num_layers": 4, "num_decoder_layers": 4}
"""XL in 8 layers instead of 48: the same choices are at stake on a GPU of a quarter of the memory, for a sixth of the
traces. Needs 3.2 GiB at the least, and 4.1 for weights, gradients and states of `adamw_8bit`."""
WIDE = FLAT | {"d_ff": 12288}
"""Most of its weights are in layers, which GPUs can share."""


def gpu(gib: float, name: str = "NVIDIA GeForce RTX 5090") -> GpuFacts:
    """As nvidia-smi would report it."""
    return GpuFacts(name, int(gib * GIB))


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    made = Workplace(tmp_path)
    made.rows("rows.jsonl", pairs(60))
    return made


@pytest.fixture
def xl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A hub with the config of FLAN-T5-XL, and weights that nobody needs yet."""
    folder = tmp_path / "hub"
    folder.mkdir()
    builtin.build(folder, [text for row in pairs(60) for text in row.values()], seed=0)
    (folder / "config.json").write_text(json.dumps(WHOLE))
    (folder / "model.safetensors").write_bytes(b"")
    place = Workplace(tmp_path / "place", offline=False)
    place.rows("rows.jsonl", pairs(60))
    free_bytes(monkeypatch, 500 * GIB)
    with running_hub(monkeypatch) as server:
        server.repositories[f"models/{NAME}"] = folder
        yield place


@pytest.fixture
def flat(xl: Workplace, tmp_path: Path) -> Workplace:
    """The same hub; its model has few layers."""
    (tmp_path / "hub" / "config.json").write_text(json.dumps(FLAT))
    return xl


def checked(place: Workplace, reported: GpuFacts | None, **parts: Any) -> MemoryPlan:
    """The memory of the plan that check writes for a GPU."""
    place.settings = dataclasses.replace(place.settings, device="cuda", gpu=reported)
    run = place.job(**parts)
    place.check(run)
    plan = run.plan()
    assert plan.memory is not None
    chosen = plan.memory.micro_batch, plan.memory.activation_checkpointing, plan.memory.optimizer
    assert (plan.resolved.micro_batch, plan.resolved.activation_checkpointing, plan.resolved.optimizer) == chosen
    return plan.memory


# -- FLAN-T5-XL --------------------------------------------------------------------------------------------------------


def test_on_32_gb_xl_needs_no_recomputation(xl: Workplace) -> None:
    plan = checked(xl, gpu(31.84), model=NAME, data=SHORT)
    assert (plan.optimizer, plan.activation_checkpointing, plan.micro_batch) == ("adamw_8bit", 0, 11)
    assert (plan.input_tokens, plan.target_tokens) == (256, 256)
    assert plan.peak_bytes <= plan.budget_bytes - plan.margin_bytes
    assert plan.budget_bytes / GIB == pytest.approx(31.34, abs=0.01)
    assert (plan.budget_source, plan.gpu) == ("gpu", "NVIDIA GeForce RTX 5090")
    assert sum(plan.parts.values()) == plan.peak_bytes
    assert plan.parts["context"] == int(0.8 * GIB)
    assert "adamw needs more than 43." in plan.why
    assert plan.host is not None and plan.disk is not None
    # bf16 weights and two states of a byte.
    assert plan.disk.checkpoint_bytes / 2_849_757_184 == pytest.approx(4.03, abs=0.02)
    assert (plan.host.copy_bytes, plan.disk.checkpoints) == (plan.disk.checkpoint_bytes, 5)


def test_8_rows_of_256_tokens_with_8_bit_states_take_at_most_28_gib(xl: Workplace) -> None:
    memory = {"micro_batch": 8, "optimizer": "adamw_8bit", "activation_checkpointing": 0}
    plan = checked(xl, gpu(31.84), model=NAME, data=SHORT, memory=memory)
    assert plan.peak_bytes / GIB == pytest.approx(26.4, abs=0.05)


def with_host(gib: float, host_gib: float) -> GpuFacts:
    return dataclasses.replace(gpu(gib), host_memory_bytes=int(host_gib * GIB))


def test_states_on_the_host_leave_xl_half_the_gpu(xl: Workplace) -> None:
    memory = {"optimizer": "adamw_offload", "micro_batch": 8, "activation_checkpointing": 4}
    plan = checked(xl, with_host(31.84, 64), model=NAME, data=SHORT, memory=memory)
    assert plan.peak_bytes <= 21 * GIB, f"{plan.peak_bytes / GIB:.2f} GiB"
    assert plan.parts["optimizer"] == 0 and plan.host is not None and plan.disk is not None
    assert plan.host.optimizer_bytes == 12 * plan.trained_parameters + 2**28
    # bf16 weights, master copies and two states in fp32.
    assert plan.disk.checkpoint_bytes == 14 * plan.trained_parameters
    assert not plan.host.fits, "no room for a copy of it all besides"
    assert "the host's update takes 2.8 s of each step" in plan.why
    assert "32.1 GiB of optimizer states in the host's memory" in plan.text


# -- a large model, of few layers --------------------------------------------------------------------------------------


def test_a_smaller_gpu_trains_it_with_fewer_rows_or_some_recomputation(flat: Workplace) -> None:
    for gib, chosen in ((6, (0, 4)), (5.5, (4, 3))):
        plan = checked(flat, gpu(gib, "NVIDIA GeForce RTX 4090"), model=NAME, data=SHORT)
        assert (plan.activation_checkpointing, plan.micro_batch) == chosen and plan.optimizer == "adamw_8bit"
        assert plan.peak_bytes <= plan.budget_bytes - plan.margin_bytes < gib * GIB
        assert plan.least_bytes == sum(plan.least_parts.values()) < plan.peak_bytes
    assert len([each for each in plan.candidates if each.parts]) > 1


def test_auto_takes_the_host_where_the_gpu_is_small_and_only_if_it_has_room(flat: Workplace) -> None:
    chosen = {
        host: checked(flat, with_host(4.5, host), model=NAME, data=SHORT, training={"batch_size": 128}).optimizer
        for host in (16, 12)  # 12 hold the states, and leave too little to all else
    }
    assert chosen == {16: "adamw_offload", 12: "adafactor"}


def test_a_host_without_room_for_the_states_is_refused_with_numbers(flat: Workplace) -> None:
    said = "states of adamw_offload take 6.8 GiB of the host's memory, and the host has 4.0 GiB in all"
    with pytest.raises(Rejected, match=said) as caught:
        checked(flat, with_host(8, 4), model=NAME, data=SHORT, memory={"optimizer": "adamw_offload"})
    assert (caught.value.detail_code, caught.value.param) == ("host_memory", "memory.optimizer")


def test_a_gpu_that_has_room_for_the_least_can_take_what_was_planned_for_a_larger_one() -> None:
    spec = parse_spec({"data": {"train": "a.jsonl"}})

    def planned(facts: GpuFacts, optimizer: OptimizerName | None = None) -> MemoryPlan:
        budget = on_gpu(facts.usable_bytes, "gpu", facts)
        longest = 1024, 1024  # of which a pass takes more than an update
        return plan_memory(spec, Seq2Seq(), FLAT, longest, device="cuda", budget=budget, optimizer=optimizer)

    large = planned(gpu(8))
    least = large.least_bytes
    assert least is not None and least < large.peak_bytes
    small = GpuFacts("small", DRIVER_BYTES + math.ceil(least / (1 - MARGIN)))
    assert GpuNeeds(least_bytes=least).unmet(small) is None
    found = planned(small, large.optimizer)
    assert (found.activation_checkpointing, found.optimizer) == (1, large.optimizer)
    assert found.peak_bytes == found.least_bytes == least
    with pytest.raises(Rejected):
        planned(dataclasses.replace(small, memory_bytes=small.memory_bytes - 2**21), large.optimizer)


def test_on_a_gpu_that_is_too_small_it_is_refused_with_numbers(flat: Workplace) -> None:
    with pytest.raises(Rejected) as caught:
        checked(flat, gpu(3.5, "NVIDIA GeForce RTX 4060"), model=NAME, data=SHORT)
    error = caught.value
    assert (error.detail_code, error.param) == ("does_not_fit", "model")
    assert "at its least (adafactor, every layer recomputed, micro-batch 1 of 256/256 tokens)" in str(error)
    assert "and the budget is 3.0 GiB (NVIDIA GeForce RTX 4060), of which 0.1 GiB stay free" in str(error)
    assert error.hint is not None and "a GPU with more memory" in error.hint and "max_input_tokens" in error.hint


def test_a_setting_that_does_not_fit_is_refused_with_the_nearest_that_does(flat: Workplace) -> None:
    with pytest.raises(Rejected) as caught:
        checked(flat, gpu(8), model=NAME, data=SHORT, memory={"optimizer": "adamw", "micro_batch": 8})
    error = caught.value
    assert (error.detail_code, error.param) == ("does_not_fit", "memory.optimizer")
    assert "adamw, every layer recomputed, micro-batch 8" in str(error)
    assert error.hint is not None and error.hint.startswith('with memory.optimizer: "adamw_8bit" it fits: ')


def test_the_plan_of_a_refused_job_says_what_it_would_need(workplace: Workplace) -> None:
    run, workplace.pictured = workplace.job(memory={"budget": 0.005, "micro_batch": 4}), True
    with pytest.raises(Rejected) as caught:
        workplace.check(run)
    memory = run.plan().memory
    assert memory is not None and not memory.fits and not any(each.fits for each in memory.candidates)
    assert (memory.micro_batch, memory.activation_checkpointing, memory.optimizer) == (4, 1, "adafactor")
    assert memory.peak_bytes == sum(memory.parts.values()) > memory.limit_bytes
    assert " missing; adafactor, every layer recomputed, micro-batch 4; " in memory.text
    assert format_bytes(memory.peak_bytes) in str(caught.value)
    assert (run.path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_a_gpu_nobody_has_reported_is_assumed_and_said_to_be(flat: Workplace) -> None:
    plan = checked(flat, None, model=NAME, data=SHORT, memory={"micro_batch": 8})
    assert plan.budget_source == "assumed"
    assert "(NVIDIA GeForce RTX 5090, assumed), " in plan.text


# -- small models ------------------------------------------------------------------------------------------------------


def test_a_small_model_on_a_cpu_trains_as_plainly_as_ever(workplace: Workplace) -> None:
    run, workplace.pictured = workplace.job(), True
    told = workplace.check(run)["plan"]
    plan = run.plan()
    assert plan.memory is not None and told["memory"]["text"] == plan.memory.text
    assert plan.resolved.model_dump() == {
        "micro_batch": 8, "activation_checkpointing": 0, "optimizer": "adamw", "dtype": "bfloat16", "compile": False,
        "gpus": 1,
    }  # fmt: skip
    assert (plan.memory.budget_source, plan.memory.margin_bytes, plan.memory.parts["context"]) == ("host", 0, 0)
    assert (plan.memory.input_tokens, plan.memory.target_tokens) == (512, 512)
    picture = (run.path / "memory.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24])[0] == 1000


def test_prepare_plans_for_the_longest_rows_that_there_are(workplace: Workplace) -> None:
    run = workplace.job(memory=FIXED)
    guessed = workplace.check(run)["plan"]["memory"]
    prepared, counted = workplace.prepare_only(run)["memory"], run.plan().memory
    assert counted is not None and prepared["text"] == counted.text
    assert (counted.input_tokens, counted.target_tokens) < (512, 512)
    assert counted.peak_bytes < guessed["peak_bytes"]


@pytest.mark.parametrize(
    ("task", "config", "asked", "compiled"),
    [
        (Seq2Seq(), T5, {}, True),
        (Seq2Seq(), T5, {"memory": {"activation_checkpointing": 1}}, True),
        (Seq2Seq(), T5, {"speed": {"compile": False}}, False),
        (Seq2Seq(), BART, {}, False),
        (Causal(positions=64), QWEN2, {"memory": {"activation_checkpointing": 0}}, True),
        (Causal(positions=64), QWEN2, {"memory": {"activation_checkpointing": 2}}, False),
        (Causal(positions=64), QWEN2, {"method": {"type": "lora", "base_dtype": "float16"}}, False),
        (CLASSIFIER, ROBERTA, {"speed": {"compile": True}}, False),
    ],
)
def test_a_plan_says_that_layers_are_compiled_where_they_will_be(
    task: Task, config: dict[str, Any], asked: dict[str, Any], compiled: bool
) -> None:
    spec = parse_spec({"data": {"train": "a.jsonl"}} | asked)
    budget = on_gpu(32 * GIB, "gpu", GpuFacts("NVIDIA GeForce RTX 5090", 32 * GIB))
    dtype: DType = "float16" if "method" in asked else "bfloat16"
    plan = plan_memory(spec, task, config, (64, 64), device="cuda", budget=budget, dtype=dtype)
    assert plan.compile is resolve(spec, plan).compile is compiled


def test_a_fallback_that_recomputes_layers_compiles_none_where_those_cannot_be(tmp_path: Path) -> None:
    spec = parse_spec({"model": "x", "data": {"train": "a.jsonl", "max_tokens": 64}, "task": "causal"})
    task, budget = Causal.of(spec), Budget(GIB, "gpu", None, margin=0)
    memory = plan_memory(spec, task, QWEN2, (64, 64), device="cuda", budget=budget)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    model = ModelPlan(source="x", folder=str(tmp_path), parameters=1)
    data = DataPlan(train="x", input="", target="x", rows=8)
    plan = make_plan(spec, model, data, "cuda", memory, task="causal")
    alternatives = Alternatives(spec, plan, torch.device("cpu"))
    below = fallbacks(memory, spec)
    seen = [
        (found.activation_checkpointing, found.compile)
        for found in (apply_fallbacks(spec, memory, lower, alternatives) for lower in (1, len(below)))
    ]
    assert memory.compile and seen == [(0, True), (1, False)]


def test_rows_that_are_only_evaluated_count_among_the_longest(workplace: Workplace) -> None:
    workplace.rows("held_out.jsonl", [{"input": "long " * 60, "target": "short"}])
    run = workplace.job(data={"validation": "held_out.jsonl", "max_input_tokens": 48}, memory=FIXED)
    workplace.prepare(run)
    planned, rows = run.plan().memory, PreparedDataset.open(Path(run.plan().data.prepared or ""))
    assert planned is not None
    assert planned.input_tokens == rows.validation.input_lengths.max() > rows.train.input_lengths.max()
    assert planned.target_tokens >= rows.train.target_lengths.max() > rows.validation.target_lengths.max()


def test_prepare_takes_the_plan_of_check_where_nothing_differs(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.rows("rows.jsonl", [{"input": f"{n} " * 40, "target": f"{n} " * 40} for n in range(40)])
    run = workplace.job(data={"max_input_tokens": 16, "max_target_tokens": 16}, memory=FIXED)
    workplace.check(run)
    made = run.plan().memory
    monkeypatch.setattr("worker.training.planning.stages.plan_memory", None)
    again = workplace.prepare_only(run)["memory"]
    assert made is not None and again["seconds"] == made.seconds
    assert (again["peak_bytes"], again["disk"]["checkpoints"]) == (made.peak_bytes, 5)


@pytest.mark.parametrize(
    ("longest", "budget", "right"),
    [
        ((256, 256), Budget(31 * GIB, "gpu", REFERENCE, GIB), True),
        ((256, 128), Budget(31 * GIB, "gpu", REFERENCE, GIB), False),
        ((256, 256), Budget(30 * GIB, "gpu", REFERENCE, GIB), False),
        ((256, 256), Budget(31 * GIB, "gpu", gpu(31.84, "NVIDIA H200"), GIB), False),
        ((256, 256), Budget(31 * GIB, "assumed", REFERENCE, GIB), False),
    ],
)
def test_a_plan_is_as_good_as_new_only_for_the_same_rows_and_the_same_gpu(
    longest: tuple[int, int], budget: Budget, right: bool
) -> None:
    assert is_current(memory_plan(), longest, budget, 1) is right
    assert not is_current(memory_plan(gpus=2), longest, budget, 1)


@pytest.mark.parametrize(("free_gib", "right"), [(40, True), (27, True), (25, False)])
def test_on_a_cpu_a_plan_stays_right_while_it_fits(free_gib: int, right: bool) -> None:
    plan = memory_plan(device="cpu", gpu=None, budget_source="host")
    assert is_current(plan, (256, 256), Budget(free_gib * GIB, "host", None, 0), 1) is right


def test_the_picture_grows_with_what_was_tried_and_is_the_same_for_the_same_plan() -> None:
    def size(plan: MemoryPlan) -> tuple[int, int]:
        width, height = struct.unpack(">II", draw(plan)[16:24])
        return width, height

    both = memory_plan()
    one = memory_plan(candidates=both.candidates[:1])
    assert draw(both) == draw(both) != draw(one)
    assert size(one) == (1000, 240) and size(both) == (1000, 290)


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1e-3, 1.0, 1.15, 40.0])
def test_what_stands_beside_the_bars_is_inside_the_frame(scale: float) -> None:
    """A tiny model on a large host, and one that needs many times the budget."""
    plan = memory_plan()
    scaled = [each.model_copy(update={
        "peak_bytes": int(each.peak_bytes * scale), "parts": {k: int(v * scale) for k, v in each.parts.items()}
    }) for each in plan.candidates]  # fmt: skip
    figure = figure_of(plan.model_copy(update={"candidates": scaled, "peak_bytes": int(plan.peak_bytes * scale)}))
    figure.draw_without_rendering()
    [axes] = figure.axes
    frame, whole = axes.get_window_extent(), figure.bbox
    assert len(axes.texts) == 2
    for text in axes.texts:
        assert frame.x0 < text.get_window_extent().x0 and text.get_window_extent().x1 < frame.x1
    for other in (*figure.legends, axes.title, *axes.get_yticklabels()):
        assert whole.x0 <= other.get_window_extent().x0 and other.get_window_extent().x1 <= whole.x1


def test_the_time_follows_what_is_recomputed(workplace: Workplace) -> None:
    workplace.settings = dataclasses.replace(workplace.settings, gpu=gpu(31.84))
    run = workplace.job(memory=FIXED | {"activation_checkpointing": 1})
    workplace.check(run)
    time = run.plan().time
    assert time is not None and time.recomputed_flops > 0


def test_a_micro_batch_is_never_more_than_a_step(workplace: Workplace) -> None:
    run = workplace.job(memory=FIXED | {"micro_batch": 64}, training={"batch_size": 16})
    workplace.check(run)
    assert run.plan().resolved.micro_batch == 16


def test_a_budget_that_is_too_small_on_a_cpu_is_refused(workplace: Workplace) -> None:
    with pytest.raises(StageError) as caught:
        workplace.check(workplace.job(memory={"budget": 0.001}))
    assert (caught.value.detail_code, caught.value.param) == ("does_not_fit", "memory.budget")
    assert "the budget is 1 MiB (memory.budget)" in str(caught.value)


def test_an_attempt_goes_on_with_its_optimizer() -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    budget = find_budget(spec.memory, "cuda", gpu(24))
    plan = plan_memory(spec, Seq2Seq(), builtin.CONFIG, (64, 64), device="cuda", budget=budget, optimizer="adafactor")
    assert (plan.optimizer, plan.activation_checkpointing, plan.micro_batch) == ("adafactor", 0, 128)
    assert plan.disk is None and plan.why.startswith("the run has states of adafactor; ")
    with pytest.raises(Rejected) as caught:
        plan_memory(
            spec,
            Seq2Seq(),
            builtin.CONFIG,
            (64, 64),
            device="cuda",
            budget=Budget(2**20, "job", None, 0),
            optimizer="adamw",
        )
    assert "adafactor" not in f"{caught.value} {caught.value.hint}", "no hint suggests what would be refused"


def test_a_config_that_no_attempt_could_train_with_is_refused() -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    config = {key: value for key, value in CONFIG.items() if key != "decoder_start_token_id"}
    with pytest.raises(Rejected, match="it has no decoder_start_token_id") as caught:
        plan_memory(spec, Seq2Seq(), config, (64, 64), device="cpu", budget=find_budget(spec.memory, "cpu", None))
    assert caught.value.detail_code == "bad_config"


# -- fallbacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro_batch", "activation_checkpointing", "below"),
    [
        (8, 0, [(4, 0), (2, 0), (1, 0), (1, 2), (1, 1)]),
        (11, 4, [(5, 4), (2, 4), (1, 4), (1, 2), (1, 1)]),
        (2, 2, [(1, 2), (1, 1)]),
        (1, 1, []),
    ],
)
def test_rungs_fall_to_one_row_and_then_to_recomputation(
    micro_batch: int, activation_checkpointing: int, below: list[tuple[int, int]]
) -> None:
    plan = memory_plan(micro_batch=micro_batch, activation_checkpointing=activation_checkpointing)
    assert fallbacks(plan, parse_spec({"data": {"train": "a.jsonl"}})) == below
    said = parse_spec({"data": {"train": "a.jsonl"}, "memory": {"activation_checkpointing": activation_checkpointing}})
    assert fallbacks(plan, said) == [fallback for fallback in below if fallback[1] == activation_checkpointing]


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_without_room_for_one_checkpoint_and_the_model_the_job_is_refused(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes(monkeypatch, 10 << 20)
    with pytest.raises(DiskFull) as caught:
        workplace.check(workplace.job())
    assert caught.value.detail_code == "no_room"
    assert "has 10 MiB free, and one checkpoint (19 MiB) with the final model (3 MiB) needs 22 MiB" in str(caught.value)
    assert "checkpoint.keep" in str(caught.value.hint)


def test_with_room_for_some_checkpoints_the_plan_says_how_many(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes(monkeypatch, 50 << 20)
    run = workplace.job()
    workplace.check(run)
    memory = run.plan().memory
    assert memory is not None and "the disk has room for 2 of 5 checkpoints" in memory.text
