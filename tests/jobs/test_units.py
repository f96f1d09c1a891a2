"""Bytes and durations for people."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.text.units import (
    GIB,
    KIB,
    MIB,
    bytes_alike,
    bytes_by_name,
    durations_alike,
    format_bytes,
    format_duration,
    format_milliseconds,
    format_parameters,
    format_rate,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("jobs", "service", "worker", "longhaul", "benchmarks")
H = 3600
AN_UNIT = re.compile(r"\s?([KMGT]i?B|B|ms|s|sec|seconds|min|minutes|h|hours|d|days)\b")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (KIB, "1 KiB"),
        (1023.4 * MIB, "1,023 MiB"),
        (1023.99 * MIB, "1.0 GiB"),
        (300 * MIB, "300 MiB"),
        (27.1 * GIB, "27.1 GiB"),
        (1536 * GIB, "1,536.0 GiB"),
        (-GIB, "-1.0 GiB"),
    ],
)
def test_bytes_are_in_the_unit_that_makes_them_short(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_bytes_that_are_compared_have_one_unit_in_which_none_becomes_zero() -> None:
    assert bytes_alike(300 * MIB, 31 * GIB) == ["0.3 GiB", "31.0 GiB"]
    assert bytes_alike(5 * MIB, 34 * GIB) == ["5 MiB", "34,816 MiB"]
    assert bytes_alike(0, 34 * GIB) == ["0.0 GiB", "34.0 GiB"]
    assert bytes_by_name({"free": 3 * MIB, "used": None, "in all": GIB}) == ["3 MiB free", "1,024 MiB in all"]
    assert bytes_by_name({"free": None}) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0, "0 s"),
        (0.84, "0.8 s"),
        (5, "5 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.9, "1 min"),
        (90, "1 min 30 s"),
        (3599, "59 min 59 s"),
        (3599.6, "1 h"),
        (12_000, "3 h 20 min"),
        (24 * H - 1, "1 d"),
        (131 * H, "5 d 11 h"),
        (24_000 * H, "1,000 d"),
    ],
)
def test_durations_have_two_units_and_none_is_full(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_durations_that_are_compared_have_the_units_of_the_shortest() -> None:
    assert durations_alike(20 * H, 66.5 * H) == ["20 h", "66 h 30 min"]
    assert durations_alike(131 * H, 434 * H) == ["5 d 11 h", "18 d 2 h"]


def made_by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines where an f-string puts a unit behind a figure. Exact counts ("{size} bytes") are no measures."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for figure, after in zip(node.values, node.values[1:], strict=False):
                if (
                    isinstance(figure, ast.FormattedValue)
                    and isinstance(after, ast.Constant)
                    and AN_UNIT.match(str(after.value))
                    and (figure.format_spec is not None or str(after.value).startswith(" "))
                ):
                    yield figure.lineno


def test_short_durations_and_rates() -> None:
    assert [format_milliseconds(0.3352), format_milliseconds(1.5)] == ["335 ms", "1,500 ms"]
    assert [format_rate(rate) for rate in (2.1e8, 2.53e10, 1.792e12)] == ["210 MB/s", "25.3 GB/s", "1,792 GB/s"]


def test_parameters_of_a_model() -> None:
    assert [format_parameters(count) for count in (60_506_624, 2_849_757_184)] == ["60.5 M", "2.85 B"]


def test_no_other_module_words_bytes_or_durations() -> None:
    files = [
        *(file for room in PACKAGES for file in (ROOT / room).rglob("*.py")),
        *(file for file in (ROOT / "tests").rglob("*.py") if not file.name.startswith("test_")),
    ]
    files.remove(ROOT / "jobs" / "text" / "units.py")
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in made_by_hand(ast.parse(file.read_text()))]
    assert not found, "jobs/text/units.py words bytes and durations"


def test_a_figure_with_a_unit_of_its_own_is_found() -> None:
    source = 'f"{size / GIB:.1f} GiB free, {hours:.0f}h, {wait} s, {count} steps, {names}s"'
    assert len(list(made_by_hand(ast.parse(source)))) == 3
