"""What the middleware makes of answers: texts without secrets, in one piece or many; all else byte for byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.edge.redaction import RedactSecrets

SECRET = b"hf_" + b"aB3d" * 9


def redacted(headers: dict[str, str], *pieces: bytes) -> tuple[dict[bytes, bytes], list[bytes], list[str]]:
    """Headers, pieces and order of messages of an answer that an application gives in these pieces."""
    sent: list[Any] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        for piece in pieces:
            sent.append("made")
            await send({"type": "http.response.body", "body": piece, "more_body": piece is not pieces[-1]})

    async def receive() -> Message:
        raise AssertionError("nobody asks")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(RedactSecrets(application)({"type": "http"}, receive, send))
    order = [each if isinstance(each, str) else each["type"].rpartition(".")[2] for each in sent]
    start, *bodies = [each for each in sent if not isinstance(each, str)]
    return dict(start["headers"]), [each["body"] for each in bodies], order


@pytest.mark.parametrize("kind", ["application/json", "text/plain; charset=utf-8", "application/json; charset=utf-8"])
@pytest.mark.parametrize("size", [10, 10_000])
def test_a_text_is_shown_without_secrets_and_is_as_long_as_it_says(kind: str, size: int) -> None:
    body = b'{"a": "' + SECRET + b'", "b": "' + b"x" * size + b'\xc3\xa9\xff"}'
    headers, [shown], _ = redacted({"content-type": kind, "content-length": str(len(body))}, body)
    assert (
        shown == body.replace(SECRET, b"hf_***").replace(b"\xff", "\ufffd".encode())
        and headers[b"content-length"] == str(len(shown)).encode()
    )


def test_a_text_holds_nothing_that_a_terminal_obeys_and_json_means_the_same() -> None:
    hostile = "a\x9b31m\u202e\x7f\té\r\n"
    body = b'"' + hostile.encode() + b'"'
    _, [shown], _ = redacted({"content-type": "application/json"}, body)
    assert json.loads(shown, strict=False) == hostile and b"\\u009b31m\\u202e\\u007f" in shown
    _, [shown], _ = redacted({"content-type": "text/plain"}, b"\x1b" + body)
    assert shown.decode() == '"a31m\té\r\n"'


def test_a_stream_begins_at_once_and_each_piece_is_searched() -> None:
    pieces = [b": following\n\n", b"data: " + SECRET + b"\n\n", b"data: x\n\n"]
    _, shown, order = redacted({"content-type": "text/event-stream"}, *pieces)
    assert shown == [pieces[0], b"data: hf_***\n\n", pieces[2]]
    assert order == ["start"] + ["made", "body"] * 3


def test_a_text_in_pieces_does_not_say_a_wrong_length() -> None:
    headers, shown, _ = redacted({"content-type": "application/json", "content-length": "90"}, b'"' + SECRET, b'"')
    assert shown == [b'"hf_***', b'"'] and b"content-length" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "image/png"},
        {"content-type": "application/json", "content-disposition": "attachment", "content-length": "39"},
        {"content-type": "text/plain", "accept-ranges": "bytes", "content-length": "39"},
        {},
    ],
)
def test_what_is_no_text_or_a_download_is_left_as_it_is(headers: dict[str, str]) -> None:
    given, shown, _ = redacted(headers, SECRET)
    assert shown == [SECRET] and {name.decode(): value.decode() for name, value in given.items()} == headers
