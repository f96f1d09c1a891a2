"""The bar of a transfer."""

from __future__ import annotations

import io

from rich.console import Console

from longhaul.figures import bar


def drawn(*reports: tuple[str, int, int]) -> str:
    out = io.StringIO()
    with bar(Console(file=out, force_terminal=True, width=80)) as report:
        for each in reports:
            report(*each)
    return out.getvalue()


def test_a_bar_is_drawn_once_something_is_on_its_way() -> None:
    assert "bytes" not in drawn() and "━" not in drawn()
    assert "rows.jsonl" in (shown := drawn(("rows.jsonl", 512, 1024))) and "0.5/1.0 KiB" in shown
