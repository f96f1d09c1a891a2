"""GET /compare over HTTP: which jobs, what differs, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.comparison.answer import Comparison
from jobs.comparison.facts import settings_of
from jobs.disk.files import append_line
from jobs.events import AttemptEnded, AttemptStarted, JobFailed, JobQueued, JobSucceeded
from jobs.memory_plan import MemoryPlan
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.trainer_facts import Fault, MemoryMeasured
from tests.jobs.comparison.test_settings import LORA, VALUES
from tests.service.running import Service
from tests.service.seeded import row
from tests.support.samples import PARTS, checked, memory_plan, prepared

ROWS = DataPlan(train="rows.jsonl", input="x", target="y", rows=64)


def compared(service: Service, *jobs: str) -> Comparison:
    answer = service.get("/compare", params={"jobs": ",".join(jobs)})
    assert answer.status_code == 200, answer.text
    return Comparison.model_validate(answer.json())


def differences(found: Comparison, origin: str) -> dict[str, list[Any]]:
    return {
        each.key: list(each.values) for group in found.groups for each in group.differences if each.origin == origin
    }


def plan(service: Service, job: str, memory: MemoryPlan) -> None:
    run = service.run(job)
    run.write_plan(make_plan(run.spec(), ModelPlan(source="builtin:t5-tiny", parameters=10), ROWS, "cuda", memory))


def trained(service: Service, job: str, loss: float, *, rows_per_s: float = 100.0) -> None:
    """On an RTX 5090, to its end."""
    plan(service, job, memory_plan())
    started = AttemptStarted(
        worker="w", device="cuda", gpu="GPU-1", gpu_name="NVIDIA GeForce RTX 5090",
        versions={"longhaul": "1", "torch": "2.13.0", "driver": "580.1"},
    )  # fmt: skip
    measured = MemoryMeasured(step=1, measured_bytes=9, predicted_bytes=10, peak_bytes=10, budget_bytes=20)
    service.append(job, checked(), prepared(20, kept=60, rejected={"empty target": 4}), JobQueued(), started, measured)
    for step in (10, 20):
        append_line(service.run(job).metrics_file, row(step).model_copy(update={"rows_per_s": rows_per_s}))
    service.append(job, AttemptEnded(reason="done", step=20), JobSucceeded(model="model", step=20, loss=loss))


def test_only_what_differs_and_what_came_of_it(service: Service) -> None:
    first = service.submit(name="a", training={"epochs": 2}, metadata={"team": "kitchen"})
    other = service.submit(name="b", training={"epochs": 3})
    trained(service, first, 2.0)
    trained(service, other, 1.5, rows_per_s=50.0)
    found = compared(service, first, other)
    assert [job.id for job in found.jobs] == [first, other] and found.reference == first
    assert differences(found, "job") == {"training.epochs": [2, 3]} and found.causes == []
    assert differences(found, "plan") == {"steps": [1, 2]}
    of_run = differences(found, "run")
    assert of_run["final_loss"] == [2.0, 1.5] and of_run["metrics.rows_per_s"] == [100.0, 50.0]
    assert "status" not in of_run and "metrics.mfu" not in of_run and "versions.torch" not in of_run
    assert {each.key: each.values for each in found.labels} == {"name": ["a", "b"], "metadata.team": ["kitchen", None]}
    assert found.jobs[0].memory is not None and found.jobs[0].memory.measured_bytes == 9
    assert [group.name for group in found.groups][-1] == "outcome"
    assert found.equal > 40


def test_a_refused_job_beside_one_that_fits(service: Service) -> None:
    fits, refused = service.submit(name="fits"), service.submit(name="refused", memory={"micro_batch": 16})
    plan(service, fits, memory_plan())
    parts = {**PARTS, "activations": 2 * PARTS["activations"]}
    plan(service, refused, memory_plan(micro_batch=16, parts=parts, peak_bytes=sum(parts.values())))
    service.append(fits, checked())
    service.append(refused, JobFailed(error=Fault(code="does_not_fit", message="it needs 35.0 GiB")))
    [cause] = compared(service, refused, fits).causes
    assert (cause.job, cause.bytes) == (refused, PARTS["activations"])
    assert cause.text == "refused needs 9.0 GiB more than fits: memory.micro_batch is 16, not auto (+9.0 GiB)."


def test_which_jobs_can_be_compared(service: Service) -> None:
    job, other = service.submit(), service.submit()
    for jobs, words in (
        ("", "jobs names 0 jobs: 2 to 10 can be compared"),
        (job, "jobs names 1 job"),
        (",".join([job] * 11), "jobs names 11 jobs"),
        (f"{job},{job}", f"jobs names {job} twice"),
    ):
        answer = service.get("/compare", params={"jobs": jobs})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (422, "jobs") and words in error["message"]
    for unknown in ("job-unknown", "../etc"):
        answer = service.get("/compare", params={"jobs": f"{job},{unknown}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    service.run(other).spec_file.write_text("{")
    answer = service.get("/compare", params={"jobs": f"{job},{other}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "damaged")
    assert f"job {other} is damaged: spec.json" in answer.json()["error"]["message"]


def test_jobs_that_nobody_has_checked_are_compared_by_what_they_ask_for(service: Service) -> None:
    found = compared(service, service.submit(), service.submit(model="builtin:qwen-tiny"))
    assert differences(found, "job") == {"model": ["builtin:t5-tiny", "builtin:qwen-tiny"]}
    assert [job.memory for job in found.jobs] == [None, None]


@pytest.fixture
def original(service: Service) -> str:
    return service.submit(**LORA)


# In a merge patch null stands for the default.
PATCHES = st.fixed_dictionaries(
    {},
    optional={key: each.filter(lambda value: value is not None) for key, each in VALUES.items() if key != "data.train"},
)


@settings(
    deadline=None,
    max_examples=25,
    # Each of many keys may be null, which is left out here: by chance that is often.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(changes=PATCHES)
def test_a_clone_differs_in_exactly_what_was_set(service: Service, original: str, changes: dict[str, Any]) -> None:
    patch: dict[str, Any] = {}
    for key, value in changes.items():
        *parts, last = key.split(".")
        place = patch
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    clone = str(service.post(f"/jobs/{original}/clone", json=patch).json()["id"])
    found = compared(service, original, clone)
    told = differences(found, "job") | {each.key: each.values for each in found.labels}
    before = {key: each.value for key, each in settings_of(service.run(original).spec()).items()}
    expected = {key: [before.get(key), value] for key, value in changes.items() if before.get(key) != value}
    assert told == expected
    assert differences(found, "plan") == differences(found, "run") == {}
