"""Numbers, shares, bytes, durations and sizes of models for people, and any text as they may read it. No other
module words figures
(`tests/jobs/test_units.py`).

Counts have thousands separators: `58,006`. A share is a percentage with a space before its sign: `15.1 %`. A loss has
four digits after the point wherever it is shown: `1.9123`. Other figures have four significant digits, small ones a
power of ten: `1.912`, `8.85e-4`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# -- printable ---------------------------------------------------------------------------------------------------------
# Text from elsewhere (rows, names, errors, a trainer's output) as a person may read it.
#
# What a terminal obeys is taken out: the control characters C0 and C1 with ESC among them, and what reorders or breaks
# a line (bidirectional marks, embeddings, overrides and isolates; separators of lines and paragraphs). Newlines and
# tabs stay. Records and files keep the text as it is.

_REORDERING = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROL = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_REORDERING}]")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_RETURN = re.compile("\r\n?")
_UNESCAPED = re.compile(f"[\x7f-\x9f{_REORDERING}\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without what a terminal obeys; a carriage return ends a line."""
    return _RETURN.sub("\n", without_controls(text))


def without_controls(text: str) -> str:
    """`printable`, with carriage returns as they are: the lines of progress bars end with them."""
    return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub("", text))


def one_line(text: str) -> str:
    """`printable`, on one line."""
    return printable(text).replace("\n", " ")


def capitalized(text: str) -> str:
    """With a capital letter, as a line of its own begins."""
    return text[:1].upper() + text[1:]


def printable_document(document: Any) -> Any:
    """A JSON document with each text in it, names as well, `printable`."""
    match document:
        case str():
            return printable(document)
        case dict():
            return {printable(name): printable_document(value) for name, value in document.items()}
        case list():
            return [printable_document(value) for value in document]
        case _:
            return document


def escaped(json_text: str) -> str:
    """JSON that means the same, with `\\u…` for what a terminal obeys and JSON leaves as it is."""
    if json_text.isascii() and "\x7f" not in json_text:  # most are, and this is found out ten times as fast
        return json_text
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", json_text)


# -- units -------------------------------------------------------------------------------------------------------------

KIB, MIB, GIB = 2**10, 2**20, 2**30


class ByteUnit(NamedTuple):
    """B, KiB, MiB or GiB."""

    name: str
    size: int
    """In bytes."""
    places: int = 0
    """Digits after the point."""

    def format(self, count: float) -> str:
        """So many bytes, in this unit."""
        return f"{count / self.size:,.{self.places}f} {self.name}"


_BYTE_UNITS = (ByteUnit("B", 1), ByteUnit("KiB", KIB), ByteUnit("MiB", MIB), ByteUnit("GiB", GIB, 1))
_TIME_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def byte_unit(*counts: float) -> ByteUnit:
    """That of the largest; the next smaller one where the smallest would round to 0 in it."""
    largest, index = max(map(abs, counts), default=0), 0
    while index < len(_BYTE_UNITS) - 1 and round(largest / _BYTE_UNITS[index].size) >= 1024:
        index += 1
    unit = _BYTE_UNITS[index]
    vanishes = any(count and not round(count / unit.size, unit.places) for count in counts)
    return _BYTE_UNITS[index - 1] if vanishes and index else unit


def format_share(share: float) -> str:
    """`15.1 %`, `50 %`, `0.35 %`: one digit after the point, below 1 % two significant ones; no part is called all."""
    percent = 100 * share
    if not math.isfinite(percent):
        return f"{percent} %"
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    shown = f"{percent:,.1f}" if abs(percent) >= 0.995 else f"{percent:.2g}"
    return f"{_plain(shown)} %"


def shares_alike(*shares: float) -> list[str]:
    """Shares that are compared, each with one digit after the point: `87.0 %`, `12.9 %`, `< 0.1 %`; no part is called
    all or nothing."""
    bounds = {0.0: "< 0.1 %", 100.0: "> 99.9 %"}
    return [
        bounds[near] if (near := round(100 * share, 1)) in bounds and 100 * share != near else f"{near:.1f} %"
        for share in shares
    ]


def format_number(value: float, digits: int = 4) -> str:
    """A loss, a rate, a setting: `1.912`, `0.5`, `14,732`, `8.85e-4`. From 1,000 on a whole number."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    if int(power) < -3:
        return f"{_plain(mantissa)}e{int(power)}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return _plain(f"{value:#.{digits}g}")


def format_figure(value: float, places: int = 4) -> str:
    """A loss, or another figure of which one says the next to be larger or smaller: `1.9123`, `0.5000`; with so many
    digits after the point."""
    return f"{value:,.{places}f}"


def format_score(value: float) -> str:
    """A number that a model answers, in six digits, as a program reads it: `4.1875`, `1.5e-07`."""
    return f"{value:.6g}"


def format_change(value: float, digits: int = 4) -> str:
    """The same with its sign: `+0.5`, `-8.85e-4`."""
    return f"{'+' if value >= 0 else ''}{format_number(value, digits)}"


def _plain(figure: str) -> str:
    return figure.rstrip("0").rstrip(".") if "." in figure else figure


def format_bytes(count: float) -> str:
    """`700 B`, `12 KiB`, `300 MiB`, `27.1 GiB`, `1,536.0 GiB`."""
    return byte_unit(count).format(count)


def bytes_alike(*counts: float) -> list[str]:
    """Figures of one sentence, all in the same unit: `0.3 GiB`, `31.0 GiB`."""
    unit = byte_unit(*counts)
    return [unit.format(count) for count in counts]


def bytes_by_name(counts: Mapping[str, float | None]) -> list[str]:
    """`27.0 GiB allocated`, `1.0 GiB free`: what is known of them, all in the same unit."""
    known = {name: count for name, count in counts.items() if count is not None}
    return [f"{figure} {name}" for name, figure in zip(known, bytes_alike(*known.values()), strict=True)]


def format_duration(seconds: float) -> str:
    """Its two largest units: `0.8 s`, `45 s`, `12 min 30 s`, `3 h 20 min`, `5 d 11 h`. Below 0: `0 s`."""
    return durations_alike(seconds)[0]


def durations_alike(*seconds: float) -> list[str]:
    """Durations of one sentence, all in the units of the shortest: `20 h`, `66 h 30 min`."""
    index = max(map(_largest_unit, seconds))
    return [_in_units(max(0.0, each), index) for each in seconds]


def format_milliseconds(seconds: float) -> str:
    """Of what takes no longer than a second or two: `340 ms`."""
    return f"{seconds * 1e3:,.0f} ms"


def format_rate(bytes_per_s: float) -> str:
    """In powers of ten, as data sheets of GPUs, buses and disks say it: `210 MB/s`, `25.3 GB/s`, `1,792 GB/s`."""
    if bytes_per_s < 1e9:
        return f"{bytes_per_s / 1e6:,.0f} MB/s"
    return f"{bytes_per_s / 1e9:,.1f} GB/s" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:,.0f} GB/s"


def format_parameters(count: int) -> str:
    """Of a model: `60.5 M`, `2.85 B`."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _largest_unit(seconds: float) -> int:
    """Index of the unit that a duration begins with: 3,599.6 s rounds up to `1 h`, 3,599 s does not."""
    for index, (_, length) in enumerate(_TIME_UNITS):
        rounded_to = _TIME_UNITS[min(index + 2, len(_TIME_UNITS) - 1)][1]
        if round(seconds / rounded_to) * rounded_to >= length:
            return index
    return len(_TIME_UNITS) - 1


def _in_units(seconds: float, index: int) -> str:
    name, length = _TIME_UNITS[index]
    if length == 1:
        return f"{round(seconds, 1):g} s" if seconds < 9.95 else f"{seconds:,.0f} s"
    below_name, below = _TIME_UNITS[index + 1]
    most, rest = divmod(round(seconds / below), length // below)
    return f"{most:,} {name}" + (f" {rest} {below_name}" if rest else "")
