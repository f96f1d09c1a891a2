"""Which rows make up a step, and which of them go through the model together.

Rows padded to the longest of a random micro-batch waste half of all FLOPs. So a step is made of *groups* of rows of
nearly equal lengths, one from each length stratum: every step sees short and long rows in the same proportions, and
hardly anything is padded.

    epoch: permutation ─▶ pools of about 65,536 rows ─▶ sorted by target width, cut into strata of equal cost
           ─▶ each sorted in bands by input width, cut into one group a step ─▶ groups drawn at random into steps

The order is a pure function of (lengths, batch size, seed, epoch). It knows nothing of memory or micro-batches, so
running out of memory changes no step, and a run that comes back needs its step number only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from worker.training.dataset.data import Int64

if TYPE_CHECKING:
    from jobs.plan import SourcePlan

# -- mixture -----------------------------------------------------------------------------------------------------------
# How often the rows of each source occur in an epoch.


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


# -- order -------------------------------------------------------------------------------------------------------------

VERSION = 2
"""Goes up whenever the same seed would give another order: a run is not resumed in an order it did not begin in."""
MULTIPLE = 8
"""Widths are rounded up to this: tensor cores want it, and there are fewer different shapes."""
POOL_ROWS = 1 << 16
"""Rows sorted together: more would pad a little less, and take longer to sort when a run comes back."""


class Widths(Protocol):
    """How the rows of a dataset are grouped by what they take in the model."""

    def __len__(self) -> int:
        """Rows."""

    def partition(
        self, rows: Int64, steps: int, groups: int, rng: np.random.Generator | None = None
    ) -> list[list[Int64]]:
        """The given rows as `steps` steps of equally many rows, each in at most `groups` groups, longest first.

        `rng` draws the groups into steps.
        """

    def groups(self, rows: Int64, size: int) -> list[Int64]:
        """The given rows in groups of about `size` rows of nearly equal lengths."""


class StepOrder:
    """The rows of every step of a run, in groups.

    Every epoch holds each row once, or as often as `mixture` says. Rows left at an epoch's end open the next epoch's
    first step; only the last step of the run may be short.
    """

    def __init__(self, widths: Widths, batch_size: int, epochs: int, seed: int, mixture: Mixture | None = None) -> None:
        assert min(len(widths), batch_size, epochs) > 0
        self._widths = widths
        self._mixture = mixture or Mixture([(len(widths), len(widths))], seed)
        self._rows, self._batch_size, self._seed = self._mixture.rows, batch_size, seed
        self._total = self._rows * epochs
        self.steps = math.ceil(self._total / batch_size)
        self._epoch = self._pool = -1
        self._permutation: Int64 = np.empty(0, np.int64)
        self._pooled: list[list[Int64]] = []

    def rows_of(self, step: int) -> Int64:
        """[batch_size] row numbers of step `step`, counted from 0; fewer only in the last."""
        return np.concatenate(self.groups_of(step))

    def groups_of(self, step: int) -> list[Int64]:
        """The same rows in groups of nearly equal lengths, the longest group first."""
        assert 0 <= step < self.steps
        start, end = step * self._batch_size, self._end(step)
        epoch = start // self._rows
        if end <= (epoch + 1) * self._rows and end - start == self._batch_size:
            return self._whole(epoch, (start - epoch * self._rows) // self._batch_size)
        # Across the end of an epoch (of several, where they are small), or the last: of random rows.
        pieces = []
        while start < end:
            epoch, offset = divmod(start, self._rows)
            pieces.append(self._order(epoch)[offset : offset + end - start])
            start += len(pieces[-1])
        chosen = np.concatenate(pieces)
        return self._widths.partition(chosen, 1, groups_per_step(len(chosen)))[0]

    def epoch_of(self, step: int) -> float:
        """Epochs completed once step `step` is done."""
        return self._end(step) / self._rows

    def _whole(self, epoch: int, number: int) -> list[Int64]:
        """Step `number` of those that lie within the epoch, sorted with the others of its pool."""
        first = -epoch * self._rows % self._batch_size  # so many rows complete the step before
        count = (self._rows - first) // self._batch_size
        borders = self._borders(epoch, count)
        pool = int(np.searchsorted(borders, number, side="right")) - 1
        if (epoch, pool) != (self._epoch, self._pool):
            order = self._order(epoch)
            start, steps = first + borders[pool] * self._batch_size, int(borders[pool + 1] - borders[pool])
            rows = order[start : start + steps * self._batch_size]
            rng = np.random.default_rng([self._seed, epoch, pool])
            self._pooled = self._widths.partition(rows, steps, groups_per_step(self._batch_size), rng)
            self._pool = pool
        return self._pooled[number - int(borders[pool])]

    def _borders(self, epoch: int, steps: int) -> Int64:
        """Where the pools of an epoch begin, in steps, and where the last one ends; another place every epoch."""
        pools = max(1, round(steps * self._batch_size / POOL_ROWS))
        borders = np.linspace(0, steps, pools + 1)
        jitter = np.random.default_rng([self._seed, epoch, 0, 1]).uniform(-0.25, 0.25, pools - 1)
        borders[1:-1] += jitter * steps / pools
        return np.round(borders).astype(np.int64)

    def _end(self, step: int) -> int:
        return min((step + 1) * self._batch_size, self._total)

    def _order(self, epoch: int) -> Int64:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._mixture.epoch(epoch))
            self._epoch, self._pool = epoch, -1
        return self._permutation


def groups_per_step(rows: int) -> int:
    """2 ∛rows: with ∛rows strata the tokens of a step vary about as those of a random draw, with twice as many less."""
    return min(rows, math.ceil(2 * math.cbrt(rows)))


def rounded(lengths: npt.NDArray[np.integer]) -> Int64:
    """Lengths rounded up to the next multiple of 8."""
    return -(-lengths.astype(np.int64) // MULTIPLE) * MULTIPLE
