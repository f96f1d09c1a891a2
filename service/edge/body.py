"""A request's body: it comes in time, JSON is bounded and is nothing that JSON does not have."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.errors import UserError
from jobs.text.units import format_duration
from jobs.wrong_spec import json_mistake
from service.errors import BodyTooLarge, BodyTooSlow

MAX_BYTES = 1024 * 1024
JSON_WITHIN_S = 60.0
SILENCE_S = 20.0
"""Between two pieces of any body."""


class InvalidJson(UserError):
    """Not JSON, or JSON that readers disagree about."""

    code = "invalid_json"


async def read_json(request: Request) -> Any:
    """FastAPI dependency: the parsed body. Stops reading at 1 MiB, or after a minute."""
    too_large = BodyTooLarge(f"the body is larger than {MAX_BYTES:,} bytes; a job is a few kilobytes")
    if int(request.headers.get("content-length", 0)) > MAX_BYTES:  # h11 lets nothing but digits through
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(JSON_WITHIN_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > MAX_BYTES:
                    raise too_large
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {format_duration(JSON_WITHIN_S)}") from None
    return parse_json(bytes(raw))


def parse_json(raw: bytes) -> Any:
    """Parsed JSON. Raises InvalidJson saying where it breaks; also for NaN, a key given twice, broken Unicode."""
    hint = "send the job file as it is, with Content-Type: application/json"
    try:
        body = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair could not be written down
    except json.JSONDecodeError as error:
        raise InvalidJson(f"the body is not JSON: {json_mistake(error)}", hint=hint) from None
    except UnicodeError:
        raise InvalidJson("the body is not JSON: it is not valid Unicode text (UTF-8)", hint=hint) from None
    except RecursionError:
        raise InvalidJson("the body is nested too deeply", hint=hint) from None
    except InvalidJson:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InvalidJson(f"the body is not JSON that can be used: {error}", hint=hint) from None
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidJson(f"the key {key[:80]!r} is given twice", hint="keep one of them")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise InvalidJson(f"{name} is not JSON", hint="give a finite number or null")


class BodyTimeout:
    """ASGI middleware: BodyTooSlow (408) when no more of a body comes for a while. Uploads may be long, not silent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def receive_in_time() -> Message:
            nonlocal complete
            if complete:  # what follows is the end of the connection, which may be days away
                return await receive()
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlow(f"no more of the body arrived for {format_duration(SILENCE_S)}") from None
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time if scope["type"] == "http" else receive, send)
