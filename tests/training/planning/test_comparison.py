"""Two jobs of which one is refused: the comparison names what makes the difference, by the planner's real figures.

Seed 002: an adapter run of Qwen2.5-7B fits a GPU of 24 GB and another does not; nobody could say why. Longhaul loads
every base model in 16 bits: a plan of one in fp32 is predicted here as the planner would, with the same code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from jobs.comparison.answer import Cause, Comparison
from jobs.comparison.compare import compare
from jobs.comparison.facts import JobFacts
from jobs.errors import DoesNotFit
from jobs.events import Event
from jobs.gpus import GpuFacts
from jobs.memory_plan import MemoryPlan
from jobs.plan import DataPlan, ModelPlan, make_plan, resolve_dtype
from jobs.record import JobRecord
from jobs.spec import parse_spec
from jobs.state import Status
from jobs.text.units import GIB, format_bytes
from jobs.trainer_facts import Fault, ModelLoaded
from tests.support.stack import ROOT
from tests.training.planning.test_qwen import GPU, QWEN_7B
from worker.training.planning import memory_plan as planner
from worker.training.planning.budget import Budget, find_budget
from worker.training.planning.predictor import Predictor
from worker.training.tasks.causal.builtin import CONFIG
from worker.training.tasks.causal.task import Causal

TINY: Mapping[str, Any] = {
    "model": "builtin:qwen-tiny",
    "data": {"train": "chats.jsonl", "max_tokens": 64},
    "method": {"type": "lora", "rank": 8},
    "training": {"batch_size": 8},
    "memory": {"micro_batch": 2, "activation_checkpointing": 2, "optimizer": "adamw_8bit"},
}
QWEN: Mapping[str, Any] = {
    **TINY,
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "data": {"train": "chats.jsonl", "max_tokens": 512},
    "method": {"type": "lora", "rank": 128},
    "memory": {"micro_batch": 1, "activation_checkpointing": 1, "optimizer": "adamw_8bit"},
}


class Planned:
    """A model and a GPU, for which jobs are planned as *check* does it: for rows as long as the job allows."""

    def __init__(self, config: Mapping[str, Any], job: Mapping[str, Any], gpu: GpuFacts | None = None) -> None:
        self._config, self._job, self._gpu = dict(config), job, gpu
        self._parameters = Causal().layout(self._config).parameters
        self.limit: int | None = None
        """What a peak may reach; None: as much as the GPU has."""

    def job(self, name: str, changes: Mapping[str, Mapping[str, Any]] = {}) -> JobFacts:
        """Checked, and refused where it does not fit."""
        given = {
            key: {**part, **changes.get(key, {})} if isinstance(part, dict) else part
            for key, part in {**self._job, **{key: {} for key in changes.keys() - self._job.keys()}}.items()
        }
        spec = parse_spec({**given, "name": name})
        budget = find_budget(spec.memory, "cuda", self._gpu)
        if self.limit is not None:
            budget = Budget(self.limit, "gpu", budget.gpu, margin=0)
        tokens = spec.data.max_tokens
        error = None
        try:
            memory = planner.plan_memory(
                spec,
                Causal(),
                self._config,
                (tokens, tokens),
                device="cuda",
                budget=budget,
                dtype=resolve_dtype(spec, budget.gpu),
            )
        except DoesNotFit as refused:
            memory, error = refused.memory, Fault(code=refused.detail_code, message=str(refused), hint=refused.hint)
        data = DataPlan(train="chats.jsonl", input=None, target="messages", rows=100)
        plan = make_plan(
            spec, ModelPlan(source=spec.model, parameters=self._parameters), data, "cuda", memory, task="causal"
        )
        status = Status.FAILED if error else Status.QUEUED
        return JobFacts.of(spec, JobRecord(id=f"job-{name}", status=status, error=error), plan, [])


def memory_of(job: JobFacts) -> MemoryPlan:
    assert job.memory is not None
    return job.memory


def cause_of(found: Comparison) -> Cause:
    [cause] = found.causes
    return cause


def asked_differently(found: Comparison) -> set[str]:
    """Keys of the job file that differ, labels aside."""
    return {each.key for group in found.groups for each in group.differences if each.origin == "job"}


CHANGES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "data.max_tokens": {"data": {"max_tokens": 256}},
    "memory.micro_batch": {"memory": {"micro_batch": 8}},
    "memory.activation_checkpointing": {"memory": {"activation_checkpointing": 0}},
    "memory.optimizer": {"memory": {"optimizer": "adamw"}},
    "method.rank": {"method": {"rank": 64}},
    "method.adapter_dtype": {"method": {"adapter_dtype": "float32"}},
    "method.dora": {"method": {"dora": True}},
    "method.base_dtype": {"method": {"base_dtype": "float16"}},
}


@pytest.fixture(scope="module")
def tiny() -> tuple[Planned, JobFacts]:
    """A small model on a GPU that has room for nothing more."""
    planned = Planned(CONFIG, TINY)
    planned.limit = memory_of(planned.job("fits")).peak_bytes
    return planned, planned.job("fits")


@pytest.mark.parametrize("key", CHANGES)
def test_one_setting_explains_every_byte(key: str, tiny: tuple[Planned, JobFacts]) -> None:
    planned, fits = tiny
    refused = planned.job("refused", CHANGES[key])
    found = compare([fits, refused])
    cause = cause_of(found)
    assert asked_differently(found) == {key} and found.reference == "job-fits"
    assert [line.key for line in cause.lines] == [key] and cause.together == []
    more = memory_of(refused).peak_bytes - memory_of(fits).peak_bytes
    assert cause.bytes == cause.lines[0].bytes == more > 0
    assert (cause.unexplained_bytes, cause.lines[0].estimated) == (0, False)
    assert cause.text.startswith(f"refused needs {format_bytes(more)} more than fits: ")


def test_settings_that_share_no_category_each_explain_their_own(tiny: tuple[Planned, JobFacts]) -> None:
    planned, fits = tiny
    settings = ("memory.micro_batch", "memory.optimizer")
    alone = {key: memory_of(planned.job("alone", CHANGES[key])).parts for key in settings}
    refused = planned.job("refused", {"memory": {"micro_batch": 8, "optimizer": "adamw"}})
    lines = {line.key: line.parts for line in cause_of(compare([fits, refused])).lines}
    before = memory_of(fits).parts
    for key, category in zip(settings, ("activations", "optimizer"), strict=True):
        assert lines[key][category] == alone[key][category] - before[category] > 0


def test_rows_and_tokens_divide_what_both_of_them_multiply(tiny: tuple[Planned, JobFacts]) -> None:
    planned, fits = tiny
    refused = planned.job("refused", {"data": {"max_tokens": 256}, "memory": {"micro_batch": 8}})
    cause = cause_of(compare([fits, refused]))
    assert {line.key for line in cause.lines} == {"data.max_tokens", "memory.micro_batch"} and not cause.together
    assert all(line.estimated for line in cause.lines), "only what they cost together is known"
    more = memory_of(refused).peak_bytes - memory_of(fits).peak_bytes
    assert cause.bytes == pytest.approx(more, abs=8)
    by_category = {name: sum(line.parts[name] for line in cause.lines) for name in ("activations", "temporaries")}
    for name, cost in by_category.items():
        assert cost == pytest.approx(memory_of(refused).parts[name] - memory_of(fits).parts[name], abs=4)


def test_seed_002_names_the_three_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Base dtype, adapter dtype and sequence length; of two Qwen2.5-7B on 24 GB, one is refused."""
    planned = Planned(QWEN_7B, QWEN, GPU)
    fits = planned.job("mtup")
    monkeypatch.setattr(planner, "Predictor", functools.partial(Predictor, dtype=torch.float32))
    refused = planned.job("baseline", {"data": {"max_tokens": 2048}, "method": {"adapter_dtype": "float32"}})
    found = compare([fits, refused])
    assert asked_differently(found) == {"data.max_tokens", "method.adapter_dtype"}, "there is no key for a base in fp32"
    cause = cause_of(found)
    assert [line.key for line in cause.lines] == ["model.dtype", "method.adapter_dtype", "data.max_tokens"]
    weights = 2 * fits.parameters
    assert cause.lines[0].parts["weights"] == pytest.approx(weights, rel=1e-3)
    adapters = 2 * memory_of(fits).trained_parameters
    assert cause.lines[1].parts == pytest.approx({"weights": adapters, "gradients": adapters}, rel=1e-3)
    more = memory_of(refused).peak_bytes - memory_of(fits).peak_bytes
    assert cause.bytes == pytest.approx(more, abs=8) and cause.unexplained_bytes == 0
    named = {line.key for line in cause.lines}
    assert all(named.issuperset(each.keys) for each in cause.together)
    assert cause.text.startswith(
        "baseline needs 16.5 GiB more than mtup: the model is float32, not bfloat16 (+14.2 GiB), "
        "the adapters are float32, not bfloat16 (+1.2 GiB), data.max_tokens is 2,048, not 512 (+"
    )


def test_the_example_in_the_docs_is_the_planners() -> None:
    planned = Planned(QWEN_7B, QWEN, GPU)
    planned.limit = 19 * GIB
    refused = planned.job("soups-long", {"data": {"max_tokens": 2048}, "method": {"adapter_dtype": "float32"}})
    cause = cause_of(compare([planned.job("soups"), refused]))
    assert cause.text in (ROOT / "docs" / "memory.md").read_text().replace("\n> ", " ")


def test_seed_003_names_the_model_that_was_loaded_in_fp32() -> None:
    """Of two equal jobs one ran out of memory: it was loaded in fp32. Longhaul itself never does: its event says it."""
    planned = Planned(CONFIG, TINY)
    good, bad = planned.job("bf16"), planned.job("fp32")

    def loaded(job: JobFacts, dtype: str, width: int, ratio: float) -> JobFacts:
        fact = ModelLoaded(
            parameters=job.parameters, parameter_bytes=width * job.parameters, dtype=dtype, device="cuda:0",
            seconds=9.0, peak_ratio=ratio,
        )  # fmt: skip
        event = Event(number=1, job=job.record.id, at=1.0, attempt=1, fact=fact)
        return JobFacts.of(job.spec, job.record, job.plan, [event])

    failed = bad.record.model_copy(
        update={"status": Status.FAILED, "error": Fault(code="out_of_memory", message="memory ran out")}
    )
    found = compare(
        [loaded(good, "bfloat16", 2, 1.01), loaded(dataclasses.replace(bad, record=failed), "float32", 4, 3.0)]
    )
    cause = cause_of(found)
    assert [line.key for line in cause.lines] == ["model.dtype"] and cause.together == []
    assert cause.bytes == 2 * good.parameters
    more = format_bytes(2 * good.parameters)
    assert cause.text == f"fp32 needs {more} more than bf16: the model is float32, not bfloat16 (+{more})."
    assert asked_differently(found) == set()
    [model] = [group for group in found.groups if group.name == "model"]
    assert {each.key: each.values for each in model.differences} == {
        "model.dtype": ["bfloat16", "float32"],
        "model.peak_ratio": [1.0, 3.0],
    }
