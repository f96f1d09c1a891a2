"""`longhaul plan --hours`: what fits, and nothing invented where no speed is known."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from jobs.plan import DataPlan, ModelPlan, Plan, TimePlan, make_plan
from jobs.preview import DataPreview
from jobs.spec import parse_spec
from longhaul import plan
from longhaul.plan import FAMILIES, DryRun, Fit, fits, print_fits, smaller

JOB: dict[str, Any] = {"model": "google/flan-t5-xl", "data": {"train": "rows.jsonl"}}


def plan_of(job: dict[str, Any], hours: float | None, *, assumed: bool = False) -> Plan:
    """1,000,000 rows, 5 epochs of batches of 128."""
    data = DataPlan(train="x", input="x", target="x", rows=1_000_000)
    time = TimePlan(
        model_flops=1.0, recomputed_flops=0.0, estimated=False, gpu="NVIDIA H200", assumed=assumed,
        hours_at_limit=hours, hours_expected=hours,
    )  # fmt: skip
    return make_plan(parse_spec(job), ModelPlan(source=job["model"], parameters=1), data).model_copy(
        update={"time": time}
    )


def checked(job: dict[str, Any], hours: float | None, **more: Any) -> DryRun:
    """A dry run of it, expected to take so long."""
    parsed = parse_spec(job)
    shown: Any = {
        "id": "job-1", "status": "validated", "error": None, "model": job["model"], "spec": job,
        "method": parsed.method.model_dump(),
        "hyperparameters": {"n_epochs": parsed.training.epochs, "batch_size": parsed.training.batch_size},
    }  # fmt: skip
    return DryRun(shown, plan_of(job, hours, **more), DataPreview(sources=[]))


class FakeService:
    """Remembers what is submitted, and what is deleted."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.deleted = 0

    def submit(self, job: dict[str, Any], **_: Any) -> None:
        self.jobs.append(job)

    def delete(self, job: str) -> None:
        self.deleted += 1


def found(monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], hours: list[float], **more: Any) -> list[Fit]:
    """What fits into 40 hours; `hours`: expected of the job, and of each other that is checked, in turn."""
    service: Any = FakeService()
    left = iter(hours[1:])

    def dry_run(api: Any, make: Callable[[], object], console: object) -> DryRun:
        make()
        return checked(service.jobs[-1], next(left))

    monkeypatch.setattr(plan, "dry_run", dry_run)
    every = list(fits(service, job, checked(job, hours[0], **more), 40.0, Console()))
    assert service.deleted == len(service.jobs) == len(every) - 1, "the dry runs leave nothing behind"
    return every


def test_this_job_lora_and_the_next_smaller_model(monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_is, lora, large = found(monkeypatch, JOB, [400.0, 200.0, 20.0])
    assert as_it_is == Fit("as it is", 3906, 3906 * 128, 3906 * 128 / 1_000_000, 400.0)
    assert lora == Fit("method=lora", 7812, 7812 * 128, 7812 * 128 / 1_000_000, 200.0)
    assert (large.job, large.steps, large.epochs) == ("model=google/flan-t5-large", 39063, 5.0), "never more than asked"
    out = io.StringIO()
    print_fits([as_it_is, lora, large], 40.0, Console(file=out, width=120))
    assert "what fits into 1 d 16 h" in out.getvalue() and "16 d 16 h" in out.getvalue()
    assert "--set training.max_hours=40" in out.getvalue()


def test_what_cannot_be_changed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fit.job for fit in found(monkeypatch, JOB | {"model": "org/own", "method": "lora"}, [400.0])] == [
        "as it is"
    ]
    resumed = JOB | {"resume_from": "job-1a2b3c"}
    assert [fit.job for fit in found(monkeypatch, resumed, [400.0])] == ["as it is"]


def test_nothing_is_invented_where_no_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    [fit] = found(monkeypatch, JOB, [400.0], assumed=True)
    assert fit == Fit("as it is")
    out = io.StringIO()
    print_fits([fit], 40.0, Console(file=out, width=200))
    assert "what fits is not known: no train worker has reported a GPU" in out.getvalue()


def test_a_family_has_each_model_once_and_its_smallest_has_none_below() -> None:
    every = [model for family in FAMILIES for model in family]
    assert len(every) == len(set(every))
    assert smaller("google/flan-t5-small") is smaller("org/unknown") is None
    assert smaller("Qwen/Qwen2.5-7B-Instruct@main") == "Qwen/Qwen2.5-3B-Instruct"
