"""How often the rows of each source occur in an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from worker.training.dataset.data import Int64

if TYPE_CHECKING:  # the GPU benchmarks run where there is no pydantic
    from jobs.plan import SourcePlan


class Mixture:
    """Rows that are numbered source by source; `sources` are (rows, occurrences in an epoch) of each.

    A source with more occurrences than rows has each row equally often, but for a rest; the rest is the next so many
    rows of a fixed random order, which begins again at its end. So after any number of epochs no row of a source has
    occurred twice more often than another.
    """

    def __init__(self, sources: Sequence[tuple[int, int]], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self.rows = sum(occurrences for _, occurrences in sources)
        """Of each epoch."""

    def epoch(self, number: int) -> Int64:
        """[rows] the row numbers of this epoch, source by source."""
        first, parts = 0, []
        for place, (rows, occurrences) in enumerate(self._sources):
            copies, rest = divmod(occurrences, rows) if rows else (0, 0)
            parts += [np.arange(first, first + rows)] * copies
            if rest:
                order = np.random.default_rng([self._seed, place, 2]).permutation(rows)
                parts.append(first + order[np.arange(number * rest, (number + 1) * rest) % rows])
            first += rows
        return np.concatenate(parts)


def mixture_of(sources: Sequence[SourcePlan], rows: Sequence[int], seed: int) -> Mixture:
    """As planned, of so many training rows of each source."""
    counted = [each.model_copy(update={"rows": count}) for each, count in zip(sources, rows, strict=True)]
    return Mixture([(each.rows, each.rows_per_epoch) for each in counted], seed)
