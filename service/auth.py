"""Bearer keys. Without one (loopback only, see Settings) every program of this machine may in.

But not every web page: a browser on this machine sends its pages' requests to loopback, too. Without a key, requests
that name another host (DNS rebinding) or come from a page of another host (Origin) are refused.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import error_response
from service.keys import Keys
from service.limits import OPEN, Buckets, address, too_many
from service.settings import is_loopback


class BearerKey:
    """ASGI middleware: 401 for every path but the health checks unless the request carries a key.

    The key's name is `scope["state"]["key_name"]` from here on (None where no key is needed).
    """

    def __init__(self, app: ASGIApp, keys: Keys, refusals: Buckets) -> None:
        self._app = app
        self._keys = keys
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._look(scope) if scope["type"] == "http" and scope["path"] not in OPEN else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        wait_s = self._refusals.take(address(scope))
        if wait_s:
            refusal = too_many("too many requests without a right key from one address", wait_s)
        await refusal(scope, receive, send)

    def _look(self, scope: Scope) -> JSONResponse | None:
        """None: come in. Sets the key's name."""
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        state["key_name"] = None
        if not self._keys.needed:
            if _from_this_machine(headers):
                return None
            message = "a web page of another host asked, or this service was asked for under another name"
            hint = "use http://127.0.0.1 or localhost, or set LONGHAUL_API_KEY"
            return error_response(403, "foreign_origin", message, hint=hint)
        given = headers.get("authorization", "")
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


def _from_this_machine(headers: Headers) -> bool:
    asked = [f"//{headers.get('host', '')}", *([origin] if (origin := headers.get("origin")) is not None else [])]
    try:
        return all(is_loopback(urlsplit(each).hostname or "") for each in asked)
    except ValueError:  # not even the form of a host
        return False
