"""Every answer that people read (JSON, events, logs) without what looks like a secret, wherever in us it came from.

A user may have written a token into a job's metadata, a library into an error message, a trainer into its log. Files
that are downloaded are what they are, byte for byte.
"""

from __future__ import annotations

from functools import lru_cache

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.secrets import redact

TEXT = ("application/json", "text/event-stream", "text/plain")


class Redacted:
    """ASGI middleware. A streamed text is searched piece by piece: whoever streams sends whole lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: Message | None = None  # the beginning of a text whose Content-Length is not known yet
        is_text = False

        async def send_clean(message: Message) -> None:
            nonlocal held, is_text
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_text = headers.get("content-type", "").startswith(TEXT) and not _is_download(headers)
                if is_text and "content-length" in headers:
                    held = message
                    return
            elif message["type"] == "http.response.body" and is_text:
                body = message.get("body", b"")
                clean = await _clean(body)
                if held is not None:
                    headers = MutableHeaders(scope=held)
                    if message.get("more_body"):
                        del headers["content-length"]
                    else:
                        headers["content-length"] = str(len(clean))
                    await send(held)
                    held = None
                message["body"] = clean
            await send(message)

        await self._app(scope, receive, send_clean)


def _is_download(headers: MutableHeaders) -> bool:
    return "content-disposition" in headers or "accept-ranges" in headers


async def _clean(body: bytes) -> bytes:
    """An event goes to all its followers: it is searched once. A long text (15 to 60 ms a MiB) holds up nobody else."""
    if len(body) < 8192:
        return _short(body)
    return _search(body) if len(body) <= 64 * 1024 else await run_in_threadpool(_search, body)


def _search(body: bytes) -> bytes:
    text = body.decode("utf-8", "surrogateescape")
    clean = redact(text)
    return body if clean == text else clean.encode("utf-8", "surrogateescape")


_short = lru_cache(maxsize=512)(_search)
