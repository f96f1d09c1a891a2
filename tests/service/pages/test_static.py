"""Scripts and styles: those of others are as published, all together are small, and a browser keeps them."""

from __future__ import annotations

import hashlib
import re

from service.pages.render import ROOT, StaticFiles
from tests.service.running import Service

MOST_BYTES = 120_000
"""Of all scripts, compressed."""


def test_scripts_of_others_are_as_published_and_have_their_licence() -> None:
    listed = re.findall(r"^\| (\S+) \|.*\((\S+)\) \| ([0-9a-f]{64}) \|$", (ROOT / "vendor/README.md").read_text(), re.M)
    there = {path.name for path in (ROOT / "vendor").iterdir() if path.suffix in (".js", ".css")}
    assert {name for name, _, _ in listed} == there and len(there) >= 3
    for name, licence, digest in listed:
        assert hashlib.sha256((ROOT / "vendor" / name).read_bytes()).hexdigest() == digest, name
        assert (ROOT / "vendor" / licence).stat().st_size > 100


def test_all_scripts_together_are_small() -> None:
    scripts = {name: len(file.zipped) for name, file in StaticFiles().files.items() if name.endswith(".js")}
    assert "live.js" in scripts
    assert sum(scripts.values()) <= MOST_BYTES, scripts


def test_lines_of_a_chart_have_colours_of_their_own() -> None:
    style = (ROOT / "app.css").read_text()
    named = dict(re.findall(r"--([\w-]+): (light-dark\([^)]*\)|var\(--\w+\))", style))
    lines = [named[f"line-{number}"] for number in range(10)]
    shown = [named[each[6:-1]] if each.startswith("var(") else each for each in lines]
    for theme in (0, 1):
        colours = [each.removeprefix("light-dark(").removesuffix(")").split(", ")[theme] for each in shown]
        assert len({*colours}) == 10, colours


def test_a_browser_keeps_them_and_an_older_release_has_none(service: Service) -> None:
    static = StaticFiles()
    answer = service.get(static.url("live.js"), headers={"Accept-Encoding": "gzip"})
    assert answer.status_code == 200 and answer.content == (ROOT / "live.js").read_bytes()
    assert answer.headers["Content-Encoding"] == "gzip" and "immutable" in answer.headers["Cache-Control"]
    assert service.get(static.url("live.js"), headers={"Accept-Encoding": "identity"}).content == answer.content
    for path in ("/static/000000000000/live.js", static.url("live.js") + "x", f"/static/{static.version}/../render.py"):
        assert service.get(path).status_code == 404, path
