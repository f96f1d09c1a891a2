"""What every answer tells browsers: take it for what it is called, run nothing in it, frame and keep nothing."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    # Without a referrer a browser says of a form, too, that it comes from nowhere.
    "Referrer-Policy": "same-origin",
    "Vary": "Accept",
}
"""Of pages: nothing inline, nothing from elsewhere."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    # Without a key a page of another host may not even show a picture of ours.
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class SecurityHeaders:
    """ASGI middleware: these headers on every answer that does not have its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                given = {name.lower() for name, _ in headers}
                message["headers"] = headers + [each for each in HEADERS if each[0] not in given]
            await send(message)

        await self._app(scope, receive, send_safe)


# -- public path -------------------------------------------------------------------------------------------------------
# A service behind a proxy at a path, as where LONGHAUL_PUBLIC_URL is https://example.org/longhaul. Requests lose the
# path here and answers get it, so that all else knows nothing of it.

_LINK = re.compile(r'( (?:href|src|action|data-url|data-undo|data-next|data-events)=")/(?!/)')
"""In a page as it was rendered: quotes of texts are escaped there."""


def with_path(page: str, path: str) -> str:
    """A page whose links begin at the root of the service, with links that begin with `path`."""
    return _LINK.sub(rf"\1{path}/", page) if path else page


class PublicPath:
    """ASGI middleware: takes a request with the path and without, for not every proxy cuts it off."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_outside(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [self._outside(*each) for each in message.get("headers", [])]
            await send(message)

        if scope["type"] == "http" and self._path:
            asked = scope["path"].removeprefix(self._path)
            if asked[:1] in ("", "/"):
                scope = {**scope, "path": asked or "/"}
            await self._app(scope, receive, send_outside)
        else:
            await self._app(scope, receive, send)

    def _outside(self, name: bytes, value: bytes) -> tuple[bytes, bytes]:
        within = name.lower() == b"location" and value.startswith(b"/")
        return name, self._path.encode() + value if within else value
