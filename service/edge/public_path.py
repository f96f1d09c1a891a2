"""A service behind a proxy at a path, as where LONGHAUL_PUBLIC_URL is https://example.org/longhaul. Requests lose the
path here and answers get it, so that all else knows nothing of it.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
