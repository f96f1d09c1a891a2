"""One log line per request, under an id that the answer carries too. No header, query or body: no secrets."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("longhaul.service")


class AccessLog:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex[:12]
        started = time.perf_counter()
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        finally:
            milliseconds = (time.perf_counter() - started) * 1000
            # !r: a path may hold a newline, which must not begin a line of its own in the log.
            path = ascii(scope["path"])[1:-1]
            log.info("%s %s %s %d %.1f ms", request_id, scope["method"], path, status, milliseconds)
