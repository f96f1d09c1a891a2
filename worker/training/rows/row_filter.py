"""Usable rows, and a count of the others: nothing is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.training.rows.row import TOO_DEEP, Defect, Row
from worker.training.rows.text import RowReader, Texts

DUPLICATE = "duplicate"
EXCERPT = 200
"""Characters of a rejected row in the report."""
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Rejection:
    """A row that was rejected."""

    number: int
    reason: str
    excerpt: str


def parse_rows(rows: Iterable[Row], reader: RowReader) -> Iterator[tuple[Row, Texts | Rejection]]:
    """Every row: its texts, or why it cannot be used."""
    for row in rows:
        try:
            if row.columns is None:
                raise Defect(row.defect)
            texts = reader.read(row.columns)
        except (Defect, RecursionError) as error:
            reason = str(error) if isinstance(error, Defect) else TOO_DEEP
            yield row, Rejection(row.number, reason, row.text[:EXCERPT])
        else:
            if row.noticed is not None:
                reader.noticed[row.noticed] += 1
            yield row, texts


class RowFilter:
    """The usable rows of a source or of its beginning, each once; counts into `counts` as it goes."""

    def __init__(self, rows: Iterable[Row], reader: RowReader) -> None:
        self._rows, self._reader = rows, reader
        self._keys: set[int] = set()
        self.counts = reader.counts()

    def good_rows(self) -> Iterator[tuple[Row, Texts]]:
        """Each as it was read, and its texts; in the order of the source."""
        for row, found in parse_rows(self._rows, self._reader):
            self.counts.read += 1
            if isinstance(found, Rejection):
                self.counts.reject(row.number, found.reason)
            elif (key := found.key) in self._keys:
                self.counts.duplicates += 1
            else:
                self._keys.add(key)
                self.counts.kept += 1
                yield row, found


class Seen:
    """The 64-bit keys seen so far: 8 bytes per key, three times as much for a moment.

    Sorted runs, each at least twice as long as the next, as in a log-structured merge tree.
    """

    def __init__(self) -> None:
        self._runs: list[UInt64] = []

    def first_times(self, keys: UInt64) -> npt.NDArray[np.bool_]:
        """[keys] whether each is new, neither among those before nor earlier in `keys`; all are remembered."""
        unique, places = np.unique(keys, return_index=True)
        new = np.ones(len(unique), bool)
        for run in self._runs:
            found = np.searchsorted(run, unique).clip(max=len(run) - 1)
            new &= run[found] != unique
        first = np.zeros(len(keys), bool)
        first[places[new]] = True
        if new.any():
            self._runs.append(unique[new])
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")
            self._runs.append(merged)
        return first
