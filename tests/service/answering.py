"""A worker `generate` whose answers are put in by hand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from jobs.redis.connection import connect
from jobs.redis.requests import Request, Requests

OUTPUT = {"index": 0, "input": "x", "input_tokens": 1, "input_cut": False, "tokens": 2, "finish_reason": "stop"}
DONE: Mapping[str, Any] = {
    "device": "cpu", "why": "a job trains on the GPU", "seconds": 1.0, "loading_s": 0.0, "tokens_per_s": 4.25,
    "seed": None,
}  # fmt: skip
Parts = list[tuple[str, Mapping[str, Any]]]


def answering(url: str, parts: Parts) -> tuple[threading.Thread, list[Request]]:
    """A worker for one request."""
    taken: list[Request] = []

    def serve() -> None:
        requests = Requests(connect(url))
        while (request := requests.take("generate")) is None:
            requests.wait("generate", 1.0)
        taken.append(request)
        for number, (type, data) in enumerate(parts, start=1):
            requests.answer(request.id, number, type, data)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, taken
