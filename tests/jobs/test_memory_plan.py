"""The memory plan in words, and as events tell it."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.events import Event, JobChecked, JobPrepared, JobSubmitted
from jobs.memory_plan import GIB, DiskPlan, MemoryPlan, gibibytes, layers
from jobs.record import fold
from tests.memory_plans import PARTS, memory_plan


def test_a_plan_in_one_line() -> None:
    assert memory_plan().text == (
        "26.0 GiB at the peak of 31.0 GiB (NVIDIA GeForce RTX 5090; 5.0 GiB free): "
        "adamw_8bit, no recomputation, micro-batch 8 of 256/256 tokens"
    )
    assert "(memory.budget; " in memory_plan(budget_source="job").text
    assert "(NVIDIA GeForce RTX 5090, assumed; " in memory_plan(budget_source="assumed").text
    assert "(host memory; " in memory_plan(budget_source="host", device="cpu", card=None).text
    assert "every 2nd layer recomputed" in memory_plan(recompute_layers=2).text


def test_layers_and_sizes_for_people() -> None:
    assert [layers(every) for every in (0, 1, 3, 4, 24)] == [
        "no recomputation", "every layer recomputed", "every 3rd layer recomputed", "every 4th layer recomputed",
        "every 24th layer recomputed",
    ]  # fmt: skip
    assert (gibibytes(27 * GIB), gibibytes(35 << 20), gibibytes(-GIB)) == ("27.0 GiB", "35 MiB", "-1.0 GiB")


def disk(free: int) -> DiskPlan:
    return DiskPlan(checkpoint_bytes=10 * GIB, checkpoints=5, model_bytes=5 * GIB, free_bytes=free * GIB)


@pytest.mark.parametrize(("free", "room"), [(55, None), (54, 4), (16, 1)])
def test_a_disk_too_small_for_every_checkpoint_is_in_the_text(free: int, room: int | None) -> None:
    text = memory_plan(disk=disk(free)).text
    if room is None:
        assert disk(free).text is None and text == memory_plan().text
    else:
        assert text.endswith(
            f"; the disk has room for {room} of 5 checkpoints ({free}.0 GiB free, 55.0 needed): "
            "saves that do not fit are skipped"
        )


def test_events_tell_every_figure_but_the_parts_of_what_was_not_chosen() -> None:
    plan = memory_plan()
    told = plan.told()
    assert (told["text"], told["parts"], told["peak_bytes"]) == (plan.text, PARTS, plan.peak_bytes)
    assert [candidate["optimizer"] for candidate in told["candidates"]] == ["adamw_8bit", "adamw"]
    assert not any("parts" in candidate for candidate in told["candidates"])
    assert MemoryPlan.model_validate_json(plan.model_dump_json()) == plan
    assert [plan.chose(each) for each in plan.candidates] == [True, False]


def test_the_record_has_memory_as_checked_and_then_as_prepared() -> None:
    def told(**changes: Any) -> dict[str, Any]:
        return memory_plan(**changes).told()

    resolved = {"micro_batch": 4, "recompute_layers": 2, "optimizer": "adamw_8bit", "compile": True}
    facts = [
        JobSubmitted(name="a", model="m", spec_sha256="0"),
        JobChecked(plan={"steps": 9, "resolved": resolved, "memory": told(micro_batch=4, recompute_layers=2)}),
        JobPrepared(data={}, steps=7, time=None, memory=told()),
    ]
    events = [Event(number=n, job="job-a", at=n, fact=fact) for n, fact in enumerate(facts, 1)]
    assert fold("job-a", events[:2]).plan["memory"]["micro_batch"] == 4
    plan = fold("job-a", events).plan
    assert plan["memory"] == told()
    assert plan["resolved"] == resolved | {"micro_batch": 8, "recompute_layers": 0}
    without = JobPrepared(data={}, steps=7)  # of an earlier version
    assert fold("job-a", [*events[:2], events[2].model_copy(update={"fact": without})]).plan == events[1].fact.plan
