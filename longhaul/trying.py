"""Asking the model of a job: streamed by the service where it can be, whole for whoever asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import requests

from jobs.answers import Generation
from longhaul.connection import CONNECT_S, ApiError, Connection, Unreachable, part

SILENCE_S = 900.0
"""Until another byte: others may come first, and a large model takes a while to load."""
OnPart = Callable[[str, Mapping[str, Any]], object]


def generate(connection: Connection, job: str, body: Mapping[str, Any], on_part: OnPart) -> Generation:
    """The answer; `on_part` is told of its parts (`waiting`, `loading`, `loaded`, `text`, `output`) as they come: of a
    beam search, which cannot be streamed, `text` and `output` at the end.

    Raises ApiError, also in the middle; Unreachable where the connection breaks: ask again.
    """
    path = f"/jobs/{part(job)}/generate"
    if body.get("num_beams", 1) != 1:
        whole = connection.json(Generation, "POST", path, json=body, timeout=(CONNECT_S, SILENCE_S))
        for output in whole["outputs"]:
            if output["labels"] is None:
                on_part("text", {"model": output["model"], "index": output["index"], "text": output["text"]})
            on_part("output", output)
        return whole
    try:
        with connection.stream(path, silence_s=SILENCE_S, method="POST", json={**body, "stream": True}) as answer:
            for type, data in _parts(answer):
                if type == "error":
                    error = data["error"]
                    raise ApiError(
                        error["message"], status=data["status"], code=error["code"], param=error["param"],
                        hint=error.get("hint"),
                    )  # fmt: skip
                if type == "done":
                    return cast(Generation, data)
                on_part(type, data)
    except requests.RequestException as error:
        raise Unreachable(f"no answer from {connection.url} ({error.__class__.__name__})") from error
    raise Unreachable(f"{connection.url} broke the answer off")


def _parts(answer: requests.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Type and data of each event. Lines as bytes: text would be split at every Unicode line separator, too."""
    type = ""
    for line in answer.iter_lines(chunk_size=None):
        if line.startswith(b"event: "):
            type = line[7:].decode()
        elif line.startswith(b"data: "):
            yield type, json.loads(line[6:])
