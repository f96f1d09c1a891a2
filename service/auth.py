"""One bearer key, compared in constant time. Without a key (loopback only, see Settings) every program here may in.

But not every web page: a browser on this machine sends its pages' requests to loopback, too. Without a key, requests
that name another host (DNS rebinding) or come from a page of another host (Origin) are refused.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import error_response
from service.settings import is_loopback

OPEN = ("/health/live", "/health/ready")
"""Paths that container engines and load balancers ask without a key."""


class BearerKey:
    """ASGI middleware: 401 for every path but the health checks unless the request carries the key."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._expected is None:
            if _from_this_machine(headers):
                await self._app(scope, receive, send)
            else:
                message = "a web page of another host asked, or this service was asked for under another name"
                hint = "use http://127.0.0.1 or localhost, or set LONGHAUL_API_KEY"
                await error_response(403, "foreign_origin", message, hint=hint)(scope, receive, send)
            return
        given = headers.get("authorization", "")
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


def _from_this_machine(headers: Headers) -> bool:
    asked = [f"//{headers.get('host', '')}", *([origin] if (origin := headers.get("origin")) is not None else [])]
    try:
        return all(is_loopback(urlsplit(each).hostname or "") for each in asked)
    except ValueError:  # not even the form of a host
        return False
