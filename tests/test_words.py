"""One vocabulary: no word that the glossary has replaced, no class name twice."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.stack import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
SPARED = {"docs/glossary.md", "docs/openapi.json", "CHANGELOG.md", "benchmarks/two_revisions.py", "tests/test_words.py"}
"""Files that may name what there was; the OpenAPI document is made from the code."""


def sources() -> list[Path]:
    """All text files of the repository that people write."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = (".py", ".md", ".html", ".js", ".yml", ".toml", ".example", "Makefile", ".training")
    return [
        ROOT / name
        for name in names
        if name.endswith(texts) and name not in SPARED and "/vendor/" not in name and (ROOT / name).is_file()
    ]


def replaced() -> list[str]:
    """The last column of every table: words in backticks."""
    rows = [
        line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ") and not line.startswith("| term")
    ]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.removesuffix("|").split(" | ")[-1])]


def uses(word: str, text: str) -> list[str]:
    """Lines of a text that use a word, whole words of a language or a program; the hub has model cards."""
    pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    text = text.replace("model card", "")
    return [line.strip() for line in text.splitlines() if pattern.search(line)]


def test_nobody_uses_a_word_that_the_glossary_has_replaced() -> None:
    words, texts = replaced(), {path: path.read_text() for path in sources()}
    assert len(words) > 40 and len(texts) > 300
    found = [
        f"{path.relative_to(ROOT)}: {word}: {line}"
        for path, text in texts.items()
        for word in words
        for line in uses(word, text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("on_card = 1", False),
        ("a card of it", True),
        ("the model card", False),
        ("discard(card_data)", False),
        ('{"schedule": {}}', False),
    ],
)
def test_words_are_found_whole(line: str, found: bool) -> None:
    assert bool(uses("card", line)) is found


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for path in sources():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
