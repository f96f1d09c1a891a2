"""Bearer keys, and sessions of browsers. Without a key (loopback only, see ServiceSettings), every program on this
machine has access.

A browser that asks for a page without a session is sent to where one signs in. A change that comes with a session needs
its CSRF token, too, and no page of another address may ask for it.

Without a key web pages have no access, except the service's own: a browser on this machine sends its pages' requests to
loopback, too, also those of another local server. So requests that name another host (DNS rebinding) are refused, and
those that come from a page of another address (Origin, Sec-Fetch-Site). Programs such as curl send neither header.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from urllib.parse import quote, urlsplit

from fastapi.responses import JSONResponse, RedirectResponse
from prometheus_client import CollectorRegistry, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.process.logs import JOB, REQUEST_ID
from service.edge.keys import Keys
from service.edge.limits import SIGN_IN, Buckets, address, is_open, too_many
from service.edge.sessions import CSRF_HEADER, Sessions, cookie_name
from service.errors import error_response, wants_page
from service.settings import is_loopback

# -- access ------------------------------------------------------------------------------------------------------------
# One log line per request, under an id that the answer carries too. No header, query or body: no secrets.
#
# It is counted here, too, and measured up to the beginning of the answer: what follows may be a stream of days.

log = logging.getLogger("longhaul.service")
_LEGAL_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JOB = re.compile(r"/jobs/(job-[a-z0-9_-]{1,60})(?:/|$)")
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMetrics:
    """Prometheus: how requests were answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "longhaul_http_request_duration_seconds",
            "Time to the beginning of the answer; its count is the number of requests.",
            ["method", "route", "status"],
            registry=registry,
            buckets=_BUCKETS_S,
        )

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one. `route` is the template, never the path that was asked for."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")
        self._seconds.labels(method, route, f"{status // 100}xx").observe(seconds)


class AccessLog:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp, requests: RequestMetrics) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _LEGAL_ID.fullmatch(given) else uuid.uuid4().hex[:12]
        # Every request runs in a task of its own, so these end with it.
        REQUEST_ID.set(request_id)
        if found := _JOB.match(scope["path"]):
            JOB.set(found[1])
        started = time.perf_counter()
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                self._requests.observe(scope, status, time.perf_counter() - started)
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        finally:
            milliseconds = round((time.perf_counter() - started) * 1000, 1)
            # A path may hold a newline, which must not begin a line of its own in the log.
            path = ascii(scope["path"])[1:-1]
            key = scope.get("state", {}).get("key_name")
            fields = {"method": scope["method"], "path": path, "status": status, "ms": milliseconds, "key": key}
            by = f" by {key}" if key else ""
            # Whoever looks after the containers asks every few seconds: only a change is worth a line.
            healthy = scope["path"].startswith("/health") and status < 400
            log.log(
                logging.DEBUG if healthy else logging.INFO,
                "%s %s %s %d %.1f ms%s", request_id, scope["method"], path, status, milliseconds, by,
                extra={"fields": fields},
            )  # fmt: skip


# -- auth --------------------------------------------------------------------------------------------------------------

_SAFE = ("GET", "HEAD")


class BearerKey:
    """ASGI middleware: 401 for every path but the health checks unless the request carries a key.

    The key's name is `scope["state"]["key_name"]` from here on (None where no key is needed).
    """

    def __init__(self, app: ASGIApp, keys: Keys, sessions: Sessions, refusals: Buckets) -> None:
        self._app = app
        self._keys, self._sessions = keys, sessions
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" and not is_open(scope["path"]) else None
        if refusal is None:
            await self._app(scope, receive, self._while_valid(scope, send))
            return
        # Where one signs in everybody may go: who does that must not be kept out by what others send.
        wait_s = 0.0 if refusal.status_code == 303 else self._refusals.take(address(scope))
        if wait_s:
            refusal = too_many("too many requests without a right key from one address", wait_s)
        await refusal(scope, receive, send)

    def _while_valid(self, scope: Scope, send: Send) -> Send:
        """Ends a stream, such as that of events, when its key is revoked."""
        name, ended = scope.get("state", {}).get("key_name"), False

        async def send_valid(message: Message) -> None:
            nonlocal ended
            if ended:
                return
            ended = bool(message.get("more_body")) and self._keys.digest(name) is None
            await send({"type": "http.response.body", "body": b""} if ended else message)

        return send if name is None else send_valid

    def _refusal(self, scope: Scope) -> Response | None:
        """None: come in. Sets the key's name, and the CSRF token of a session."""
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        state["key_name"] = None
        if not self._keys.needed:
            return None if _is_visit(scope, headers) else _foreign(headers)
        given = headers.get("authorization", "")
        if not given and (cookie := cookie_parser(headers.get("cookie", "")).get(cookie_name(headers.get("host", "")))):
            state["key_name"] = self._sessions.name_of(cookie)
            if state["key_name"] is not None:
                state["csrf_token"] = self._sessions.csrf_token(cookie)
                return None if scope["method"] in _SAFE else _forged(headers, state["csrf_token"])
        if not given and wants_page(scope):
            asked = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            return RedirectResponse(f"{SIGN_IN}?next={quote(asked, safe='')}", status_code=303)
        scheme, _, key = given.partition(" ")
        if scheme.lower() == "bearer":
            state["key_name"] = self._keys.name_of(key.strip(" ").encode("latin-1"))
        if state["key_name"] is not None:
            return None
        return error_response(
            401,
            "invalid_api_key",
            "the API key is wrong" if given else "an API key is needed",
            hint="send the header `Authorization: Bearer …` (LONGHAUL_API_KEY of the service)",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _forged(headers: Headers, token: str) -> JSONResponse | None:
    """The refusal of a change that a page of another address has a browser send."""
    if comes_from_own_page(headers) and hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), token.encode()):
        return None
    hint = "reload the page and try again; a program sends its key, `Authorization: Bearer …`, and no cookie"
    return error_response(403, "foreign_origin", "the change does not come from a page of this session", hint=hint)


def comes_from_own_page(headers: Headers) -> bool:
    """Whether no browser says that a page of another address asks."""
    own = all(urlsplit(origin).netloc == headers.get("host", "") for origin in headers.getlist("origin"))
    return own and headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def _is_visit(scope: Scope, headers: Headers) -> bool:
    """Whether somebody follows a link to a page, from wherever: its own site cannot see what they see."""
    whole = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return whole and wants_page(scope) and _names_this_machine(headers.get("host", ""))


def _foreign(headers: Headers) -> JSONResponse | None:
    """The refusal of a request that names another host, or that a page of another address has a browser send."""
    host = headers.get("host", "")
    if not _names_this_machine(host):
        message = f"without an API key this service answers to 127.0.0.1 and localhost, not to {host!r}"
        hint = "use http://127.0.0.1 or localhost with the service's port, or set LONGHAUL_API_KEY for the service"
        return error_response(403, "foreign_origin", message, hint=hint)
    origins = headers.getlist("origin")
    site = headers.get("sec-fetch-site", "none")
    if all(origin == f"http://{host}" for origin in origins) and site in ("none", "same-origin"):
        return None
    page = f"the web page {origins[0]!r}" if origins else "a web page of another address"
    message = f"{page} asked through a browser; without an API key only http://{host} itself may"
    hint = "ask from a program such as curl, or set LONGHAUL_API_KEY for the service"
    return error_response(403, "foreign_origin", message, hint=hint)


def _names_this_machine(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # not even the form of a host
        return False
