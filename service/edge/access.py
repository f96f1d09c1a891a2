"""One log line per request, under an id that the answer carries too. No header, query or body: no secrets.

It is counted here, too, and measured up to the beginning of the answer: what follows may be a stream of days.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from prometheus_client import CollectorRegistry, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.process.logs import JOB, REQUEST_ID

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
