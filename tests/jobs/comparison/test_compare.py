"""Jobs side by side, by what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from jobs.comparison.answer import Comparison
from jobs.comparison.compare import compare
from jobs.comparison.facts import JobFacts
from jobs.events import AttemptStarted, Event, JobSubmitted
from jobs.plan import DataPlan, ModelPlan, TimePlan, make_plan
from jobs.record import JobRecord
from jobs.spec import parse_spec
from jobs.state import Status
from jobs.text.units import GIB
from jobs.trainer_facts import Fact, Fault, MemoryMeasured, MemoryPlanned
from tests.support.samples import PARTS, memory_plan, prepared

SETTINGS: Mapping[str, Any] = {"micro_batch": 8, "activation_checkpointing": 0, "optimizer": "adamw_8bit"}


def job(
    name: str,
    *facts: Fact,
    planned: bool = True,
    memory: Mapping[str, Any] = SETTINGS,
    plan: Mapping[str, Any] = MappingProxyType({}),
    time: TimePlan | None = None,
    loss: float | None = None,
    error: Fault | None = None,
    report: dict[str, Any] | None = None,
    **settings: Any,
) -> JobFacts:
    """One that was planned with `plan` (changes to that of `tests.support.samples`), and has these facts."""
    spec = parse_spec({"name": name, "data": {"train": "rows.jsonl"}, **settings, "memory": {**SETTINGS, **memory}})
    data = DataPlan(train="rows.jsonl", input="x", target="y", rows=64)
    made = make_plan(spec, ModelPlan(source="x", parameters=5 * GIB // 2), data, "cuda", memory_plan(**plan))
    status = Status.FAILED if error else Status.SUCCEEDED if loss is not None else Status.QUEUED
    record = JobRecord(id=f"job-{name}", status=status, error=error, result_loss=loss)
    if report is not None:
        record = record.model_copy(update={"data": prepared(**report).data})
    events = [
        Event.model_validate({"number": number, "job": record.id, "at": 1.0, "fact": fact.model_dump()})
        for number, fact in enumerate(facts, start=1)
    ]
    return JobFacts.of(spec, record, made.model_copy(update={"time": time}) if planned else None, events)


def refused(name: str, **settings: Any) -> JobFacts:
    """With twice the rows, for which there is no room."""
    parts = {**PARTS, "activations": 2 * PARTS["activations"]}
    larger = {"micro_batch": 16, "parts": parts, "peak_bytes": sum(parts.values())}
    error = Fault(code="does_not_fit", message="it needs 35.0 GiB")
    return job(name, memory={"micro_batch": 16}, plan=larger, error=error, **settings)


def values(found: Comparison) -> dict[str, list[Any]]:
    return {each.key: each.values for group in found.groups for each in group.differences}


def test_the_reference_is_the_first_that_did_not_lack_memory() -> None:
    found = compare([refused("a"), job("unplanned", planned=False), job("b"), job("c")])
    assert found.reference == "job-b" and [cause.job for cause in found.causes] == ["job-a"]
    [rows] = [each for group in found.groups for each in group.differences if each.key == "memory.micro_batch"]
    assert rows.values == [16, 8, 8, 8] and rows.bytes == [9 * GIB, None, 0, 0]


def test_what_costs_most_comes_first() -> None:
    [memory] = [group for group in compare([job("a"), refused("b")]).groups if group.name == "memory"]
    assert [each.key for each in memory.differences][:3] == [
        "memory.micro_batch", "memory.peak_bytes", "memory.parts.activations",
    ]  # fmt: skip
    assert all(each.bytes == [0, 9 * GIB] for each in memory.differences[:3])


def test_where_all_were_refused_nothing_is_a_cause() -> None:
    found = compare([refused("a"), refused("b")])
    assert found.causes == [] and found.reference == "job-a"


def test_less_to_use_is_a_cause_of_its_own() -> None:
    error = Fault(code="does_not_fit", message="it needs 26.0 GiB")
    smaller = job("b", memory={"budget": 24}, plan={"budget_bytes": 24 * GIB, "budget_source": "job"}, error=error)
    [cause] = compare([job("a"), smaller]).causes
    assert [(line.key, line.parts) for line in cause.lines] == [("memory.budget", {"limit": 7 * GIB})]
    assert (
        cause.text == "By its plan, b needs no more than a. It may use 7.0 GiB less: memory.budget is 24.0, not auto."
    )


def test_memory_that_ran_out_though_the_plan_is_the_same_is_told_by_what_was_seen() -> None:
    held = MemoryPlanned(
        micro_batch=8, activation_checkpointing=0, optimizer="adamw_8bit", peak_bytes=1, budget_bytes=2,
        other_processes_bytes=5 * GIB,
    )  # fmt: skip
    alone = held.model_copy(update={"other_processes_bytes": 0})
    took = MemoryMeasured(step=1, measured_bytes=28 * GIB, predicted_bytes=26 * GIB, peak_bytes=1, budget_bytes=2)
    error = Fault(code="out_of_memory", message="memory ran out")
    [cause] = compare([job("a", alone), job("b", held, took, error=error)]).causes
    assert (cause.lines, cause.bytes) == ([], 0)
    assert cause.text == (
        "By its plan, b needs no more than a. Other processes held 5.0 GiB of its GPU. "
        "Its first step took 28.0 GiB, where 26.0 GiB were predicted."
    )


def test_a_job_that_failed_for_another_reason_has_no_cause_of_memory() -> None:
    found = compare([job("a"), job("b", error=Fault(code="bad_data", message="no row can be used"))])
    assert found.causes == []
    assert values(found)["status"] == ["queued", "failed"] and "error.code" not in values(found)


def test_rows_are_compared_by_reason() -> None:
    report = {"kept": 6, "rejected": {"empty target": 2}, "truncated_inputs": 3}
    found = values(compare([job("a", report={}), job("b", report=report), job("c")]))
    assert found["data.rejected.empty target"] == [0, 2, None]
    assert found["data.kept"] == [8, 6, None] and found["data.truncated_inputs"] == [0, 3, None]
    assert "data.rows_read" not in found and "data.prepared" not in found


def test_other_rows_under_the_same_settings_are_named() -> None:
    one, other = job("a", report={"prepared": "/prepared/1"}), job("a", report={"prepared": "/prepared/2"})
    assert values(compare([one, other])) == {"data.prepared": ["1", "2"]}


def test_what_is_not_known_of_a_job_is_no_difference() -> None:
    versions = {"torch": "2.13.0", "driver": "580.1"}
    started = AttemptStarted(worker="w", device="cuda", gpu_name="NVIDIA H200", versions=versions)
    newer = started.model_copy(update={"versions": {"torch": "2.14.0"}})
    assert values(compare([job("a", started), job("a")])) == {}
    assert values(compare([job("a", started), job("a"), job("a", newer)])) == {
        "versions.torch": ["2.13.0", None, "2.14.0"]
    }


def test_longhaul_has_a_version_even_where_nothing_was_trained() -> None:
    first, other = (JobSubmitted(name="a", model="m", spec_sha256="", version=each) for each in ("1", "2"))
    assert values(compare([job("a", first), job("a", other)])) == {"versions.longhaul": ["1", "2"]}


def test_what_the_plan_decided_is_told_where_it_was_left_to_it() -> None:
    auto: dict[str, Any] = {"memory": {"micro_batch": "auto"}}
    found = values(compare([job("a", **auto), job("a", plan={"micro_batch": 4}, **auto)]))
    assert found["resolved.micro_batch"] == [8, 4]
    found = values(compare([job("a"), job("a", memory={"micro_batch": 4}, plan={"micro_batch": 4})]))
    assert found["memory.micro_batch"] == [8, 4] and "resolved.micro_batch" not in found


def test_seeds_are_told_together() -> None:
    runs = [job(f"r{seed}", training={"seed": seed}, loss=loss) for seed, loss in ((1, 2.0), (2, 2.4))]
    others = [job("r3", training={"seed": 3}), job("other", training={"epochs": 2}, loss=9.0)]
    [seeds] = compare([*runs, *others]).seeds
    assert (seeds.jobs, seeds.seeds, seeds.n) == (["job-r1", "job-r2", "job-r3"], [1, 2, 3], 2)
    assert (seeds.mean, seeds.standard_deviation) == pytest.approx((2.2, 0.2 * 2**0.5))


def test_names_and_labels_are_apart() -> None:
    one = job("a", metadata={"team": "kitchen"}, priority=1, planned=False)
    found = compare([one, job("a", planned=False)])
    assert found.groups == []
    assert {each.key: each.values for each in found.labels} == {"metadata.team": ["kitchen", None], "priority": [1, 0]}


def test_time_is_told_by_setting() -> None:
    def planned(flops: float, again: float, hours: float) -> TimePlan:
        return TimePlan(
            model_flops=flops, recomputed_flops=again, estimated=False, gpu="NVIDIA H200", hours_at_limit=None,
            hours_expected=hours,
        )  # fmt: skip

    short = job("a", time=planned(3e15, 0, 3.0), training={"epochs": 3})
    checkpointed: dict[str, Any] = {"memory": {"activation_checkpointing": 1}, "plan": {"activation_checkpointing": 1}}
    long = job("a", time=planned(6e15, 2e15, 8.0), training={"epochs": 6}, **checkpointed)
    found = {each.key: each.seconds for group in compare([short, long]).groups for each in group.differences}
    (before, epochs), (also_before, recomputed) = (
        [seconds or 0 for seconds in found[key] or ()] for key in ("training.epochs", "memory.activation_checkpointing")
    )
    assert (before, also_before) == (0, 0)
    assert epochs > recomputed > 0 and epochs + recomputed == pytest.approx(5 * 3600, abs=0.2)


def test_time_that_a_gpu_waits_for_the_updates_of_its_host_is_told_by_the_optimizer() -> None:
    def trained(hours: float, optimizer: str) -> JobFacts:
        time = TimePlan(
            model_flops=3e15, recomputed_flops=0, estimated=False, gpu="NVIDIA H200", hours_at_limit=None,
            hours_expected=hours,
        )  # fmt: skip
        return job("a", time=time, memory={"optimizer": optimizer}, plan={"optimizer": optimizer})

    for optimizer, told in (("adamw_offload", 3600.0), ("adamw", None)):
        groups = compare([trained(3.0, "adamw_8bit"), trained(4.0, optimizer)]).groups
        [seconds] = [each.seconds for group in groups for each in group.differences if each.key == "memory.optimizer"]
        assert (seconds or [0, None])[1] == (None if told is None else pytest.approx(told))
