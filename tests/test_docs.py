"""The pages in Markdown: links resolve, every reason has advice, and the examples of CONTRIBUTING apply."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jobs.reasons import Reason
from tests.support.stack import ROOT

TEXTS = {
    ROOT / name: (ROOT / name).read_text()
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (ROOT / name).is_file()
}


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Targets of links and pictures, but those of other sites; not inside code."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'src="([^"]+)"', prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken(page: Path) -> list[str]:
    """Links of a page to a file or heading that is not there."""
    found = []
    for target in links(TEXTS[page]):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(TEXTS[file])):
            found.append(target)
    return found


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert broken(page) == []


def test_links_are_found() -> None:
    assert sum(len(links(text)) for text in TEXTS.values()) > 60
    text = '# A `b.c` d\n[x](y.md#z) `[no](no.md)` <img src="p.png"> [site](https://x.org)\n```\n# [no](n)\n```\n'
    assert links(text) == ["y.md#z", "p.png"]
    assert anchors(text) == {"a-bc-d"}


def test_troubleshooting_has_every_reason_without_a_hint() -> None:
    text = TEXTS[ROOT / "docs" / "troubleshooting.md"]
    assert [reason for reason in Reason if reason.hint is None and f"`{reason}`" not in text] == []


def unknown_lines(diff: str) -> list[str]:
    """Lines that a diff keeps or removes, and headings of its parts, which are not in its files, in this order."""
    found, rest = [], ""
    for line in diff.splitlines():
        if line.startswith("--- "):
            rest = (ROOT / line[4:]).read_text()
        elif not line.startswith("+") and line != "@@":
            _, there, after = rest.partition(line.removeprefix("@@")[1:] + "\n")
            rest = after if there else rest
            found += [] if there else [line]
    return found


def test_the_examples_of_contributing_apply_to_the_code() -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```", TEXTS[ROOT / "CONTRIBUTING.md"], re.MULTILINE | re.DOTALL)
    assert len(diffs) == 6
    assert [line for diff in diffs for line in unknown_lines(diff)] == []
    assert unknown_lines("--- README.md\n-no such line\n+a line\n") == ["-no such line"]
