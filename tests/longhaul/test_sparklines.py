"""Curves of one line."""

from __future__ import annotations

import io

from rich.console import Console

from longhaul.sparklines import print_metrics, sparkline


def test_a_character_a_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([7.0, None, 0.0]) == "█ ▁"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([None]) == " " and sparkline([]) == ""


def test_what_is_not_known_is_a_dash() -> None:
    screen = io.StringIO()
    rows = [{"step": 10, "loss": 4.0, "mfu": None}, {"step": 1200, "loss": 2.0, "mfu": None}]
    print_metrics(rows, ["loss", "mfu"], Console(file=screen, width=100))
    title, loss, mfu = screen.getvalue().splitlines()
    assert "steps 10 to 1,200" in title
    assert loss.split() == ["loss", "4", "█▁", "2", "2", "4"]
    assert mfu.split() == ["mfu", "–", "–", "–", "–"]
