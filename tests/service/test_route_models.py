"""Routes return the models of their answers, and nothing else passes for one."""

from __future__ import annotations

import inspect
import json
from typing import get_args

import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from jobs.redis.connection import connect
from jobs.redis.scripts import job_key
from service.main import create_app
from service.settings import ServiceSettings
from tests.service.running import Service

AS_THEY_ARE = {
    "get_plan": "the file as check and prepare wrote it",
    "get_job": "JSON of a model, made once for each state of a job",
    "list_jobs": "as above",
    "list_metrics": "10,000 rows would take a second to validate; the contract of the tests does it",
}


def test_every_route_returns_the_model_of_its_answer() -> None:
    found = [each.original_route for each in iter_route_contexts(create_app(ServiceSettings()).routes)]
    routes = [route for route in found if isinstance(route, APIRoute)]
    described = {route.name: route for route in routes if route.response_model is not None}
    assert len(described) > 15 and described.keys() >= AS_THEY_ARE.keys()
    for name in described.keys() - AS_THEY_ARE.keys():
        returned = inspect.signature(described[name].endpoint, eval_str=True).return_annotation
        assert described[name].response_model in (get_args(returned) or (returned,)), name


def test_what_is_no_answer_is_a_fault(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.routes.datasets._answer", lambda _: {"nonsense": 1})
    answer = service.request("PUT", "/datasets/rows.jsonl", data=b"{}\n")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_a_job_whose_record_is_none_is_damaged_each_time(service: Service) -> None:
    job = service.submit()
    assert service.get("/jobs").status_code == service.get(f"/jobs/{job}").status_code == 200
    damaged = json.dumps({"id": job, "metadata": {"team": 1}})
    connect(service.settings.redis_url).hset(job_key(job), "record", damaged)
    for path in ("/jobs", f"/jobs/{job}", "/jobs", f"/jobs/{job}"):
        answer = service.get(path)
        shown = answer.json()["data"][0] if path == "/jobs" else answer.json()
        assert (answer.status_code, shown["status"], shown["error"]["code"]) == (200, "damaged", "unreadable_record")
