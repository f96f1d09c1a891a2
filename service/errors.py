"""One shape for every error: `{"error": {"type", "code", "message", "param"}}`, with `hint` where there is one.

422 only for a bad payload, 409 for what the current state does not allow, 503 (with Retry-After) when Redis is away.
"""

from __future__ import annotations

import json
import logging
import os

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic.json_schema import SkipJsonSchema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.disk.files import FORBIDDEN, FULL
from jobs.errors import (
    Conflict,
    Damaged,
    LonghaulError,
    NotFound,
    QueueFull,
    Recovering,
    StoreUnavailable,
    UserError,
    WorkerMissing,
)
from jobs.frozen import Frozen, left_out
from jobs.process.secrets import redact
from jobs.redis.requests import RequestLost

log = logging.getLogger("longhaul.service")
RETRY_AFTER_S = 5
INTERNAL = "internal error; the service's log has the details"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_CODES = {404: "not_found", 405: "method_not_allowed"}


class Error(Frozen):
    """What went wrong."""

    type: str
    """Kind: `invalid_request_error`, `authentication_error`, `permission_error`, `conflict_error`,
    `rate_limit_error`, `server_error` or `unavailable_error`."""
    code: str
    """Stable, for machines: such as `not_found`, `invalid_value`, `conflict`."""
    message: str
    """For people: what, the value, and what to do."""
    param: str | None
    """The parameter, header, or dotted key of the body that is wrong; null where it is none of them."""
    hint: str | SkipJsonSchema[None] = left_out()
    """Only what to do; left out if there is no hint."""


class ErrorResponse(Frozen):
    """The one shape of every error."""

    error: Error


class BodyTooLarge(LonghaulError):
    """The body has more bytes than any job needs."""

    code = "body_too_large"


class TooManyStreams(LonghaulError):
    """As many streams are open as may be."""

    code = "too_many_streams"
    retry_after_s = 10

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class BodyTooSlow(LonghaulError):
    """The body did not arrive in time."""

    code = "body_too_slow"


class AnswerFailed(LonghaulError):
    """A finished model could not answer."""

    def __init__(self, status: int, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.hint = status, code, hint  # type: ignore[misc]  # the code of this one


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for something to look at: it names HTML before all else. Programs take `*/*`, or JSON."""
    accept = Headers(scope=scope).get("accept", "")
    return scope["method"] in ("GET", "HEAD") and accept.partition(",")[0].partition(";")[0].strip() == "text/html"


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    hint: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """The one shape."""
    error: dict[str, str | None] = {
        "type": _TYPES.get(status, "invalid_request_error"),
        "code": code,
        "message": message,
        "param": param,
    }
    if hint:
        error["hint"] = hint
    if status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_S), **(headers or {})}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _allowed(request: Request) -> list[str]:
    """Methods that are taken at this path."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    routes = request.app.routes
    return [name for name, scope in scopes.items() if any(each.matches(scope)[0] is Match.FULL for each in routes)]


def longhaul_error_body(error: Exception) -> dict[str, object]:
    """What ends a stream that has begun, without secrets: an error of our own as it would be answered, with its status;
    any other with no details."""
    if isinstance(error, LonghaulError):
        answer = _longhaul_response("a stream", error)
    else:
        log.error("unexpected error in a stream", exc_info=error)
        answer = error_response(500, "internal_error", INTERNAL)
    body: dict[str, object] = json.loads(redact(bytes(answer.body).decode()))
    return {"status": answer.status_code, **body}


def longhaul_error_response(request: Request, error: LonghaulError) -> JSONResponse:
    """What an error of our own is answered with; raises it again where it is none of a request."""
    return _longhaul_response(f"{request.method} {request.url.path}", error)


def _longhaul_response(what: str, error: LonghaulError) -> JSONResponse:
    match error:
        case UserError():
            return error_response(422, error.code, str(error), param=error.param, hint=error.hint)
        case NotFound():
            return error_response(404, error.code, str(error))
        case Conflict() | Damaged():
            return error_response(409, error.code, str(error), hint=error.hint)
        case BodyTooLarge():
            return error_response(413, error.code, str(error))
        case BodyTooSlow():
            return error_response(408, error.code, str(error), headers={"Connection": "close"})
        case AnswerFailed():
            return error_response(error.status, error.code, str(error), hint=error.hint)
        case RequestLost():
            return error_response(503, error.code, str(error), hint=error.hint)
        case QueueFull():
            seconds = {"Retry-After": str(RETRY_AFTER_S)}
            return error_response(429, error.code, str(error), hint=error.hint, headers=seconds)
        case TooManyStreams():
            seconds = {"Retry-After": str(error.retry_after_s)}
            return error_response(429, error.code, str(error), hint=error.hint, headers=seconds)
        case WorkerMissing():
            return error_response(503, error.code, str(error), hint=error.hint)
        case Recovering():
            message = "Redis was emptied and is being refilled; a list would be incomplete. Try again."
            return error_response(503, error.code, message)
        case StoreUnavailable():
            # The cause names hosts and ports of our own network: that is for the log.
            log.warning("%s: %s", what, error)
            message = "Redis does not answer; nothing was changed. Try again."
            return error_response(503, error.code, message)
    raise error


def invalid_response(error: RequestValidationError) -> JSONResponse:
    """What a parameter that cannot be is answered with."""
    first = error.errors()[0]
    # Of a parameter that may be repeated the loc says which one as well: that is no part of its name.
    param = ".".join(part for part in first["loc"][1:] if isinstance(part, str)) or None
    return error_response(422, "invalid_value", f"{param}: {first['msg']}", param=param)


def install(app: FastAPI) -> None:
    """Make the application answer every error, its framework's own included, in the one shape."""

    @app.exception_handler(OSError)
    def _disk(request: Request, error: OSError) -> JSONResponse:
        if error.errno not in FULL | FORBIDDEN and not isinstance(error.filename, str | os.PathLike):
            raise error
        log.error("%s %s: %s", request.method, request.url.path, error)
        if error.errno not in FULL | FORBIDDEN:
            message = f"{os.path.basename(error.filename)} cannot be opened or read: {error.strerror}"
            hint = "the service's log has its path: restore it from a backup, or move it away"
            return error_response(503, "unreadable", message, hint=hint)
        if error.errno in FORBIDDEN:
            message = "the service may not read or write a file that this request needs: nothing was changed"
            hint = "its log names the file; the user that the service runs as must own it"
            return error_response(503, "not_permitted", message, hint=hint)
        return error_response(503, "disk_full", "the disk is full: nothing was changed", hint="make room and retry")

    @app.exception_handler(LonghaulError)
    def _longhaul(request: Request, error: LonghaulError) -> JSONResponse:
        return longhaul_error_response(request, error)

    @app.exception_handler(RequestValidationError)
    def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_response(error)

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            404: f"there is no route at {request.url.path}",
            405: f"{request.url.path} does not accept {request.method}",
        }.get(error.status_code, str(error.detail))
        code = _CODES.get(error.status_code, "error")
        headers = dict(error.headers) if error.headers else {}
        if error.status_code == 405:  # the framework names the methods of the first route alone
            headers["Allow"] = ", ".join(_allowed(request))
        return error_response(error.status_code, code, message, headers=headers)


class ErrorMiddleware:
    """ASGI middleware: 500 in the one shape for unexpected errors. The traceback goes to the log, not to the caller.

    The framework's own handler of such errors stands outside of all middleware: its answers would lack what they add.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except ClientDisconnect:
            log.info("%s %s: the client left before its request was complete", scope["method"], ascii(scope["path"]))
        except Exception:
            if started or scope["type"] != "http":
                raise  # uvicorn logs it and breaks the connection off: half an answer must not look like a whole one
            log.exception("unexpected error: %s %s", scope["method"], ascii(scope["path"]))
            answer = error_response(500, "internal_error", INTERNAL)
            await answer(scope, receive, send)
