"""Trials as SVG: their value against each parameter, and parallel coordinates, in units of the drawings."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jobs import answers
from jobs.sweeps.space import Parameter, Value
from jobs.sweeps.spec import SweepSpec
from jobs.text.units import format_number
from service.pages.line_chart import span, ticks

MOST_DRAWN = 2000
"""Newest trials that are drawn, beside the best."""
EMPHASIZED = 5
"""The best trials, which are drawn one by one; fewer where the next are alike and there is no room for all of them."""
MOST_EQUAL = 20
"""Trials drawn one by one that are as good as the best."""
FENCE = 3.0
"""Values that are worse than three quarters of all by more than so many interquartile ranges are drawn at the edge."""
FEWEST_FENCED = 8
MARGIN = 0.06
"""Of the axis of values, beyond the best and the worst."""
MOST_LABELS = 6
WIDTH, HEIGHT = 360.0, 200.0
LEFT, RIGHT, TOP, FLOOR = 58.0, 346.0, 10.0, 148.0
"""Edges of the field of a scatter plot."""
STRIP = 162.0
"""Below the field: trials that have no value."""
LINES_WIDTH, LINES_HEIGHT = 1000.0, 260.0
LINES_TOP, LINES_FLOOR, LINES_UNUSED = 12.0, 226.0, 250.0
"""The last: where lines cross the axis of a parameter that the trial has not."""
DRAWN = ("succeeded", "pruned", "failed")
Trial = answers.Trial


@dataclass(frozen=True)
class Axis:
    """Where values are, from 0 to 1."""

    name: str
    ticks: tuple[tuple[float, str], ...]
    place: Callable[[Value], float | None]
    """None: it has no place for such a value."""


@dataclass(frozen=True)
class Point:
    """Where one of the best trials is, or several of them."""

    x: float
    y: float
    trials: tuple[Trial, ...]
    is_best: bool
    """Whether they have the best value of all."""


@dataclass(frozen=True)
class Scatter:
    """Values of trials against one parameter: a drawing of `WIDTH` × `HEIGHT`."""

    x: Axis
    x_ticks: tuple[tuple[float, str], ...]
    marks: Mapping[str, str]
    """By status, the path of all marks; those that failed are in a strip of their own."""
    best: tuple[Point, ...]
    """The best last."""


@dataclass(frozen=True)
class Parallel:
    """An axis for each parameter and one for the metric: a drawing of `LINES_WIDTH` × `LINES_HEIGHT`."""

    axes: tuple[tuple[float, Axis], ...]
    """With their places."""
    unused: frozenset[str]
    """Parameters that some of the trials have not."""
    lines: Mapping[str, str]
    """By status, the path of all lines."""
    best: tuple[tuple[str, Trial, bool], ...]
    """The best last; whether it has the best value of all."""


@dataclass(frozen=True)
class TrialCharts:
    """All drawings of a sweep."""

    value_ticks: tuple[tuple[float, str], ...]
    """Of the scatter plots."""
    scatters: tuple[Scatter, ...]
    parallel: Parallel
    beyond: int
    """Trials whose values are so bad that they are drawn at the edge."""
    drawn: frozenset[str]
    """Statuses of the trials, and `best` and `next` where there are some."""
    equal: tuple[int, ...]
    """Numbers of all trials that have the best value."""
    left_out: int
    """The oldest trials, where they are too many; the best are drawn all the same."""


def trial_charts(spec: SweepSpec, trials: Sequence[Trial]) -> TrialCharts | None:
    """Of all trials of a sweep. None: none has a value, and none has failed."""
    ranked = best_first(spec, [trial for trial in trials if trial["status"] == "succeeded"])
    best = _emphasized(ranked)[::-1]
    equal = tuple(sorted(trial["number"] for trial in ranked if trial["value"] == ranked[0]["value"]))
    shown = [trial for trial in trials[-MOST_DRAWN:] if trial["status"] in DRAWN]
    known = [value for trial in [*best, *shown] if (value := _value(trial)) is not None]
    if not shown and not best:
        return None
    low, high = _fenced(known, higher_is_better=spec.by.higher_is_better)
    bottom, top = span(low, high)
    room = (top - bottom) * MARGIN
    floor = bottom - room if low < 0 else max(0.0, bottom - room)
    metric = _number_axis(spec.by.words, floor, top + room)
    parameters = [_axis(key, parameter) for key, parameter in spec.space.items()]
    return TrialCharts(
        value_ticks=tuple((_down(place, TOP, FLOOR), text) for place, text in metric.ticks),
        scatters=tuple(_scatter(axis, metric, shown, best) for axis in parameters),
        parallel=_parallel([*parameters, metric], shown, best),
        drawn=frozenset(trial["status"] for trial in shown)
        | {"best" if _equal(trial, best) else "next" for trial in best},
        equal=equal,
        beyond=sum(not low <= value <= high for value in known),
        left_out=max(0, len(trials) - MOST_DRAWN),
    )


def _emphasized(ranked: Sequence[Trial]) -> list[Trial]:
    """Those as good as the first, and those after them as far as there is room; of equal ones all or none."""
    found: list[Trial] = []
    for _, group in groupby(ranked, key=lambda trial: trial["value"]):
        alike = list(group)
        if found and len(found) + len(alike) > EMPHASIZED:
            break
        found += alike[:MOST_EQUAL]
    return found


def _equal(trial: Trial, best: Sequence[Trial]) -> bool:
    """Whether it is as good as the best, which is the last."""
    return trial["value"] == best[-1]["value"]


def best_first(spec: SweepSpec, trials: Sequence[Trial]) -> list[Trial]:
    """Those with a value: what succeeded before what was pruned, for its value is of an earlier evaluation."""
    cost = spec.by.cost
    found = [(trial["status"] != "succeeded", cost(value), trial["number"], trial)
             for trial in trials if (value := _value(trial)) is not None]  # fmt: skip
    return [trial for *_, trial in sorted(found, key=lambda each: each[:3])]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted key, where no other key ends alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def setting_text(value: Value, most: int = 60) -> str:
    """A setting for people, of so many characters at most."""
    if isinstance(value, float):
        return format_number(value)
    return clipped(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), most)


def clipped(text: str, most: int) -> str:
    """The beginning of a text that is longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _value(trial: Trial) -> float | None:
    return None if trial["value"] is None or not math.isfinite(trial["value"]) else trial["value"]


def _fenced(values: Sequence[float], *, higher_is_better: bool) -> tuple[float, float]:
    """From the least to the greatest, but for what is much worse than the others, such as a loss that diverged."""
    if len(values) >= FEWEST_FENCED:
        lower, _, upper = statistics.quantiles(values, n=4)
        reach = FENCE * (upper - lower)
        values = [each for each in values if (each >= lower - reach if higher_is_better else each <= upper + reach)]
    return min(values, default=0.0), max(values, default=1.0)


def _axis(key: str, parameter: Parameter) -> Axis:
    if parameter.choice is not None:
        return _category_axis(key, parameter.choice)
    return _number_axis(key, *span(*parameter.bounds), log=parameter.log, whole=parameter.whole is not None)


def _category_axis(name: str, choices: Sequence[Value]) -> Axis:
    places = {json.dumps(value, sort_keys=True): (at + 0.5) / len(choices) for at, value in enumerate(choices)}
    every = math.ceil(len(choices) / MOST_LABELS)
    labels = tuple((places[json.dumps(value, sort_keys=True)], setting_text(value)) for value in choices[::every])
    return Axis(name, labels, lambda value: places.get(json.dumps(value, sort_keys=True)))


def _number_axis(name: str, low: float, high: float, *, log: bool = False, whole: bool = False) -> Axis:
    scaled: Callable[[float], float] = math.log if log else float
    first, last = scaled(low), scaled(high)

    def place(value: Value) -> float | None:
        if not isinstance(value, int | float) or (log and value <= 0):
            return None
        return min(1.0, max(0.0, (scaled(value) - first) / (last - first)))

    found = _log_ticks(low, high) if log else ticks(low, high)
    labels = [(place(tick), format_number(tick, 6)) for tick in found if not whole or tick == round(tick)]
    return Axis(name, tuple((at, text) for at, text in labels if at is not None), place)


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with fewer than two of them, 1, 2 and 5 times these; else both ends."""
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)]
    for factors in ((1,), (1, 2, 5)):
        found = [tick for power in powers for factor in factors if low <= (tick := factor * power) <= high]
        if len(found) > 1:
            return found[:: math.ceil(len(found) / MOST_LABELS)]
    return [low, high]


def _across(place: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * place, 1)


def _down(place: float, top: float, floor: float) -> float:
    return round(floor - (floor - top) * place, 1)


def _scatter(x: Axis, metric: Axis, trials: Sequence[Trial], best: Sequence[Trial]) -> Scatter:
    def at(trial: Trial) -> tuple[float, float] | None:
        across = x.place(trial["settings"][x.name]) if x.name in trial["settings"] else None
        up = metric.place(_value(trial))
        return None if across is None else (_across(across), STRIP if up is None else _down(up, TOP, FLOOR))

    marks = defaultdict[str, list[str]](list)
    places = defaultdict[tuple[float, float], list[Trial]](list)
    for trial in best:
        if (where := at(trial)) is not None:
            places[where].append(trial)
    for trial in trials:
        if (where := at(trial)) is not None:
            marks[trial["status"]].append(_mark(trial["status"], *where))
    return Scatter(
        x,
        tuple((_across(place), text) for place, text in x.ticks),
        {status: "".join(each) for status, each in marks.items()},
        tuple(Point(*where, tuple(here), any(_equal(each, best) for each in here)) for where, here in places.items()),
    )


def _mark(status: str, x: float, y: float) -> str:
    """A cross, a ring, or a dot, which is a line of no length with round ends."""
    if status == "failed":
        return f"M{x - 3:g},{y - 3:g}l6,6m0-6l-6,6"
    return f"M{x - 3:g},{y:g}a3,3 0 1 0 6,0a3,3 0 1 0-6,0" if status == "pruned" else f"M{x:g},{y:g}h0"


def _parallel(axes: Sequence[Axis], trials: Sequence[Trial], best: Sequence[Trial]) -> Parallel:
    places = [round(LINES_WIDTH * (at + 0.5) / len(axes), 1) for at in range(len(axes))]
    *parameters, metric = axes

    def line(trial: Trial) -> str:
        """From axis to axis; without a value it ends before the last."""
        given = trial["settings"]
        ups = [axis.place(given[axis.name]) if axis.name in given else None for axis in parameters]
        downs = [LINES_UNUSED if up is None else _down(up, LINES_TOP, LINES_FLOOR) for up in ups]
        if (up := metric.place(_value(trial))) is not None:
            downs.append(_down(up, LINES_TOP, LINES_FLOOR))
        return "M" + "L".join(f"{x:g},{y:g}" for x, y in zip(places, downs, strict=False))

    lines = defaultdict[str, list[str]](list)
    for trial in trials:
        lines[trial["status"]].append(line(trial))
    settings = [each["settings"] for each in [*trials, *best]]
    return Parallel(
        tuple(zip(places, axes, strict=True)),
        frozenset(axis.name for axis in parameters if any(axis.name not in given for given in settings)),
        {status: "".join(each) for status, each in lines.items()},
        tuple((line(trial), trial, _equal(trial, best)) for trial in best),
    )
