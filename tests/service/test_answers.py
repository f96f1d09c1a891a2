"""Real answers beside the document's schemas and OpenAI's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from jobs import answers
from jobs.events import EVENT_TYPES
from service.answers import EVENT
from service.openapi import examples
from tests.service.running import Service
from tests.service.seeded import seed

OPENAI = Path(__file__).resolve().parents[3] / "shared" / "specs" / "openai_fine_tuning.schema.json"
DIFFERENT = {
    "FineTuningJob status": "ours has dry runs and pauses, and check and prepare look at more than files",
    "FineTuningJob method.type": "theirs names ways to train by example; ours which weights are trained",
    "FineTuningJobEvent type": "theirs are `message` and `metrics`; ours says what happened",
}
"""Where our answers leave OpenAI's schemas, and why. Everything else is as theirs."""


def test_jobs_events_checkpoints_and_errors_have_openais_shapes(service: Service) -> None:
    if not OPENAI.exists():
        pytest.skip("OpenAI's schemas are not in the repository")
    jobs = seed(service)
    shown: list[tuple[str, Any]] = [("FineTuningJob", service.get(f"/jobs/{job}").json()) for job in jobs.values()]
    shown += [
        ("ListPaginatedFineTuningJobsResponse", service.get("/jobs").json() | {"data": []}),
        ("ListFineTuningJobEventsResponse", service.get(f"/jobs/{jobs['succeeded']}/events").json() | {"data": []}),
        ("ErrorResponse", service.get("/jobs/job-unknown").json()),
        ("ErrorResponse", service.post("/jobs", json={"data": {"train": 5}}).json()),
        ("ErrorResponse", service.post(f"/jobs/{jobs['failed']}/cancel").json()),
    ]
    events = service.get(f"/jobs/{jobs['succeeded']}/events").json()["data"]
    shown += [("FineTuningJobEvent", event) for event in events]
    checkpoints = service.get(f"/jobs/{jobs['succeeded']}/checkpoints").json()
    assert [each["step_number"] for each in checkpoints["data"]] == [20, 10]
    shown += [("ListFineTuningJobCheckpointsResponse", checkpoints)]
    schema = json.loads(OPENAI.read_text())
    different = set()
    for name, answer in shown:
        validator = Draft202012Validator(schema | {"$ref": f"#/$defs/{name}"})
        for error in validator.iter_errors(answer):
            different.add(f"{name} {'.'.join(map(str, error.absolute_path))}")
    assert different == set(DIFFERENT)


def test_every_type_of_event_is_described() -> None:
    described = EVENT.json_schema()["discriminator"]["mapping"]
    assert sorted(described) == sorted(EVENT_TYPES)


def test_examples_are_answers_that_could_be_real() -> None:
    """Made by the same lines, so only the models can be wrong; each example has a schema of its name."""
    for name, example in examples.by_schema().items():
        model = getattr(answers, name, None) or getattr(examples, name)
        TypeAdapter(model).validate_json(json.dumps(example), strict=True)
