"""The time that a plan foretells: figures, what they rest on, and how they are told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.gpus import REFERENCE, GpuFacts, peak_flops, short_name
from jobs.measured import MeasuredGpu, TrainingRate
from jobs.plan import DataPlan, ModelPlan, Plan, TimePlan, make_plan, make_time_plan
from jobs.spec import parse_spec


def planned(hours: float = 131.0, **more: Any) -> TimePlan:
    """So many hours at the nominal peak of a 5090."""
    facts: dict[str, Any] = {
        "model_flops": hours * 3600 * 209.5e12, "recomputed_flops": 0.0, "estimated": False, "device": "cuda",
        "gpu": REFERENCE, "parameters": 8, "compiled": True, "step_flops": 4e14,
    }  # fmt: skip
    return make_time_plan(**facts | more)


@pytest.mark.parametrize(
    ("rows", "training", "said"),
    [
        (157, {}, "only 7 steps (rows: 157, epochs: 5, batch size: 128): try training.batch_size=8"),
        (
            6,
            {"epochs": 1},
            "only 1 step (rows: 6, epochs: 1, batch size: 128): try training.batch_size=1 and training.epochs=9",
        ),
        (2, {}, "only 1 step (rows: 2, epochs: 5, batch size: 128): try training.batch_size=1 and training.epochs=25"),
        (
            49,
            {"epochs": 1, "batch_size": 1},
            "only 49 steps (rows: 49, epochs: 1, batch size: 1): try training.epochs=2",
        ),
        (50, {"epochs": 1, "batch_size": 1}, None),
        (157, {"max_steps": 5}, None),
    ],
)
def test_a_run_of_few_steps_is_told_what_makes_more_of_them(rows: int, training: Any, said: str | None) -> None:
    spec = parse_spec({"data": {"train": "x.jsonl"}, "training": training})
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), DataPlan(train="x", input="x", target="x", rows=rows))
    assert plan.few_steps(spec.training) == said
    if said is not None:  # the hint works when followed
        advised = {key: int(value) for key, value in re.findall(r"training\.(\w+)=(\d+)", said)}
        followed = parse_spec({"data": {"train": "x.jsonl"}, "training": {**training, **advised}})
        assert make_plan(followed, plan.model, plan.data).steps >= 50


@pytest.mark.parametrize(
    ("rows", "held_out", "more", "said"),
    [
        (2_000, 7, {}, "7 rows|data.validation=0.02"),
        (79, 19, {"data": {"validation": "auto"}}, "19 rows|data.validation=0.41"),
        (20, 1, {}, "1 row|a larger file as data.validation"),
        (500, 5, {"data": {"validation": "held.jsonl"}}, "5 rows|a larger file as data.validation"),
        (500, 100, {"evaluation": {"max_rows": 6}}, "6 rows|evaluation.max_rows=20"),
        (500, 20, {}, None),
        (500, 0, {"data": {"validation": 0}}, None),
    ],
)
def test_too_few_rows_to_compare_are_told_with_what_makes_more_of_them(
    rows: int, held_out: int, more: Any, said: str | None
) -> None:
    spec = parse_spec({**more, "data": {"train": "x.jsonl", **more.get("data", {})}})
    data = DataPlan(train="x", input="x", target="x", rows=rows, validation_rows=held_out)
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), data)
    found = plan.few_held_out(spec)
    if said is None:
        assert found is None
        return
    count, _, remedy = said.partition("|")
    assert found == (
        f"evaluations look at only {count} that the model does not learn; to say whether it is better than before "
        f"takes 20: try {remedy}"
    )
    if "0." in remedy:  # the hint works when followed, also where whole inputs come to half of it
        assert float(remedy.partition("=")[2]) * (rows + held_out) / 2 >= 20


def test_a_counted_plan_is_a_limit_and_an_expectation() -> None:
    plan = planned()
    assert plan.hours_at_limit == pytest.approx(131)
    assert plan.hours_expected == pytest.approx(131 / 0.4)
    assert plan.text == "about 5 d 11 h at the nominal peak of an RTX 5090 (about 13 d 16 h expected)"


def test_recomputation_costs_time_but_moves_no_limit() -> None:
    plan = planned(recomputed_flops=131 * 3600 * 209.5e12 / 3)
    assert plan.hours_at_limit == pytest.approx(131)
    assert plan.hours_expected == pytest.approx(131 * 4 / 3 / 0.4)


def test_a_faster_gpu_has_a_nearer_limit() -> None:
    plan = planned(gpu=GpuFacts("NVIDIA H200", 0))
    assert plan.hours_at_limit == pytest.approx(131 * 209.5 / 989)
    assert plan.text == "about 1 d 4 h at the nominal peak of an H200 (about 2 d 21 h expected)"
    assert (
        planned(gpu=GpuFacts("NVIDIA B200", 0)).text
        == "about 12 h 12 min at the nominal peak of a B200 (about 30 h 30 min expected)"
    )


def test_what_was_guessed_is_said_to_be() -> None:
    plan = planned(gpu=None, estimated=True)
    assert (plan.gpu, plan.assumed) == (REFERENCE.name, True)
    assert plan.text == (
        "about 5 d 11 h at the nominal peak of an RTX 5090 "
        "(about 13 d 16 h expected; no worker has reported a GPU for it yet; estimated from the first rows)"
    )


def test_no_gpu_no_figure() -> None:
    on_cpu = planned(gpu=None, device="cpu")
    assert (on_cpu.gpu, on_cpu.assumed, on_cpu.hours_at_limit, on_cpu.hours_expected) == (None, False, None, None)
    assert on_cpu.text is None and on_cpu.summary().text is None
    strange = planned(gpu=GpuFacts("NVIDIA GeForce GTX 1080", 0))
    assert (strange.hours_at_limit, strange.hours_expected, strange.assumed) == (None, None, False)
    assert strange.text == "time unknown: its peak speed is not in Longhaul's table (NVIDIA GeForce GTX 1080)"


def test_training_on_the_gpu_replaces_the_expected_share_of_its_peak() -> None:
    reached = TrainingRate(parameters=8, compiled=True, step_flops=4e14, flops_per_s=104.75e12)
    measured = MeasuredGpu(driver="580", gemm_flops=190e12).with_training(reached)
    plan = planned(gpu=replace(REFERENCE, measured=measured), recomputed_flops=131 * 3600 * 209.5e12 / 2)
    assert plan.hours_expected == pytest.approx(131 * 1.5 * 2) and plan.expected_from_training
    assert plan.text == ("about 6 d at the measured peak of an RTX 5090 (about 16 d 9 h expected from training on it)")
    unlike: list[dict[str, Any]] = [{"parameters": 9}, {"compiled": False}, {"step_flops": 9e13}, {"step_flops": 2e15}]
    for more in unlike:
        other = planned(gpu=replace(REFERENCE, measured=measured), **more)
        assert other.hours_expected == pytest.approx(131 / 0.4 * 209.5 / 190) and not other.expected_from_training
    reached = reached.model_copy(update={"flops_per_s": 209.5e12})
    unlisted = planned(gpu=GpuFacts("NVIDIA T4", 0, MeasuredGpu(driver="580").with_training(reached)))
    assert unlisted.text == "about 5 d 11 h on a T4 (expected from training on it)"


def test_of_several_rates_that_of_the_steps_most_alike_counts() -> None:
    measured = MeasuredGpu(driver="580")
    for step_flops, rate in ((1e14, 52.375e12), (1.6e15, 104.75e12)):
        new = TrainingRate(parameters=8, compiled=True, step_flops=step_flops, flops_per_s=rate)
        measured = measured.with_training(new)
    gpu = replace(REFERENCE, measured=measured)
    assert planned(gpu=gpu, step_flops=3e14).hours_expected == pytest.approx(131 * 4)
    assert planned(gpu=gpu, step_flops=4.1e14).hours_expected == pytest.approx(131 * 2)


@pytest.mark.parametrize(
    ("hours", "text"), [(1234.4, "51 d 10 h"), (9.94, "9 h 56 min"), (0.5, "30 min"), (0.01, "36 s"), (0.0, "0 s")]
)
def test_hours_for_people(hours: float, text: str) -> None:
    assert (planned(hours).text or "").startswith(f"about {text} at")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 5090 D", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", "",
    ],
)  # fmt: skip
def test_what_only_sounds_like_a_known_gpu_is_unknown(name: str) -> None:
    assert peak_flops(name) is None


def test_names_of_gpus() -> None:
    assert [short_name(name) for name in (REFERENCE.name, "NVIDIA H100 80GB HBM3")] == ["RTX 5090", "H100 80GB HBM3"]
    assert peak_flops(REFERENCE.name) == 209.5e12


def test_a_plan_is_written_and_read_with_its_time_and_an_older_one_without(tmp_path: Path) -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    data = DataPlan(train="x", input="x", target="x", rows=8)
    plan = make_plan(spec, ModelPlan(source="x", parameters=1), data).model_copy(update={"time": planned()})
    file = tmp_path / "plan.json"
    file.write_text(plan.model_dump_json())
    assert Plan.model_validate_json(file.read_bytes()) == plan
    older = json.loads(plan.model_dump_json())
    del older["time"]
    assert Plan.model_validate(older).time is None
