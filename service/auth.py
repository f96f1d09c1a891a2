"""One bearer key, compared in constant time. Without a key (loopback only, see Settings) everybody may in."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import error_response

OPEN = ("/health/live", "/health/ready")
"""Paths that container engines and load balancers ask without a key."""


class BearerKey:
    """ASGI middleware: 401 for every path but the health checks unless the request carries the key."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._expected is None or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "")
        if hmac.compare_digest(given.encode("latin-1"), self._expected):
            await self._app(scope, receive, send)
            return
        message = "the API key is wrong" if given else "an API key is needed"
        refusal = error_response(
            401,
            "invalid_api_key",
            message,
            hint="send the header `Authorization: Bearer …` (LONGHAUL_API_KEY of the service)",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)
