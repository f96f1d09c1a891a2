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
from urllib.parse import quote, urlsplit

from fastapi.responses import JSONResponse, RedirectResponse
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.edge.keys import Keys
from service.edge.limits import SIGN_IN, Buckets, address, is_open, too_many
from service.edge.sessions import CSRF_HEADER, Sessions, cookie_name
from service.errors import error_response, wants_page
from service.settings import is_loopback

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
