"""What every answer tells browsers: take it for what it is called, run nothing in it, frame and keep nothing."""

from __future__ import annotations

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
