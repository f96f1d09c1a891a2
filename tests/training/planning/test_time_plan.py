"""A job says how long it takes before it starts: from counted lengths, or from characters until they are counted."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from jobs.gpus import GpuFacts
from jobs.measured import MeasuredGpu, TrainingRate
from jobs.memory_plan import HostPlan, MemoryPlan
from jobs.plan import DataPlan, EvaluationTime, ModelPlan, Plan, TimePlan, make_plan
from jobs.spec import JobSpec, parse_spec
from jobs.text.units import GIB
from tests.support.samples import memory_plan
from tests.training.conftest import XL, tiny_model
from tests.training.tasks.causal.families import config_of, model_of
from tests.training.workplace import SHARED_DATA, Workplace, pairs
from worker.training.dataset.data import PreparedDataset
from worker.training.models.model_files import read_config
from worker.training.planning import tracker as counted
from worker.training.planning.budget import texts_together
from worker.training.planning.kernels import inside_cpu
from worker.training.planning.time_plan import RowLengths, with_time
from worker.training.planning.tracker import Tracker
from worker.training.settings import TrainerSettings, from_environment
from worker.training.tasks.causal.layout import layout_of as layout_of_causal
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.fused import fuse
from worker.training.tasks.seq2seq.layout import PairFlops, layout_of
from worker.training.tasks.seq2seq.task import Seq2Seq

H200 = GpuFacts("NVIDIA H200", 143_771 * 2**20)
RTX_5090 = TrainerSettings(
    data=Path(),
    prepared=Path(),
    models=Path(),
    device="cuda",
    offline=True,
    gpu=GpuFacts("NVIDIA GeForce RTX 5090", 2**35),
)


def job(rows: int, **parts: Any) -> tuple[JobSpec, Plan]:
    """FLAN-T5-XL on so many rows, for 5 epochs."""
    training = {"epochs": 5, "batch_size": 128}
    spec = parse_spec({"data": {"train": "rows.jsonl"}, "training": training, **parts})
    data = DataPlan(train="x", input="x", target="x", rows=rows)
    return spec, make_plan(spec, ModelPlan(source="x", parameters=2_849_757_184), data)


def time_of(rows: int, lengths: RowLengths, settings: TrainerSettings = RTX_5090, **parts: Any) -> TimePlan:
    spec, plan = job(rows, **parts)
    time = with_time(plan, spec, XL, lengths, settings).time
    assert time is not None
    return time


def alike(rows: int, inputs: int = 128, targets: int = 256) -> RowLengths:
    return RowLengths(np.full(rows, inputs, np.int32), np.full(rows, targets, np.int32))


def test_30_million_rows_of_xl_need_at_least_131_hours_on_a_5090_and_the_plan_says_so() -> None:
    time = time_of(6_000_000, alike(6_000_000), memory={"activation_checkpointing": 1})
    assert time.hours_at_limit == pytest.approx(131, rel=0.01)
    # Every layer computed twice: 4.37 T a row instead of 3.30.
    assert time.hours_expected == pytest.approx(131 * 4.37 / 3.30 / 0.4, rel=0.01)
    assert time.text == "about 5 d 11 h at the nominal peak of an RTX 5090 (about 18 d 2 h expected)"
    stored = time_of(6_000_000, alike(6_000_000))
    assert (stored.hours_at_limit, stored.recomputed_flops) == (time.hours_at_limit, 0)
    assert stored.text == "about 5 d 11 h at the nominal peak of an RTX 5090 (about 13 d 16 h expected)"


def test_evaluations_are_told_of_with_what_each_takes() -> None:
    def planned(memory: MemoryPlan | None = None, micro_batch: int = 32, **evaluation: Any) -> EvaluationTime:
        spec, plan = job(60_000, evaluation={"every_steps": 1000, **evaluation}, memory={"micro_batch": micro_batch})
        data = plan.data.model_copy(update={"validation_rows": 5000})
        plan = plan.model_copy(update={"data": data, "memory": memory})
        time = with_time(plan, spec, XL, alike(60_000), RTX_5090).time
        assert time is not None and time.evaluations is not None and time.evaluations.text in str(time.text)
        return time.evaluations

    alone = planned(generate_rows=0, samples=0)
    forward = PairFlops.of_config(XL).forward(np.array([128]), np.array([256]))
    assert alone.count == 4, "2,344 steps: at 0, 1,000, 2,000 and the last"
    assert alone.seconds == pytest.approx(2000 * forward / (0.4 * 209.5e12), rel=0.01)
    assert planned().seconds - alone.seconds == pytest.approx(2 * 256 * 24 * 1e-3), "64 texts: two batches, 24 layers"
    for memory, batches in (
        (None, 2),
        (memory_plan(micro_batch=1), 2),
        (memory_plan(micro_batch=1, peak_bytes=12 * GIB), 8),
    ):
        texts_s = planned(memory, 1).seconds - planned(memory, 1, generate_rows=0, samples=0).seconds
        assert texts_s == pytest.approx(batches * 256 * 24 * 1e-3), "beside a micro-batch of 1"
    assert planned(generate_rows=640).share > planned().share > alone.share > 0
    assert time_of(60_000, alike(60_000)).evaluations is None, "no validation rows"


def test_texts_are_written_together_as_far_as_training_leaves_room_for_them() -> None:
    def together(fits: int = 8, tokens: int = 256, **changes: Any) -> int:
        return texts_together(memory_plan(**changes), Seq2Seq(), XL, tokens, fits)

    lora = {"weights": 6 * GIB, "gradients": 0, "optimizer": 0, "context": GIB, "activations": GIB, "temporaries": 0}
    small: dict[str, Any] = {"parts": lora, "peak_bytes": 8 * GIB}
    each = layout_of(XL).text_bytes(256, 256)
    assert GIB // each == 10, "keys and values of 24 layers, 4,096 wide: 96 MiB a text"
    assert together() == 32, "9 GiB of activations, and gradients"
    assert together(**small) == 8
    assert together(4, **small) == 4, "half of the planned rows: half of the room"
    assert together(1, 1024, **small, micro_batch=1) == 2, "longer texts"
    assert together(24, **small, micro_batch=24) == 24, "never fewer than rows of training"
    assert together(1, micro_batch=1, **small, budget_source="host", device="cpu") == 32, "all that is free"


@pytest.mark.parametrize("shape", [(16, 48), (96, 16)])
@pytest.mark.parametrize("family", ["t5", "qwen2", "gpt2"])
def test_a_text_takes_about_what_is_said_while_it_is_written(family: str, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    if family == "t5":
        model: Any = tiny_model(num_layers=6, vocab_size=512)
        fuse(model.to(torch.bfloat16))
        layout = layout_of(model.config.to_dict())
    else:
        model, layout = model_of(family, torch.bfloat16), layout_of_causal(config_of(family))
    ids = torch.randint(3, 60, (4, inputs), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, inputs // 2 :] = 0
    tracker = Tracker(torch.device("cpu"), inside=inside_cpu)
    tracker.add([*model.parameters(), *model.buffers()], counted.WEIGHTS)
    before = tracker.total
    with torch.no_grad(), tracker:
        model.eval().generate(
            ids, attention_mask=mask if family == "t5" else mask.flip(1), do_sample=False, pad_token_id=0,
            max_new_tokens=outputs, min_new_tokens=outputs,
        )  # fmt: skip
    took = (tracker.peak - before) / len(ids)
    assert 0.95 * took <= layout.text_bytes(inputs, outputs) <= 3 * took


def test_updates_by_the_host_count_once_a_step_whatever_was_measured_and_not_in_evaluations() -> None:
    measured = MeasuredGpu(driver="580", host_update_per_s=0.5e9)
    rate = TrainingRate(parameters=2_849_757_184, compiled=False, step_flops=1e14, flops_per_s=8e13)
    for known in (measured, measured.with_training(rate)):
        gpu = GpuFacts("NVIDIA GeForce RTX 5090", 2**35, known)
        settings = dataclasses.replace(RTX_5090, gpu=gpu)

        def planned(optimizer_bytes: int, settings: TrainerSettings = settings) -> TimePlan:
            host = HostPlan(optimizer_bytes=optimizer_bytes, copy_bytes=1, available_bytes=1, fits=True)
            memory = memory_plan(micro_batch=32, trained_parameters=10**9, host=host)
            spec, plan = job(60_000, evaluation={"every_steps": 1000, "samples": 0, "generate_rows": 0})
            data = plan.data.model_copy(update={"validation_rows": 5000})
            plan = plan.model_copy(update={"data": data, "memory": memory})
            time = with_time(plan, spec, XL, alike(60_000), settings).time
            assert time is not None
            return time

        there, on_host = planned(0), planned(12 * 10**9)
        assert there.hours_expected and on_host.hours_expected and there.evaluations and on_host.evaluations
        assert on_host.hours_expected - there.hours_expected == pytest.approx(2344 * 2.0 / 3600)
        assert on_host.evaluations.seconds == pytest.approx(there.evaluations.seconds)


def test_some_rows_stand_for_all_and_each_counts_by_its_own_length() -> None:
    lengths = RowLengths(np.array([10, 500]), np.array([400, 20]))
    time = time_of(1000, lengths)
    each = [PairFlops.of_config(XL).rows(*(np.array([side[row]]) for side in (lengths.inputs, lengths.targets)))
            for row in (0, 1)]  # fmt: skip
    assert time.model_flops == pytest.approx(5 * 500 * sum(each))
    assert not time.estimated


def test_without_a_tokenizer_lengths_are_guessed_from_characters_and_cut_as_tokens_will_be() -> None:
    spec, _ = job(8, data={"train": "rows.jsonl", "max_input_tokens": 64, "max_target_tokens": 32})
    guessed = RowLengths.guessed([(41, 4), (100_000, 100_000), (0, 1)], spec.data, Seq2Seq())
    assert guessed.estimated
    assert guessed.inputs.tolist() == [12, 64, 1] and guessed.targets.tolist() == [2, 32, 2]
    text = time_of(6_000_000, guessed).text
    assert text is not None and text.startswith("about ") and text.endswith("estimated from the first rows)")


@pytest.mark.parametrize(
    ("environ", "gpu", "assumed"),
    [
        ({"LONGHAUL_GPU": H200.encode()}, H200.name, False),
        ({}, "NVIDIA GeForce RTX 5090", True),
        ({"LONGHAUL_GPU": ""}, "NVIDIA GeForce RTX 5090", True),
        ({"LONGHAUL_DEVICE": "cpu"}, None, False),
        ({"LONGHAUL_DEVICE": "cpu", "LONGHAUL_GPU": H200.encode()}, H200.name, False),
    ],
)
def test_the_gpu_is_the_one_that_the_supervisor_names(environ: dict[str, str], gpu: str | None, assumed: bool) -> None:
    settings = from_environment(environ)
    time = time_of(1000, alike(10), settings)
    assert (time.gpu, time.assumed) == (gpu, assumed)
    assert (time.hours_at_limit is None) == (gpu is None)


def test_an_unknown_gpu_has_no_limit() -> None:
    time = time_of(1000, alike(10), dataclasses.replace(RTX_5090, gpu=GpuFacts("NVIDIA T4", 2**34)))
    assert (time.hours_at_limit, time.hours_expected) == (None, None)
    assert time.model_flops > 0


@pytest.mark.parametrize("gpu", [H200, None])
def test_check_guesses_prepare_counts_and_both_say_so(tmp_path: Path, gpu: GpuFacts | None) -> None:
    place = Workplace(tmp_path)
    place.settings = dataclasses.replace(place.settings, gpu=gpu)
    place.rows("rows.jsonl", pairs(60))
    run = place.job(training={"epochs": 3, "batch_size": 8})
    checked = place.check(run)["plan"]["time"]
    assert checked == checked | {"estimated": True, "gpu": gpu and gpu.name, "assumed": False}
    guessed = run.plan().time
    assert guessed is not None and checked["text"] == guessed.text
    lengths = RowLengths.guessed(
        [(len(row["input"]), len(row["target"])) for row in pairs(60)], run.spec().data, Seq2Seq()
    )
    flops = 3 * PairFlops.of_config(builtin.CONFIG).rows(lengths.inputs, lengths.targets)
    trained = 60 - run.plan().data.validation_rows
    assert trained == 59 and guessed.model_flops == pytest.approx(flops * trained / 60)

    prepared = place.prepare(run)["time"]
    plan = run.plan()
    assert plan.time is not None and plan.data.prepared is not None and plan.model.folder is not None
    rows = PreparedDataset.open(Path(plan.data.prepared)).train
    config = read_config(Path(plan.model.folder), "model")
    assert prepared["model_flops"] == 3 * PairFlops.of_config(config).rows(rows.input_lengths, rows.target_lengths)
    assert (prepared["estimated"], prepared["text"]) == (False, plan.time.text)
    assert (prepared["text"] is None) == (gpu is None)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs the recipe corpus and T5's tokenizer")
def test_four_characters_a_token_is_about_right_for_recipes() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHARED_DATA / "t5_tokenizer_fast" / "tokenizer.json"))
    spec, _ = job(8)
    with gzip.open(SHARED_DATA / "recipes_main_20k.jsonl.gz", "rt") as file:
        recipes = [json.loads(line) for line in itertools.islice(file, 2000)]
    sides = [(" ".join([each["title"], *each["ingredients"]]), " ".join(each["directions"])) for each in recipes]
    guessed = RowLengths.guessed([(len(left), len(right)) for left, right in sides], spec.data, Seq2Seq())
    for side, lengths in enumerate((guessed.inputs, guessed.targets)):
        counted = [min(len(one.ids), 512) for one in tokenizer.encode_batch([texts[side] for texts in sides])]
        assert lengths.sum() == pytest.approx(sum(counted), rel=0.06)


def test_hours_become_steps_by_the_expected_pace_and_the_schedule_ends_there() -> None:
    lengths = alike(1000)
    spec, plan = job(1_000_000, training={"epochs": 5, "batch_size": 128, "max_hours": 40})
    free = time_of(1_000_000, lengths)
    limited = with_time(plan, spec, XL, lengths, RTX_5090)
    assert free.hours_expected is not None and limited.time is not None
    assert limited.steps == int(plan.steps * 40 / free.hours_expected) and limited.limited_by == "max_hours"
    assert limited.warmup_steps == math.ceil(0.03 * limited.steps)
    assert limited.time.hours_expected == pytest.approx(40, rel=1e-3)
    assert limited.limit_text(40) == "limited by training.max_hours"
    resumed = with_time(plan, spec, XL, lengths, RTX_5090, done=5000)
    assert abs(resumed.steps - 5000 - limited.steps) <= 1, "the hours are those of this job"
    enough = spec.model_copy(update={"training": spec.training.model_copy(update={"max_hours": 9000.0})})
    assert with_time(plan, enough, XL, lengths, RTX_5090).steps == plan.steps, "never more than the epochs have"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hours_stay_hours_where_no_speed_is_known(device: Literal["cpu", "cuda"]) -> None:
    spec, plan = job(1_000_000, training={"epochs": 5, "batch_size": 128, "max_hours": 1})
    unknown = dataclasses.replace(RTX_5090, device=device, gpu=None)
    found = with_time(plan, spec, XL, alike(1000), unknown)
    assert (found.steps, found.limited_by) == (plan.steps, "epochs")
    assert found.limit_text(1) == "training.max_hours becomes steps once the pace is measured"


def test_the_time_of_limited_steps_is_that_of_their_rows() -> None:
    spec, plan = job(1_000_000, training={"epochs": 5, "batch_size": 128, "max_steps": 3906})
    time, whole = with_time(plan, spec, XL, alike(1000), RTX_5090).time, time_of(1_000_000, alike(1000))
    assert time is not None and time.model_flops == pytest.approx(whole.model_flops * 3906 * 128 / 5e6)
    assert plan.limit_text(None) == "limited by training.max_steps"
