"""Signing in with a key, and the scripts and styles that every page needs."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from jobs.errors import NotFound
from service.edge.auth import comes_from_own_page
from service.edge.keys import Keys
from service.edge.limits import SIGN_IN, Buckets, address, too_many
from service.edge.sessions import LASTS_S, Sessions, cookie_name
from service.errors import BodyTooLarge, error_response
from service.pages.render import Renderer, StaticFiles, is_encrypted

MOST_BYTES = 4096
"""Of the form."""
FOR_GOOD = "public, max-age=31536000, immutable"


def routes(
    keys: Keys, sessions: Sessions, refusals: Buckets, render: Renderer, static: StaticFiles, cookie_path: str
) -> APIRouter:
    """`/sign-in`, `/sign-out` and `/static`."""
    router = APIRouter(include_in_schema=False)

    @router.get(SIGN_IN)
    def sign_in_page(request: Request, next: str = "/") -> Response:
        """Where a key is asked for."""
        if not keys.needed:
            return RedirectResponse("/", status_code=303)
        return render.page(request, "sign_in.html", next=_inside(next), wrong=False)

    @router.post(SIGN_IN)
    async def sign_in(request: Request) -> Response:
        """A session for whoever sends a key."""
        if not comes_from_own_page(request.headers):
            return error_response(403, "foreign_origin", "the form comes from a page of another address")
        form = parse_qs((await _small_body(request)).decode(errors="replace"))
        name = keys.name_of(form.get("key", [""])[0].strip().encode())
        target = _inside(form.get("next", ["/"])[0])
        if name is None:
            if wait_s := refusals.take(f"sign-in {address(request.scope)}"):
                return too_many("too many requests without a right key from one address", wait_s)
            return render.page(request, "sign_in.html", 401, next=target, wrong=True)
        answer = RedirectResponse(target, status_code=303)
        answer.set_cookie(
            cookie_name(request.headers.get("host", "")), sessions.open(name), max_age=LASTS_S, httponly=True,
            samesite="strict", secure=is_encrypted(request), path=cookie_path,
        )  # fmt: skip
        return answer

    @router.post("/sign-out")
    def sign_out(request: Request) -> Response:
        """The browser forgets its session."""
        answer = Response(status_code=204)
        answer.delete_cookie(
            cookie_name(request.headers.get("host", "")), path=cookie_path, httponly=True, samesite="strict"
        )
        return answer

    @router.get("/static/{version}/{name:path}")
    def static_file(request: Request, version: str, name: str) -> Response:
        """A script or a style. An address of an older release has nothing: its page is to be loaded again."""
        file = static.files.get(name) if version == static.version else None
        if file is None:
            raise NotFound(f"there is no {name[:80]} in this release")
        headers = {"Cache-Control": FOR_GOOD, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.zipped, media_type=file.kind, headers=headers | {"Content-Encoding": "gzip"})
        return Response(file.plain, media_type=file.kind, headers=headers)

    return router


async def _small_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise BodyTooLarge(f"a form has at most {MOST_BYTES} bytes")
    return body


def _inside(target: str) -> str:
    """A path of this service; where it leads elsewhere, the first page."""
    inside = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if inside and "\\" not in target else "/"
