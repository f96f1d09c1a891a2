"""Rows of metrics for charts: parsed once as they come, kept as columns, averaged over stretches.

A run of days has some 25,000 rows, and its page asks every second. So each process keeps what it has parsed of the last
few files, 8 bytes a figure, and reads only what was added since.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from jobs.comparison.facts import MeanPace
from jobs.disk.files import START, regular
from jobs.disk.rundir import parse_row
from jobs.errors import UserError
from jobs.metrics import MetricRow

log = logging.getLogger("longhaul.service")
KEPT_ROWS = 250_000
"""Of all files together: about 60 MB."""
KEPT_FILES = 64
KEPT_PACES = 4096
"""Of files whose rows may be forgotten: 100 bytes each."""
BLOCK_BYTES = 1024 * 1024
_WHOLE = frozenset(name for name, field in MetricRow.model_fields.items() if field.annotation in (int, int | None))
ALWAYS = ("step", "at", "attempt")
"""Fields that every point has, from the last row of its stretch."""
FIELDS = tuple(name for name in MetricRow.model_fields if name not in ALWAYS)


Figures = dict[str, float | None]
"""Fields of a row or point, by name."""


class _PaceRow(TypedDict):
    """What `Series.pace` needs of a row, which is read more than twice as fast as all of it."""

    step: int
    rows_per_s: float
    tokens_per_s: NotRequired[float | None]
    mfu: NotRequired[float | None]
    step_s: float
    memory_bytes: int


_pace_row = TypeAdapter(_PaceRow)


def _whole_row(line: bytes, file: Path) -> Mapping[str, float | None] | None:
    row = parse_row(line, file)
    return None if row is None else row.__dict__


def _paced_row(line: bytes, file: Path) -> Mapping[str, float | None] | None:
    """A damaged line is reported by whoever reads the whole row."""
    try:
        return cast(Mapping[str, float | None], _pace_row.validate_json(line))
    except ValidationError:
        return None


class Series:
    """The rows of one file, in order of step; where a step was logged twice, the later row. Not for two threads."""

    def __init__(
        self,
        names: Sequence[str] = tuple(MetricRow.model_fields),
        parse: Callable[[bytes, Path], Mapping[str, float | None] | None] = _whole_row,
    ) -> None:
        self._names, self._parse = names, parse
        self._begin()

    def _begin(self) -> None:
        self._columns = {name: array("d") for name in self._names}
        self._place = START

    def __len__(self) -> int:
        return len(self._columns["step"])

    def catch_up(self, file: Path) -> None:
        """Take what was added to the file; all of it, if it was cut or is another one. None there: no rows."""
        try:
            with open(file, "rb", opener=regular) as lines:
                if self._place.found_in(lines) != self._place:
                    self._begin()
                while block := lines.read(BLOCK_BYTES):
                    whole = block.rfind(b"\n") + 1
                    if not whole:
                        break  # torn, or still being written
                    for line in block[: whole - 1].split(b"\n"):
                        self._take(line, file)
                    self._place = self._place.after(block[:whole])
                    lines.seek(self._place.offset)
        except FileNotFoundError:
            self._begin()

    def rows(self, *, after_step: int, limit: int, fields: Sequence[str] | None) -> tuple[list[Figures], bool]:
        """At most `limit` rows above a step, with all fields or these, and whether there are more."""
        first = bisect.bisect_right(self._columns["step"], after_step)
        last = min(first + limit, len(self))
        names = tuple(self._columns) if fields is None else (*ALWAYS, *fields)
        columns = [[_json_number(name, value) for value in self._columns[name][first:last]] for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)], last < len(self)

    def points(self, *, after_step: int, points: int, fields: Sequence[str] | None) -> list[Figures]:
        """At most `points` means over stretches of equally many rows above a step.

        `first_step` to `step` is the stretch; a loss comes with `loss_min` and `loss_max`, so that no spike is lost.
        Stretches begin where they began before until they have to grow, so that a chart does not waver.
        """
        start = bisect.bisect_right(self._columns["step"], after_step)
        stretch = max(1, math.ceil((len(self) - start) / points))
        found = []
        for first in range(start, len(self), stretch):
            last = min(first + stretch, len(self))
            point = {name: _json_number(name, self._columns[name][last - 1]) for name in ALWAYS}
            point["first_step"] = int(self._columns["step"][first])
            for name in FIELDS if fields is None else fields:
                values = self._columns[name][first:last]
                point[name] = _mean(values)
                if name == "loss":
                    point |= {"loss_min": min(values), "loss_max": max(values)}
            found.append(point)
        return found

    def pace(self) -> MeanPace:
        """Means over the time of all steps, and the highest memory."""
        if not len(self):
            return MeanPace()
        steps = self._columns["step"]
        seconds = [
            each * max(0.0, step - before)
            for each, step, before in zip(self._columns["step_s"], steps, [0.0, *steps[:-1]], strict=True)
        ]
        rows_per_s, tokens_per_s, mfu = (
            _mean_over(self._columns[name], seconds) for name in ("rows_per_s", "tokens_per_s", "mfu")
        )
        return MeanPace(rows_per_s, tokens_per_s, mfu, int(max(self._columns["memory_bytes"])))

    def losses(self, steps: Sequence[int]) -> list[float | None]:
        """For each step the loss of the newest row up to it; None: there is none."""
        logged = self._columns["step"]
        places = [bisect.bisect_right(logged, step) for step in steps]
        return [_json_number("loss", self._columns["loss"][place - 1]) if place else None for place in places]

    def _take(self, line: bytes, file: Path) -> None:
        if (row := self._parse(line, file)) is None:
            return
        steps, step = self._columns["step"], row["step"]
        assert step is not None
        place = len(steps) if not steps or step > steps[-1] else bisect.bisect_left(steps, step)
        again = place < len(steps) and steps[place] == step
        for name, column in self._columns.items():
            value = row.get(name)
            figure = math.nan if value is None else float(value)  # no row holds a real NaN
            if again:
                column[place] = figure
            else:
                column.insert(place, figure)


class SeriesCache:
    """Series of the files that were asked for last. For any thread."""

    def __init__(self, most_rows: int = KEPT_ROWS) -> None:
        self._most_rows = most_rows
        self._kept: OrderedDict[Path, tuple[Series, threading.Lock]] = OrderedDict()
        self._paces: dict[Path, tuple[tuple[int, int, int], MeanPace]] = {}
        self._lock = threading.Lock()

    def rows(
        self, file: Path, *, after_step: int, limit: int, fields: Sequence[str] | None
    ) -> tuple[list[Figures], bool]:
        """`Series.rows` of the file as it is now."""
        with self._current(file) as series:
            return series.rows(after_step=after_step, limit=limit, fields=fields)

    def points(self, file: Path, *, after_step: int, points: int, fields: Sequence[str] | None) -> list[Figures]:
        """`Series.points` of the file as it is now."""
        with self._current(file) as series:
            return series.points(after_step=after_step, points=points, fields=fields)

    def losses(self, file: Path, steps: Sequence[int]) -> list[float | None]:
        """`Series.losses` of the file as it is now."""
        with self._current(file) as series:
            return series.losses(steps)

    def pace(self, file: Path) -> MeanPace:
        """`Series.pace` of the file as it is now; kept for as long as the file stays as it is."""
        try:
            status = file.stat()
        except FileNotFoundError:
            return MeanPace()
        state = status.st_ino, status.st_size, status.st_mtime_ns
        with self._lock:
            kept = self._paces.get(file)
        if kept is not None and kept[0] == state:
            return kept[1]
        series = Series(tuple(_PaceRow.__annotations__), _paced_row)
        series.catch_up(file)
        pace = series.pace()
        with self._lock:
            self._paces[file] = state, pace
            while len(self._paces) > KEPT_PACES:
                self._paces.pop(next(iter(self._paces)))
        return pace

    @contextmanager
    def _current(self, file: Path) -> Iterator[Series]:
        """The series of this file, with all that it has by now, for one thread."""
        with self._lock:
            series, lock = self._kept.setdefault(file, (Series(), threading.Lock()))
            self._kept.move_to_end(file)
        with lock:
            series.catch_up(file)
            yield series
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Keep the newest within bounds; the one just used in any case."""
        with self._lock:
            rows = sum(len(series) for series, _ in self._kept.values())
            while len(self._kept) > 1 and (rows > self._most_rows or len(self._kept) > KEPT_FILES):
                _, (oldest, _) = self._kept.popitem(last=False)
                rows -= len(oldest)


def chosen(fields: str | None) -> list[str] | None:
    """The fields of `loss,rows_per_s`; None: all. Raises UserError naming those that there are."""
    if fields is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in fields.split(",")))
    for name in names:
        if name not in MetricRow.model_fields:
            raise UserError(
                f"fields: {name[:80]!r} is not a metric",
                param="fields",
                hint=f"known are {', '.join(FIELDS)}; each point has {', '.join(ALWAYS)} in any case",
            )
    return [name for name in names if name not in ALWAYS]


def _mean(values: array[float]) -> float | None:
    """Of those that are there."""
    total = math.fsum(values)
    if not math.isnan(total):
        return total / len(values)
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) / len(there) if there else None


def _mean_over(values: array[float], weights: Sequence[float]) -> float | None:
    """Of those that are there, each as often as its weight says."""
    there = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    total = math.fsum(weight for _, weight in there)
    return math.fsum(value * weight for value, weight in there) / total if total else None


def _json_number(name: str, value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if name in _WHOLE else value
