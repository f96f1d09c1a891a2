"""The shape of a micro-batch, and its length bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_BUCKET = 64
"""Tokens: shorter ones have no bucket of their own."""
Lengths = npt.NDArray[np.integer[Any]]
"""[rows] tokens of each."""


@dataclass(frozen=True)
class MicroBatchShape:
    """Rows that go through the model at once, and the tokens of each, padding included."""

    rows: int
    input_width: int
    target_width: int

    @property
    def bucket(self) -> str:
        """Its length bucket."""
        return bucket_of(self.input_width, self.target_width)

    @property
    def inputs(self) -> int:
        """Input tokens of all rows, padding included."""
        return self.rows * self.input_width

    @property
    def tokens(self) -> int:
        """Of all rows, padding included."""
        return self.rows * (self.input_width + self.target_width)


def bucket_of(input_width: int, target_width: int) -> str:
    """Lengths up to the same powers of two, such as `input ≤ 256, target ≤ 512`."""
    return f"input ≤ {_power(input_width)}, target ≤ {_power(target_width)}"


def _power(width: int) -> int:
    return max(LEAST_BUCKET, 1 << (width - 1).bit_length())


# -- safe size ---------------------------------------------------------------------------------------------------------
# What memory has taught about micro-batches of one length bucket; kept in checkpoints.


@dataclass(frozen=True)
class SafeSize:
    """What one bucket may have, in rows of the longest shape."""

    size: int
    """Now."""
    former: int | None = None
    """What it goes back to with the next epoch, where the cause has passed by then."""
    fallback: int | None = None
    """What is known to do, where it has gone back: the next error leads there at once."""
