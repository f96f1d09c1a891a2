"""POST /jobs/{job}/clone: the same again, with changes."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.redis.connection import Tickets, connect
from jobs.state import Stage
from service.jobs.submissions import merge_patch
from tests.service.running import Service
from tests.support.samples import STATES

ODD = {
    "name": "odd",
    "data": {"train": "rows.jsonl", "validation": 0.25, "max_input_tokens": 64},
    "training": {"epochs": 2, "dropout": 0.0, "max_grad_norm": None},
    "priority": 4,
    "metadata": {"team": "kitchen", "run": "1"},
    "integrations": {"wandb": None, "discord": False},
}


def clone(service: Service, job: str, patch: Any, *, key: str | None = None, query: str = "") -> Any:
    headers = {"Idempotency-Key": key} if key else {}
    return service.post(f"/jobs/{job}/clone{query}", json=patch, headers=headers)


def test_an_empty_patch_or_none_makes_the_same_again(service: Service) -> None:
    job = service.submit(**ODD)
    service.append(job, *STATES["failed"])
    for answer in (clone(service, job, {}), service.post(f"/jobs/{job}/clone")):
        assert answer.status_code == 202
        again = answer.json()
        assert answer.headers["Location"] == f"/jobs/{again['id']}" != f"/jobs/{job}"
        assert again["spec"] == service.get(f"/jobs/{job}").json()["spec"]
        assert (again["cloned_from"], again["status"], again["priority"]) == (job, "validating", 4)
        assert service.run(again["id"]).spec() == service.run(job).spec()
        assert service.run(again["id"]).record().cloned_from == job
        event = service.get(f"/jobs/{again['id']}/events").json()["data"][0]
        assert event["message"] == f"submitted as 'odd', model builtin:t5-tiny, a clone of {job}"
    assert service.get(f"/jobs/{job}").json()["cloned_from"] is None
    assert Tickets(connect(service.settings.redis_url)).count(Stage.CHECK) == 3


def test_a_patch_replaces_what_it_names_and_null_is_the_default_again(service: Service) -> None:
    job = service.submit(**ODD)
    patch = {
        "name": "slower",
        "data": {"max_input_tokens": None},
        "training": {"learning_rate": 5e-5, "epochs": None},
        "metadata": {"run": "2", "team": None},
        "integrations": {"wandb": {"project": "p"}},
    }
    spec = clone(service, job, patch).json()["spec"]
    assert spec["name"] == "slower"
    assert (spec["data"]["max_input_tokens"], spec["data"]["validation"]) == (512, 0.25)
    training = {key: spec["training"][key] for key in ("learning_rate", "epochs", "dropout", "max_grad_norm")}
    assert training == {"learning_rate": 5e-5, "epochs": 5, "dropout": 0.0, "max_grad_norm": None}
    assert spec["metadata"] == {"run": "2"}
    assert spec["integrations"] == {"wandb": {"project": "p", "entity": None, "artifacts": False}, "discord": False}


def test_a_dry_run_that_went_well_is_cloned_to_run_and_the_other_way_round(service: Service) -> None:
    dry = service.post("/jobs?dry_run=true", json={"data": {"train": "rows.jsonl"}}).json()["id"]
    service.append(dry, *STATES["validated"])
    real = clone(service, dry, {}).json()
    assert real["dry_run"] is False
    assert clone(service, real["id"], {}, query="?dry_run=true").json()["dry_run"] is True


BAD: list[tuple[str, str | None]] = [
    ('{"training": {"epoch": 3}}', "training.epoch"),
    ('{"training": {"epochs": "many"}}', "training.epochs"),
    ('{"data": {"train": null}}', "data.train"),
    ('{"data": {"train": "../../etc/passwd.csv"}}', "data.train"),
    ('{"training": 3}', "training"),
    ("[]", None),
    ("null", None),
    ("not JSON", None),
]


def test_a_patch_that_makes_no_job_is_refused_by_name(service: Service) -> None:
    job = service.submit()
    for patch, param in BAD:
        answer = service.post(f"/jobs/{job}/clone", data=patch)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), patch
    for depth in range(900, 1001, 10):  # what the parser of JSON still takes, merging may not
        assert service.post(f"/jobs/{job}/clone", data='{"name":' * depth + "{}" + "}" * depth).status_code == 422
    assert [run.name for run in service.settings.runs.iterdir()] == [job]


def test_a_key_stands_for_one_clone(service: Service) -> None:
    job, other = service.submit(), service.submit()
    first, again = (clone(service, job, {"name": "x"}, key="k") for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    refused = [
        clone(service, job, {"name": "y"}, key="k"),
        clone(service, other, {"name": "x"}, key="k"),
        clone(service, job, {"name": "x"}, key="k", query="?dry_run=true"),
    ]
    assert [answer.status_code for answer in refused] == [409] * 3


# The examples of RFC 7396, appendix A, as far as a patch is an object.
RFC_7396: list[tuple[Any, Any, Any]] = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


@pytest.mark.parametrize(("target", "patch", "result"), RFC_7396)
def test_patches_are_merged_as_the_standard_says(target: Any, patch: Any, result: Any) -> None:
    assert merge_patch(target, patch) == result
