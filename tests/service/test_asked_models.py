"""Asking a model for a stream: what is refused before anything waits, and signs of life until an answer comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.redis.connection import connect
from jobs.redis.requests import Requests
from tests.service.answering import DONE, OUTPUT, Parts, answering
from tests.service.running import Service, running
from tests.service.seeded import leave_behind
from tests.support.samples import heartbeat

MESSAGES = [{"role": "user", "content": "x"}]


def with_model(service: Service) -> str:
    """A job with a model, and a worker that has been heard of."""
    job = service.submit()
    leave_behind(service.run(job))
    service.store.workers.report(heartbeat("generate-box"))
    return job


def asks(job: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The same stream by both routes."""
    chat = {"model": f"ft:{job}", "messages": MESSAGES, "stream": True}
    return [(f"/jobs/{job}/generate", {"input": "x", "stream": True}), ("/v1/chat/completions", chat)]


def test_one_stream_too_many_is_refused_before_its_request_waits(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, max_streams=0) as service:
        for path, body in asks(with_model(service)):
            refused = service.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
            assert refused.headers["Retry-After"] == "10"
        assert connect(redis_url).keys("longhaul:requests:*") == []


def test_a_stream_shows_that_it_lives_until_the_answer_comes(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, keep_alive_s=0.05) as service:
        requests = Requests(connect(redis_url))
        for path, body in asks(with_model(service)):
            with service.post(path, json=body, stream=True) as answer:
                lines = answer.iter_lines()
                request = requests.take("generate")
                assert request is not None
                assert any(line == b": keep-alive" for line in lines)
                requests.answer(request.id, 1, "text", {"model": "trained", "index": 0, "text": "bread"})
                assert any(b"bread" in line for line in lines)
                requests.answer(request.id, 2, "error", {"code": "x", "message": "it broke", "hint": None})
                assert any(b"it broke" in line for line in lines)


@pytest.mark.parametrize("given", ["99999999", "step-30"])
def test_a_checkpoint_that_is_not_there_is_refused_before_its_request_waits(service: Service, given: str) -> None:
    job = with_model(service)
    refused = service.post(f"/jobs/{job}/generate", json={"input": "x", "checkpoint": given})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (409, "no_checkpoint")
    assert error["message"] == f"job {job} has no checkpoint step-{int(given.removeprefix('step-')):08d}"
    assert Requests(connect(service.settings.redis_url)).take("generate") is None


CALL = {"id": "abc123def", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}
CALLED: Parts = [
    ("text", {"model": "trained", "index": 0, "text": "Wait. <tool_call>"}),
    ("output", OUTPUT | {"model": "trained", "text": "Wait. <tool_call>…", "content": "Wait.", "tool_calls": [CALL]}),
    ("done", DONE),
]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def test_calls_come_back_as_openai_writes_them(service: Service) -> None:
    chat = {"model": f"ft:{with_model(service)}", "messages": MESSAGES, "tools": [TOOL]}
    thread, _ = answering(service.settings.redis_url, CALLED)
    [choice] = service.post("/v1/chat/completions", json=chat).json()["choices"]
    thread.join()
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == ("Wait.", [CALL])

    thread, _ = answering(service.settings.redis_url, CALLED)
    streamed = service.post("/v1/chat/completions", json=chat | {"stream": True}).text
    thread.join()
    parts = [json.loads(line[6:])["choices"][0] for line in streamed.splitlines() if line.startswith("data: {")]
    assert [part["delta"] for part in parts] == [
        {"role": "assistant", "content": ""}, {"content": "Wait."}, {"tool_calls": [{"index": 0, **CALL}]}, {},
    ]  # fmt: skip
    assert parts[-1]["finish_reason"] == "tool_calls"
