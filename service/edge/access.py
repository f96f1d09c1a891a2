"""One log line per request, under an id that the answer carries too. No header, query or body: no secrets.

It is counted here, too, and measured up to the beginning of the answer: what follows may be a stream of days.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.process.logs import JOB, REQUEST_ID
from service.reading.prometheus import Requests

log = logging.getLogger("longhaul.service")
_LEGAL_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JOB = re.compile(r"/jobs/(job-[a-z0-9_-]{1,60})(?:/|$)")


class AccessLog:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
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
                self._requests.answered(scope, status, time.perf_counter() - started)
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
            log.info(
                "%s %s %s %d %.1f ms%s", request_id, scope["method"], path, status, milliseconds, by,
                extra={"fields": fields},
            )  # fmt: skip
