"""Bytes and durations for people."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import subprocess
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
    format_change,
    format_duration,
    format_figure,
    format_milliseconds,
    format_number,
    format_parameters,
    format_rate,
    format_share,
    shares_alike,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("jobs", "service", "worker", "longhaul", "benchmarks")
H = 3600
SHARES_ALIKE = [
    (1.0, "100.0 %"), (0.99991, "> 99.9 %"), (0.87, "87.0 %"), (0.129, "12.9 %"), (0.0006, "0.1 %"),
    (0.0004, "< 0.1 %"), (0.0, "0.0 %"),
]  # fmt: skip
SHARES = [
    (0, "0 %"), (1, "100 %"), (0.5, "50 %"), (0.1512, "15.1 %"), (0.998, "99.8 %"), (0.9996, "> 99.9 %"),
    (0.0994, "9.9 %"), (0.01, "1 %"), (0.0099, "0.99 %"), (0.0035, "0.35 %"), (0.00002, "0.002 %"), (2.5, "250 %"),
    (-0.051, "-5.1 %"),
]  # fmt: skip
NUMBERS = [
    (0, "0"), (1.9123, "1.912"), (0.5, "0.5"), (0.12345, "0.1235"), (99.995, "100"), (38.21, "38.21"),
    (999.9, "1,000"), (999.4, "999.4"), (58_006, "58,006"), (14_732.4, "14,732"), (0.001, "0.001"),
    (0.000885, "8.85e-4"), (5e-5, "5e-5"), (1.8e-6, "1.8e-6"), (-0.25, "-0.25"),
    (0.00099999, "0.001"),
]  # fmt: skip
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


@pytest.mark.parametrize(("share", "text"), SHARES)
def test_shares_are_percentages_and_no_part_is_called_nothing_or_all(share: float, text: str) -> None:
    assert format_share(share) == text


def test_shares_that_are_compared_have_one_precision() -> None:
    assert shares_alike(*(share for share, _ in SHARES_ALIKE)) == [text for _, text in SHARES_ALIKE]


@pytest.mark.parametrize(("value", "text"), [*NUMBERS, (math.nan, "nan")])
def test_numbers_have_four_significant_digits_and_small_ones_a_power_of_ten(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.skipif(shutil.which("node") is None, reason="the scripts of the pages are run by node")
def test_the_scripts_of_the_pages_write_them_alike() -> None:
    static = ROOT / "service" / "pages" / "static"
    figure, share = (
        re.search(rf"^(?:export )?(function {name}\(.*?\n}})", (static / file).read_text(), re.S | re.M)
        for name, file in (("figure", "charts.js"), ("share", "try.js"))
    )
    assert figure and share
    program = f"{figure[1]}\n{share[1]}\nconst [numbers, shares] = {json.dumps([NUMBERS, SHARES_ALIKE])};\n"
    program += "console.log(JSON.stringify([numbers.map(([v]) => figure(v)), shares.map(([v]) => share(v))]));"
    found = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(found) == [[text for _, text in NUMBERS], [text for _, text in SHARES_ALIKE]]


def test_fewer_digits_can_be_asked_for() -> None:
    assert [format_number(value, 3) for value in (38.21, 0.0512, 1234.5)] == ["38.2", "0.0512", "1,234"]
    assert [format_figure(1.91226), format_figure(1234.5, 1)] == ["1.9123", "1,234.5"]
    assert [format_change(value) for value in (0.5, -8.85e-4)] == ["+0.5", "-8.85e-4"]


BY_HAND = re.compile(r"[+,]*\d*(\.\d+)?%|[+,]*\.\d+[ge]|[+,]*\.[3-9]f")
"""Formats of shares, of so many significant digits, and of losses. `g` alone shows a setting as it was typed."""
OTHERS_FORMATS = {
    "jobs/text/units.py": "it is the formatter",
    "jobs/sweeps/space.py": "a value of a parameter, rounded",
    "worker/suggestions.py": "a value of a parameter, rounded",
    "service/jobs/sweeps.py": "seconds of a table that programs read",
    "service/pages/trial_charts.py": "coordinates, and the ticks of an axis",
    "service/pages/line_chart.py": "ticks of an axis",
}


def figures_by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines where an f-string formats a share, a loss or so many significant digits."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            spec = "".join(str(part.value) for part in node.format_spec.values if isinstance(part, ast.Constant))
            if BY_HAND.fullmatch(spec):
                yield node.lineno


def test_no_other_module_words_shares_losses_or_significant_digits() -> None:
    files = [file for room in ("jobs", "service", "worker", "longhaul") for file in (ROOT / room).rglob("*.py")]
    found = [
        f"{name}:{line}"
        for file in files
        if (name := str(file.relative_to(ROOT))) not in OTHERS_FORMATS
        for line in figures_by_hand(ast.parse(file.read_text()))
    ]
    assert not found, "jobs/text/units.py has format_share, format_figure and format_number"


def test_a_share_and_a_small_number_made_by_hand_are_found() -> None:
    source = 'f"{part:.1%} of {loss:.4g}, {rate:+,.2g}, {weight:g}, {count:,}, {percent:6.0%} {loss:,.4f}"'
    assert len(list(figures_by_hand(ast.parse(source)))) == 5


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
