"""Every answer that people read (JSON, events, logs) without secrets and terminal escapes, wherever they came from.

A user may have written a token into a job's metadata, a library into an error message, a trainer into its log. Files
that are downloaded are what they are, byte for byte. So is what a model read and wrote (`as_written`). JSON means what
it meant: there an escape is written as `\\u…`. Pages are not searched: of these the values are, one by one, before they
become HTML (service/pages/render.py).
"""

from __future__ import annotations

from functools import lru_cache

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.process.secrets import redact
from jobs.text.units import escaped, without_controls

JSON = ("application/json", "text/event-stream")
TEXT = (*JSON, "text/plain")


def as_written(request: Request) -> None:
    """What is now answered is what a model read and wrote: whole as streamed, nothing is hidden."""
    request.state.as_written = True


class RedactSecrets:
    """ASGI middleware. A streamed text is searched piece by piece: streams send whole lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: Message | None = None  # the beginning of a text whose Content-Length is not known yet
        is_text = is_json = False

        async def send_clean(message: Message) -> None:
            nonlocal held, is_text, is_json
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                kind = headers.get("content-type", "")
                is_text = kind.startswith(TEXT) and not _is_download(headers)
                is_json = kind.startswith(JSON)
                if is_text and "content-length" in headers:
                    held = message
                    return
            elif message["type"] == "http.response.body" and is_text:
                body = message.get("body", b"")
                if scope.get("state", {}).get("as_written"):
                    clean = escaped(body.decode(errors="replace")).encode()
                else:
                    clean = await _clean(body, is_json)
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


async def _clean(body: bytes, is_json: bool) -> bytes:
    """An event goes to all its followers: it is searched once. A long text (15 to 60 ms a MiB) holds up nobody else."""
    if len(body) < 8192:
        return _short(body, is_json)
    return _search(body, is_json) if len(body) <= 64 * 1024 else await run_in_threadpool(_search, body, is_json)


def without_secrets(text: str) -> str:
    """A text as people may see it."""
    return _word(text) if len(text) < _WORD else _readable(text)


def _readable(text: str) -> str:
    # Controls are taken out first: what is left might otherwise come together to a secret.
    return redact(without_controls(text))


def _search(body: bytes, is_json: bool) -> bytes:
    text = body.decode(errors="replace")
    return (escaped(redact(text)) if is_json else _readable(text)).encode()


_short = lru_cache(maxsize=512)(_search)
_word = lru_cache(maxsize=4096)(_readable)
_WORD = 200
