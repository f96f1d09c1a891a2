"""Rows of metrics as small curves, a line a field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from jobs.text.units import format_number
from longhaul.answers import MetricDict
from longhaul.columns import GAP, Column, print_table, width_of
from longhaul.figures import size

WIDTH = 48
NARROWEST = 12
"""Characters of a curve, before a column of figures goes."""
FIELDS = ("loss", "learning_rate", "grad_norm", "rows_per_s", "tokens_per_s", "memory_bytes")
_BLOCKS = "▁▂▃▄▅▆▇█"
_FIGURES = (
    Column(""),
    Column("first", right=True, goes=1),
    Column("last", right=True),
    Column("lowest", right=True, goes=3),
    Column("highest", right=True, goes=2),
)


def sparkline(values: Sequence[float | None]) -> str:
    """One character a value between the lowest and the highest; a space where there is none."""
    known = [value for value in values if value is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    return "".join(
        " " if value is None else _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0]
        for value in values
    )


def print_metrics(rows: Sequence[MetricDict], fields: Sequence[str], console: Console) -> None:
    """First, curve, last, lowest and highest of each field, from one row or more."""
    title = f"steps {rows[0]['step']:,} to {rows[-1]['step']:,}"
    curves = [[_finite(row.get(field)) for row in rows] for field in fields]
    lines = [_figures(field, values) for field, values in zip(fields, curves, strict=True)]
    room = max(NARROWEST, console.width - width_of(_FIGURES, lines) - GAP)
    for line, values in zip(lines, curves, strict=True):
        line[title] = sparkline(_thinned(values, room))
    print_table((*_FIGURES[:2], Column(title), *_FIGURES[2:]), lines, console)


def _figures(field: str, values: Sequence[float | None]) -> dict[str, str | Text]:
    known = [value for value in values if value is not None]
    shown = _wording(field)
    figures = [shown(each) for each in (known[0], known[-1], min(known), max(known))] if known else ["–"] * 4
    return {"": Text(field)} | dict(zip(("first", "last", "lowest", "highest"), figures, strict=True))


def _thinned(values: Sequence[float | None], points: int) -> list[float | None]:
    """At most so many, each the mean of its stretch."""
    count = min(points, len(values))
    stretches = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    known = [[value for value in stretch if value is not None] for stretch in stretches]
    return [sum(each) / len(each) if each else None for each in known]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _wording(field: str) -> Callable[[float], str]:
    return size if field.endswith("_bytes") else format_number
