"""The memory plan in words, and as events tell it."""

from __future__ import annotations

import pytest

from jobs.events import AnyFact, Event, JobSubmitted
from jobs.memory_plan import DiskPlan, MemoryPlan, layers
from jobs.plan import Resolved
from jobs.record import fold
from jobs.spec import ResourcesSpec
from jobs.text.units import GIB
from tests.support.samples import PARTS, checked, memory_plan, prepared


def test_a_plan_in_one_line() -> None:
    assert memory_plan().text == (
        "peak memory 26.0 GiB; budget 31.0 GiB (NVIDIA GeForce RTX 5090), 5.0 GiB to spare; "
        "adamw_8bit, no recomputation, micro-batch 8; planned for rows of at most 256/256 tokens"
    )
    assert "(memory.budget), " in memory_plan(budget_source="job").text
    assert "(NVIDIA GeForce RTX 5090, assumed), " in memory_plan(budget_source="assumed").text
    assert "(host memory), " in memory_plan(budget_source="host", device="cpu", gpu=None).text
    assert "every 2nd layer recomputed" in memory_plan(activation_checkpointing=2).text


def test_what_earlier_versions_said_of_sharded_weights_is_left_out() -> None:
    plan = memory_plan()
    assert MemoryPlan.model_validate(plan.model_dump() | {"sharded_bytes": 0}) == plan
    assert ResourcesSpec.model_validate({"gpus": "auto"}).gpus == 1


def test_layers_for_people() -> None:
    assert [layers(every) for every in (0, 1, 3, 4, 24)] == [
        "no recomputation", "every layer recomputed", "every 3rd layer recomputed", "every 4th layer recomputed",
        "every 24th layer recomputed",
    ]  # fmt: skip


def disk(free: int) -> DiskPlan:
    return DiskPlan(checkpoint_bytes=10 * GIB, checkpoints=5, model_bytes=5 * GIB, free_bytes=free * GIB)


@pytest.mark.parametrize(("free", "room"), [(55, None), (54, 4), (16, 1)])
def test_a_disk_too_small_for_every_checkpoint_is_in_the_text(free: int, room: int | None) -> None:
    text = memory_plan(disk=disk(free)).text
    if room is None:
        assert disk(free).text is None and text == memory_plan().text
    else:
        assert text.endswith(
            f"; the disk has room for {room} of 5 checkpoints ({free}.0 GiB free, 55.0 GiB needed): "
            "saves that do not fit are skipped"
        )


def test_events_tell_every_figure_but_the_parts_of_what_was_not_chosen() -> None:
    plan = memory_plan()
    told = plan.summary()
    assert (told.text, told.parts, told.peak_bytes) == (plan.text, PARTS, plan.peak_bytes)
    assert [candidate.optimizer for candidate in told.candidates] == ["adamw_8bit", "adamw"]
    assert not any("parts" in candidate for candidate in told.model_dump()["candidates"])
    assert MemoryPlan.model_validate_json(plan.model_dump_json()) == plan
    assert [plan.chose(each) for each in plan.candidates] == [True, False]


def test_the_record_has_memory_as_checked_and_then_as_prepared() -> None:
    resolved = Resolved(micro_batch=4, activation_checkpointing=2, optimizer="adamw", compile=True)
    first = checked(resolved=resolved, memory=memory_plan(micro_batch=4, activation_checkpointing=2).summary())
    memory = memory_plan().summary()
    facts: list[AnyFact] = [JobSubmitted(name="a", model="m", spec_sha256="0"), first, prepared(7, memory=memory)]
    events = [Event(number=n, job="job-a", at=n, fact=fact) for n, fact in enumerate(facts, 1)]
    assert fold("job-a", events[:2]).plan == first.plan
    plan = fold("job-a", events).plan
    changed = {"micro_batch": 8, "activation_checkpointing": 0, "optimizer": "adamw_8bit"}
    assert plan == first.plan.model_copy(update={"memory": memory, "resolved": resolved.model_copy(update=changed)})
    without = prepared(7)  # of an earlier version
    assert fold("job-a", [*events[:2], events[2].model_copy(update={"fact": without})]).plan == first.plan
