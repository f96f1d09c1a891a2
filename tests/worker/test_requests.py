"""The worker `generate`: each request gets an answer, whatever becomes of it, and the next one is served."""

from __future__ import annotations

import json
import threading
from typing import Any, cast

import pytest

from jobs.errors import Rejected
from jobs.redis.connection import connect
from jobs.redis.requests import Request, Requests, answer_key
from worker.requests import Abandoned, AnswerWriter, RequestFailed, serve_one


class Scripted:
    """A handler that does what the payload says."""

    kind = "scripted"

    def answer(self, request: Request, answer: AnswerWriter) -> None:
        """Text, then the end that is asked for."""
        answer.add("text", {"text": "so far"})
        match request.payload["end"]:
            case "rejected":
                raise Rejected("it cannot be", code="guard", hint="do this")
            case "failed":
                raise RequestFailed("it broke", code="model_failed")
            case "bug":
                raise ZeroDivisionError("secret detail")
        answer.add("done", {})

    def idle(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def parts(url: str, request: Request) -> list[tuple[str, dict[str, Any]]]:
    found = cast(Any, connect(url).xrange(answer_key(request.id)))
    return [(each[b"type"].decode(), json.loads(each[b"data"])) for _, each in found]


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("done", ("done", {})),
        ("rejected", ("error", {"code": "guard", "message": "it cannot be", "hint": "do this"})),
        ("failed", ("error", {"code": "model_failed", "message": "it broke", "hint": None})),
        ("bug", ("error", {"code": "internal_error", "hint": None,
                           "message": "an internal error; the log of the worker `generate` has the details"})),
    ],
)  # fmt: skip
def test_whatever_becomes_of_a_request_is_its_answer(redis_url: str, end: str, last: tuple[str, object]) -> None:
    requests = Requests(connect(redis_url))
    asked = requests.submit("scripted", "job-1", {"end": end}, client="a")
    request = requests.take("scripted")
    assert request == asked
    serve_one(Scripted(), request, AnswerWriter(requests, request, threading.Event()))
    assert parts(redis_url, asked) == [("text", {"text": "so far"}), last]


def test_a_handler_hears_that_nobody_waits_or_that_the_worker_stops(redis_url: str) -> None:
    requests, stop = Requests(connect(redis_url)), threading.Event()
    request = requests.submit("scripted", "job-1", {"end": "done"}, client="a")
    answer = AnswerWriter(requests, request, stop)
    answer.hold()
    stop.set()
    with pytest.raises(RequestFailed, match="was stopped"):
        answer.hold()
    requests.give_up(request.id)
    with pytest.raises(Abandoned):
        answer.add("text", {"text": "too late"})
    serve_one(Scripted(), request, answer)  # logged, and nothing else
    assert parts(redis_url, request) == []
