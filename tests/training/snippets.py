"""The page of a finished model: its fenced blocks, and what its snippet prints."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)


def run_snippet(model: Path) -> str:
    """What the one of README.md prints, run beside it. (test_readme.py runs one as a program of its own.)"""
    [snippet] = blocks((model / "README.md").read_text(), "python")
    with contextlib.chdir(model), contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a program would print them and continue
        exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    return said.getvalue()
