"""Rows of metrics as small curves, a line a field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longhaul.answers import MetricDict
from longhaul.figures import size

WIDTH = 48
FIELDS = ("loss", "learning_rate", "grad_norm", "rows_per_s", "tokens_per_s", "memory_bytes")
_BLOCKS = "▁▂▃▄▅▆▇█"


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
    """First, curve, last, lowest and highest of each field."""
    if not rows:
        console.print("no metrics yet: the first steps write them")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("first", no_wrap=True, justify="right")
    table.add_column(f"steps {rows[0]['step']:,} to {rows[-1]['step']:,}", no_wrap=True)
    for title in ("last", "lowest", "highest"):
        table.add_column(title, no_wrap=True, justify="right")
    for field in fields:
        values = [_finite(row.get(field)) for row in rows]
        known = [value for value in values if value is not None]
        shown = _wording(field)
        figures = [shown(each) for each in (known[0], known[-1], min(known), max(known))] if known else ["–"] * 4
        table.add_row(Text(field), figures[0], sparkline(values), *figures[1:])
    console.print(table)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _wording(field: str) -> Callable[[float], str]:
    return size if field.endswith("_bytes") else lambda value: f"{value:.4g}"
