"""Curves of one line."""

from __future__ import annotations

import io

from rich.console import Console

from longhaul.tables import print_metrics, sparkline


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


def test_a_narrow_terminal_has_shorter_curves_of_the_same_fields() -> None:
    fields = ["loss", "learning_rate", "memory_bytes"]
    rows: list[dict[str, float | None]] = [
        {"step": step, "loss": 10 / step, "learning_rate": 0.0001234, "memory_bytes": 2.0**31} for step in range(1, 49)
    ]
    for width in (40, 60, 80, 90, 120):
        screen = io.StringIO()
        print_metrics(rows, fields, Console(file=screen, width=width))
        title, *lines = screen.getvalue().splitlines()
        assert [line.split()[0] for line in lines] == fields and "…" not in screen.getvalue()
        assert "steps 1 to 48" in title and "last" in title and len(title) <= width
        assert "█" in lines[0] and lines[0].count("▁") + 1 >= 8
