"""Bearer keys. Without one (loopback only, see ServiceSettings), every program on this machine has access.

Web pages have none, except the service's own: a browser on this machine sends its pages' requests to loopback, too,
also those of another local server. Without a key, requests that name another host (DNS rebinding) are refused, and
those that come from a page of another address (Origin, Sec-Fetch-Site). Programs such as curl send neither header.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.edge.keys import Keys
from service.edge.limits import OPEN, Buckets, address, too_many
from service.errors import error_response
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
        refusal = self._refusal(scope) if scope["type"] == "http" and scope["path"] not in OPEN else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        wait_s = self._refusals.take(address(scope))
        if wait_s:
            refusal = too_many("too many requests without a right key from one address", wait_s)
        await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """None: come in. Sets the key's name."""
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        state["key_name"] = None
        if not self._keys.needed:
            return _foreign(headers)
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
