"""The worker `generate`: each request gets an answer, whatever becomes of it, and the next one is served."""

from __future__ import annotations

import json
import threading
from typing import Any, cast

import pytest

from jobs.errors import Rejected
from jobs.redis.connection import connect
from jobs.redis.requests import Request, Requests, answer_key
from worker import requests as serving
from worker.requests import Abandoned, AnswerWriter, RequestFailed, serve, serve_one, serve_requests
from worker.settings import WorkerSettings, from_environment


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


def test_a_handler_that_breaks_while_idle_still_serves_the_next_request(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "RETRY_S", 0.0)
    requests, stop, broken = Requests(connect(redis_url)), threading.Event(), threading.Event()

    class Breaks(Scripted):
        """Idle, it breaks once."""

        def idle(self) -> None:
            if not broken.is_set():
                broken.set()
                raise ZeroDivisionError

        def answer(self, request: Request, answer: AnswerWriter) -> None:
            super().answer(request, answer)
            stop.set()

    thread = threading.Thread(target=serve, args=(settings(redis_url), Breaks(), stop))
    thread.start()
    assert broken.wait(30)
    asked = requests.submit("scripted", "job-1", {"end": "done"}, client="a")
    thread.join(30)
    assert parts(redis_url, asked)[-1] == ("done", {})


@pytest.mark.filterwarnings("ignore:Exception in thread scripted")
def test_a_worker_whose_handler_is_gone_ends(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(serving, "HEARTBEAT_S", 0.1)

    class Ends(Scripted):
        """Idle, its thread ends."""

        def idle(self) -> None:
            raise SystemExit

    assert serve_requests(settings(redis_url), [Ends(), Scripted()]) == 1


def settings(url: str) -> WorkerSettings:
    return from_environment({"LONGHAUL_REDIS_URL": url, "LONGHAUL_DEVICE": "cpu"})
