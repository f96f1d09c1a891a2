"""Curves as SVG, for pages without scripts: where lines, ticks and points are, in units of the drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 10.0, 40.0
"""Margins: room for ticks."""
MOST_TICKS = 5
MOST_DOTS = 24
"""Points of a line at most that are marked one by one."""
FLAT = 1e-4
"""Values that differ by less of their size are drawn as a flat line: their labels, of six digits, would be equal."""
LEAST = 1e-300
"""What is smaller is drawn as 0: a part of it would be no number any more."""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    path: str
    """Of a polyline."""
    dots: tuple[tuple[float, float], ...]
    """Its points, where they are few."""
    last: str
    """Its last value."""


@dataclass(frozen=True)
class LineChart:
    """A drawing of `WIDTH` × `HEIGHT`."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def line_chart(title: str, series: Mapping[str, Points]) -> LineChart | None:
    """Of (step, value) points by name; values that are not finite are left out. None: nothing is left to draw."""
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    points = [point for each in kept.values() for point in each]
    if not points:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = (min(xs), max(xs)) if len({*xs}) > 1 else (0.0, max(1.0, xs[0]))  # steps, which begin at 0
    y_low, y_high = span(min(ys), max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - x_low) / (x_high - x_low)
        down = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y_low) / (y_high - y_low)
        return round(across, 1), round(down, 1)

    lines = []
    for name, each in kept.items():
        places = [at(x, y) for x, y in each]
        dots = tuple(places) if len(places) <= MOST_DOTS else ()
        lines.append(Line(name, " ".join(f"{x},{y}" for x, y in places), dots, f"{each[-1][1]:,.4g}" if each else ""))
    return LineChart(
        title,
        tuple(lines),
        tuple((at(tick, y_low)[0], f"{tick:,.0f}") for tick in ticks(x_low, x_high) if tick == round(tick)),
        tuple((at(x_low, tick)[1], f"{tick:,.6g}") for tick in ticks(y_low, y_high)),
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at most `MOST_TICKS` + 1. They must differ by more than `FLAT` of either."""
    rough = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def span(low: float, high: float) -> tuple[float, float]:
    """Never so small that labels of its ticks would be equal, and below zero only where a value is."""
    large = max(abs(low), abs(high))
    if large < LEAST:
        return (-0.5, 0.5) if low < 0 else (0.0, 1.0)
    return (low, high) if high - low > FLAT * large else (low - 0.5 * large, high + 0.5 * large)
