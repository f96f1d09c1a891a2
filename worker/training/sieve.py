"""Rows that can be used, and an account of those that cannot: nothing is dropped silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from jobs.errors import BadData
from worker.training.sources import Line
from worker.training.text import Defect, RowReader, Texts

DUPLICATE = "duplicate"
_EXCERPT = 200
_FIRST_LINES = 3

Rejection = Callable[[int, str, str], None]
"""Told of every row set aside: line number, reason, the line's first 200 characters."""


class Seen:
    """Which 64-bit keys came before; about 8 bytes a key."""

    def __init__(self) -> None:
        self._sorted: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def first_time(self, key: int) -> bool:
        """Whether this key is new; it is remembered."""
        if key in self._recent:
            return False
        place = int(np.searchsorted(self._sorted, np.uint64(key)))
        if place < len(self._sorted) and int(self._sorted[place]) == key:
            return False
        self._recent.add(key)
        if len(self._recent) >= 1 << 16:
            merged = np.concatenate([self._sorted, np.fromiter(self._recent, np.uint64, len(self._recent))])
            self._sorted, self._recent = np.sort(merged), set()
        return True


class Sieve:
    """Reads the rows of one file; counts as it goes.

    `read` counts rows (not blank lines), `kept` the good ones, `set_aside` the unusable ones by reason. Duplicates are
    set aside too, under `duplicates`: they are counted, but nothing is wrong with the file, so they do not count
    towards `max_invalid_fraction`.
    """

    def __init__(self, lines: Iterable[Line], rows: RowReader, seen: Seen, reject: Rejection | None = None) -> None:
        self._lines, self._rows, self._seen, self._reject = lines, rows, seen, reject
        self.read = self.kept = self.duplicates = 0
        self.set_aside: Counter[str] = Counter()
        self._first: dict[str, list[int]] = {}

    @property
    def invalid(self) -> int:
        """Unusable rows so far."""
        return self.set_aside.total()

    def good_rows(self) -> Iterator[Texts]:
        """The usable rows, in the order of the file."""
        for line in self._lines:
            self.read += 1
            if line.text is None:
                self._put_aside(line.number, str(line.defect), "")
                continue
            try:
                texts = self._rows.read(line.text)
            except Defect as defect:
                self._put_aside(line.number, str(defect), line.text)
                continue
            if self._seen.first_time(texts.key):
                self.kept += 1
                yield texts
            else:
                self.duplicates += 1
                self._tell(line.number, DUPLICATE, line.text)

    def refuse_too_many(self, limit: float, name: str, of: int) -> None:
        """Raise BadData (`too_many_invalid_rows`) if more than `limit` of `of` rows are unusable."""
        if self.invalid <= limit * of:
            return
        share = self.invalid / of
        commonest = "; ".join(
            f"{reason}: {count} (line{'s' if count > 1 else ''} {', '.join(map(str, self._first[reason]))}"
            f"{', …' if count > _FIRST_LINES else ''})"
            for reason, count in self.set_aside.most_common(3)
        )
        raise BadData(
            f"{self.invalid} of {of} rows of {name} cannot be used ({share:.1%}; data.max_invalid_fraction allows "
            f"{limit:.1%}). Commonest: {commonest}",
            code="too_many_invalid_rows",
            param="data.max_invalid_fraction",
            hint=f"repair these lines, or set data.max_invalid_fraction above {share:.3g} to go on without them",
        )

    def _put_aside(self, number: int, reason: str, text: str) -> None:
        self.set_aside[reason] += 1
        first = self._first.setdefault(reason, [])
        if len(first) < _FIRST_LINES:
            first.append(number)
        self._tell(number, reason, text)

    def _tell(self, number: int, reason: str, text: str) -> None:
        if self._reject is not None:
            self._reject(number, reason, text[:_EXCERPT])
