"""Scripts and styles, read once, compressed once, and called by their content: a browser keeps them for good."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

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
