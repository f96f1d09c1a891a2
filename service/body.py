"""A request's body as JSON: bounded, and nothing that JSON does not have."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fastapi import Request

from jobs.errors import UserError
from service.errors import BodyTooLarge

MAX_BYTES = 1024 * 1024


class InvalidJson(UserError):
    """Not JSON, or JSON that readers disagree about."""

    code = "invalid_json"


async def read_json(request: Request) -> Any:
    """FastAPI dependency: the parsed body. Stops reading at 1 MiB."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BYTES:
            raise BodyTooLarge(f"the body is larger than {MAX_BYTES:,} bytes; a job is a few kilobytes")
    return parse_json(bytes(raw))


def parse_json(raw: bytes) -> Any:
    """Parsed JSON. Raises InvalidJson saying where it breaks; also for NaN, a key given twice, broken Unicode."""
    hint = "send the job file as it is, with Content-Type: application/json"
    try:
        body = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair could not be written down
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"the body is not JSON: {error.msg} at {where}", hint=hint) from None
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
