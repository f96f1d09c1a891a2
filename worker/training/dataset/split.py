"""Which rows are learnt from, and which are held out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker.training.dataset.data import Int64
from worker.training.rows.sieve import UInt64


def split(keys: UInt64, ends: Sequence[int], validation: float | str) -> dict[str, Int64]:
    """Row numbers of training and validation. `ends` is where each source ends; a second one is held out whole.

    A fraction is chosen by `keys` [rows], hashes of the inputs: the same rows whatever their order, and whatever rows
    come later; and rows of one input go to one side. A fraction above 0 of at least two different inputs is at least
    one, and never all.
    """
    rows = np.arange(len(keys), dtype=np.int64)
    if isinstance(validation, str):
        return {"train": rows[: ends[0]], "validation": rows[ends[0] :]}
    # As fractions of 2**64, so that a fraction close to 1 does not overflow.
    held_out = keys < np.uint64(validation * 2.0**64)
    if validation > 0:
        held_out |= keys == keys.min()
    held_out &= keys != keys.max()  # of a single input too: it is learnt from
    return {"train": rows[~held_out], "validation": rows[held_out]}


def shared_inputs(keys: UInt64, parts: dict[str, Int64]) -> int:
    """Validation rows whose input training has, too: with another target, or written a little differently."""
    return int(np.isin(keys[parts["validation"]], keys[parts["train"]]).sum())
