"""Templates to pages. Whatever comes from data is escaped; nothing of a page may run or load but the service's own."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from service.edge.headers import PAGE_HEADERS
from service.edge.public_path import with_path
from service.edge.redaction import without_secrets
from service.pages.static import StaticFiles
from service.pages.words import FILTERS

TEMPLATES = Path(__file__).parent / "templates"


def is_encrypted(request: Request) -> bool:
    """Whether the browser speaks TLS, if only to a proxy before us."""
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"


class Renderer:
    """Renders the templates of this package."""

    def __init__(self, static: StaticFiles, path: str = "") -> None:
        """`path` is what a proxy has before those of the service."""
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=_shown, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._environment.filters |= FILTERS
        self._environment.globals["static"] = static.url
        self._environment.globals["root"] = path
        self._static, self._path = static, path

    def style(self, name: str) -> str:
        """A style sheet, for a page that brings its own."""
        return self._static.files[name].plain.decode()

    def text(self, template: str, **values: object) -> str:
        """A template that needs to know nothing of who asks."""
        return self._environment.get_template(template).render(**values)

    def page(self, request: Request, template: str, status: int = 200, /, **values: object) -> HTMLResponse:
        """A page; its template sees who asks (`key_name`), the session's `csrf_token`, and these values."""
        state = request.scope.get("state", {})
        content = self._environment.get_template(template).render(
            key_name=state.get("key_name"), csrf_token=state.get("csrf_token", ""), path=request.url.path, **values
        )
        return HTMLResponse(with_path(content, self._path), status, headers=PAGE_HEADERS)


def _shown(value: object) -> object:
    """What an expression of a template shows: a text without secrets and controls, before it is escaped."""
    return without_secrets(value) if isinstance(value, str) and not isinstance(value, Markup) else value
