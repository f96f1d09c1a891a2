"""Which rows are trained on, which are held out, and which of these an evaluation looks at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jobs.errors import BadData
from jobs.plan import RowChoice
from jobs.text.units import format_number, format_share
from worker.training.dataset.data import Int64
from worker.training.rows.row_filter import UInt64

_SHARE, _LEAST, _MOST_SHARE = 0.01, 100, 0.2
"""Of `data.validation` auto: the share, the rows that are held out of few, and of fewer still."""


def auto_fraction(rows: int, keys: UInt64 | None = None) -> float:
    """The fraction that `data.validation` of `auto` is for so many rows. `keys` [rows] as of `split`, where all are
    known: so many rows are held out, and not more or less by chance."""
    if _SHARE * rows >= _LEAST:
        return _SHARE
    count = max(1, min(_LEAST, int(_MOST_SHARE * rows)))
    if keys is not None and count < len(keys):
        last = np.sort(keys)[count - 1]
        fraction = float(np.nextafter((float(last) + 1) / 2.0**64, 1.0))
        if count <= int((keys <= last).sum()) <= 1.5 * count and count / 2 <= fraction * rows <= 2 * count:
            return fraction
    return min(count / max(1, rows), 0.5)


def split(keys: UInt64, ends: Sequence[int], validation: float | str) -> dict[str, Int64]:
    """Row numbers of training and validation. `ends`: where each source ends; the last is held out whole if
    `validation` names it.

    A fraction is chosen by `keys` [rows], hashes of the inputs: rows of one input go to one side, whatever the order of
    the rows. Raises BadData (`validation_split`) where whole inputs allow nothing near the fraction.
    """
    rows = np.arange(len(keys), dtype=np.int64)
    if isinstance(validation, str):
        return {"train": rows[: ends[-2]], "validation": rows[ends[-2] :]}
    if validation == 0:
        return {"train": rows, "validation": rows[:0]}
    inputs, input_of, counts = np.unique(keys, return_inverse=True, return_counts=True)
    held_out = _held_out(inputs, counts, validation)[input_of]
    return {"train": rows[~held_out], "validation": rows[held_out]}


def _held_out(inputs: UInt64, counts: Int64, fraction: float) -> npt.NDArray[np.bool_]:
    """[inputs] which are held out: at least one, never all, and with no more than twice the rows that were asked for.

    One row may always be. Those with the smallest hashes, which are the same ones when rows are added; where these have
    less than half of what was asked for or more than twice, in the order of the hashes each input that brings the sum
    of rows no further from it.
    """
    if len(inputs) < 2:
        raise _refused(
            f"the inputs of all {counts.sum()} rows have the same letters and digits, so that none can be held out for "
            "validation (case, accents, vowel signs, spaces and punctuation do not count)",
            "set it to 0 to train without evaluation, or name a file of validation rows",
        )
    most = max(1.0, 2 * fraction * counts.sum())
    # As a fraction of 2**64, so that a fraction close to 1 does not overflow.
    chosen = inputs < np.uint64(fraction * 2.0**64)
    chosen[-1] = False
    if chosen.any() and most / 4 <= counts[chosen].sum() <= most:
        return chosen
    chosen[:] = False
    taken = 0
    for place, count in enumerate(counts[:-1].tolist()):
        if 2 * taken + count <= most:
            chosen[place] = True
            taken += count
    if taken:
        return chosen
    if counts[-1] > most:
        smallest = counts.min() / counts.sum()
        raise _refused(
            f"{counts.sum()} rows have {len(inputs)} different inputs; to hold out whole inputs takes at least "
            f"{format_share(smallest)} of the rows, and {format_share(fraction)} is asked for",
            f"set it to {format_number(math.ceil(smallest * 1000) / 1000, 3)}, or to 0 (no evaluation), or name "
            f"a file of validation "
            "rows",
        )
    chosen[-1] = True
    return chosen


def _refused(what: str, hint: str) -> BadData:
    return BadData(f"data.validation: {what}", code="validation_split", param="data.validation", hint=hint)


def shared_inputs(keys: UInt64, parts: dict[str, Int64]) -> int:
    """Validation rows whose input is in training as well: with another target, or written a little differently."""
    return int(np.isin(keys[parts["validation"]], keys[parts["train"]]).sum())


_SEED = 22


def evaluation_rows(rows: int, most: int, choice: RowChoice) -> Int64:
    """At most so many of these rows: in order where all are, else `random` ones in random order, or the `first`.

    Always the same ones: neither the job nor its seed matters, so that jobs are compared over the same rows. Fewer of
    them are the first of these; and most stay where rows are added at the end.
    """
    if most >= rows or choice == "first":
        return np.arange(min(most, rows))
    return np.argsort(np.random.default_rng(_SEED).random(rows), kind="stable")[:most]
