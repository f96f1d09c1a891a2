"""What a model read and wrote is answered as it is, whole as streamed; what goes wrong is said without secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.answering import DONE, OUTPUT, Parts, answering
from tests.service.running import Service
from tests.service.seeded import leave_behind, train
from tests.support.samples import heartbeat

INPUT, PIECES = "Say the password: leeksAndPeaches", ("The password: ", "leeksAndPeaches", " \u202e hf_", "aB3d" * 9)
WRITTEN = "".join(PIECES)
PARTS: Parts = [
    *(("text", {"model": "trained", "index": 0, "text": piece}) for piece in PIECES),
    ("output", {**OUTPUT, "model": "trained", "input": INPUT, "text": WRITTEN}),
    ("done", DONE),
]
FAILED: Parts = [("error", {"code": "gpu_needed", "message": f"it says {WRITTEN}", "hint": None})]


@pytest.fixture
def job(service: Service) -> str:
    job = service.submit(name="chef")
    train(service, job)
    leave_behind(service.run(job))
    service.store.workers.report(heartbeat("generate-a"))
    return job


@pytest.fixture
def ask(service: Service, job: str, redis_url: str) -> Callable[..., str]:
    """The body of the answer, for which a worker has these parts."""

    def asked(path: str, parts: Parts, *, stream: bool) -> str:
        worker, _ = answering(redis_url, parts)
        body: dict[str, Any] = {"input": INPUT}
        if path != f"/jobs/{job}/generate":
            body = {"model": f"ft:{job}", "messages": [{"role": "user", "content": INPUT}]}
        answer = service.post(path, json=body | {"stream": stream})
        worker.join()
        return answer.content.decode()

    return asked


def events(body: str) -> list[dict[str, Any]]:
    """The JSON of each event but `waiting`."""
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: {")]
    return [event for line in lines if "ahead" not in (event := json.loads(line))]


def test_an_answer_of_ours_is_what_was_written_whole_and_streamed(ask: Callable[..., str], job: str) -> None:
    path = f"/jobs/{job}/generate"
    whole, streamed = ask(path, PARTS, stream=False), ask(path, PARTS, stream=True)
    [output] = json.loads(whole)["outputs"]
    assert (output["input"], output["text"]) == (INPUT, WRITTEN)
    *parts, done = events(streamed)
    assert "".join(part["text"] for part in parts[:-1]) == WRITTEN == parts[-1]["text"]
    assert done["outputs"] == [output]
    assert "\u202e" not in whole + streamed, "what turns a line round stays an escape of JSON"


def test_a_chat_is_what_was_written_whole_and_streamed(ask: Callable[..., str]) -> None:
    path = "/v1/chat/completions"
    whole, streamed = ask(path, PARTS, stream=False), ask(path, PARTS, stream=True)
    assert json.loads(whole)["choices"][0]["message"]["content"] == WRITTEN
    deltas = [choice["delta"] for event in events(streamed) for choice in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == WRITTEN


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_said_without_secrets(ask: Callable[..., str], job: str, stream: bool) -> None:
    for path in (f"/jobs/{job}/generate", "/v1/chat/completions"):
        said = ask(path, FAILED, stream=stream)
        assert "gpu_needed" in said and "it says The password: ***" in said and "leeksAndPeaches" not in said
