"""How rows are grouped: those of nearly equal inputs and targets go through the model together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.training.dataset.data import Int64, Rows
from worker.training.steps.order import rounded

EVALUATED_TOGETHER = 32
"""Rows that go through the model at once in an evaluation, where memory allows it."""
_BANDS = (4, 8, 16, 32, 64, 128, 256)


class PairWidths:
    """Padded widths of inputs and targets, and how rows are grouped by them: inputs and targets are padded apart."""

    def __init__(self, rows: Rows) -> None:
        self.inputs, self.targets = rounded(rows.input_lengths), rounded(rows.target_lengths)

    def __len__(self) -> int:
        return len(self.inputs)

    def partition(
        self, rows: Int64, steps: int, groups: int, rng: np.random.Generator | None = None
    ) -> list[list[Int64]]:
        """As in `Widths`. Rows of equal widths are grouped in the order in which they are given."""
        ordered = rows[np.argsort(-self.targets[rows], kind="stable")]
        strata = []
        start = 0
        for size in self._sizes(ordered, steps, groups):
            strata.append(self._cut(ordered[start : start + steps * size], steps, rng))
            start += steps * size
        if rng is not None:
            strata = [rng.permutation(stratum) for stratum in strata]
        return [[stratum[step] for stratum in strata] for step in range(steps)]

    def groups(self, rows: Int64, size: int) -> list[Int64]:
        """As in `Widths`; fewer rows the longer they are."""
        return self.partition(rows, 1, -(-len(rows) // size))[0] if len(rows) else []

    def _sizes(self, ordered: Int64, steps: int, groups: int) -> list[int]:
        """Rows of a group in each stratum: strata cost about the same, so long rows come in small groups."""
        cost = np.cumsum(self.inputs[ordered] + self.targets[ordered], dtype=np.float64)
        ends = np.searchsorted(cost, cost[-1] * np.arange(1, groups) / groups)
        # The longest rows have a group of their own at least.
        ends = np.clip(np.round(ends / steps), 1, len(ordered) // steps).astype(int)
        sizes = np.diff(np.concatenate([[0], ends, [len(ordered) // steps]]))
        return [int(size) for size in sizes if size]

    def _cut(self, stratum: Int64, steps: int, rng: np.random.Generator | None) -> npt.NDArray[np.int64]:
        """[steps, rows of a group]: bands of target width, sorted by input width there and back; the best band wins."""
        size = len(stratum) // steps
        best: tuple[int, npt.NDArray[np.int64]] | None = None
        # Band borders lie elsewhere every time, so that a row has not the same neighbours in every epoch.
        offset = 0.0 if rng is None else rng.uniform()
        for groups in _BANDS:
            band = size * groups
            number = (np.arange(len(stratum)) + int(offset * band)) // band
            inputs = self.inputs[stratum]
            key = np.where(number % 2, -inputs, inputs)
            cut = stratum[np.lexsort((key, number))].reshape(steps, size)
            padded = int(self.inputs[cut].max(1).sum() + self.targets[cut].max(1).sum())
            if best is None or padded < best[0]:
                best = padded, cut
            if groups >= steps:
                break
        assert best is not None
        return best[1]


class InputWidths(PairWidths):
    """Padded widths of inputs, which alone take room in the model."""

    def __init__(self, rows: Rows) -> None:
        self.inputs = self.targets = rounded(rows.input_lengths)
