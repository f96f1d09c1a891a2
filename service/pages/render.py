"""Templates to pages. Whatever comes from data is escaped; nothing of a page may run or load but the service's own."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from service.edge.headers import PAGE_HEADERS, with_path
from service.edge.redaction import without_secrets
from service.pages.job_story import FILTERS

# -- static ------------------------------------------------------------------------------------------------------------
# Scripts and styles, read once, compressed once, and called by their content: a browser keeps them for good.

ROOT = Path(__file__).parent / "static"
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class StaticFile:
    """One file, ready to be sent."""

    kind: str
    plain: bytes
    zipped: bytes
    version: str
    """Of its content."""


class StaticFiles:
    """All of them, by name, such as `live.js` or `vendor/uplot.js`."""

    def __init__(self, root: Path = ROOT) -> None:
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix in KINDS)
        self.files = {name: _read(root / name) for name in names}
        # Modules import one another by bare names: those of one release belong together.
        together = "".join(file.version for file in self.files.values())
        self.version = hashlib.sha256(together.encode()).hexdigest()[:12]

    def url(self, name: str) -> str:
        """Where it is. KeyError: there is none."""
        assert name in self.files, name
        return f"/static/{self.version}/{name}"


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    kind = KINDS[path.suffix]
    return StaticFile(kind, content, gzip.compress(content, 9, mtime=0), hashlib.sha256(content).hexdigest())


# -- render ------------------------------------------------------------------------------------------------------------

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
