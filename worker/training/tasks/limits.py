"""How many rows go through the model at once, and what memory has taught about it, by length bucket.

Memory that runs out says something about micro-batches of that length only. So the safe size is kept for each *bucket*:
lengths up to the same powers of two, of input and target. Sizes are rows of the longest shape that the data has; rows
that are shorter are more, in proportion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np

from worker.training.dataset.data import Int64, Rows
from worker.training.steps.order import rounded
from worker.training.steps.shape import MicroBatchShape, SafeSize, bucket_of
from worker.training.tasks.task import Batch

AnyBatch = TypeVar("AnyBatch", bound="Batch", covariant=True)
MIN_POSITIONS = 1024
"""On an RTX 5090 the kernel launches of FLAN-T5-XL (some 10,000) last as long as the arithmetic of about so many."""


@dataclass(frozen=True)
class MicroBatchLimit(ABC, Generic[AnyBatch]):
    """How much goes through the model at once: `micro_batch` rows of the longest shape that the data has.

    Shorter rows may be more, but never with more input positions nor more target positions in all than those; at 1, or
    `by_rows`, it is that many rows, whatever their shape. Buckets in `safe` have a size of their own, which is never
    more.
    """

    micro_batch: int
    input_width: int
    target_width: int
    safe: Mapping[str, SafeSize] = field(default_factory=dict)
    by_rows: bool = False
    least_positions: ClassVar[int] = MIN_POSITIONS
    """A micro-batch of fewer takes in the next group, if that fits."""

    @classmethod
    def of(cls, rows: Rows, micro_batch: int, safe: Mapping[str, SafeSize] | None = None) -> Self:
        """For the longest input and the longest target of these rows."""
        return cls(micro_batch, *cls.longest_of(rows), dict(safe or {}))

    @classmethod
    def longest_of(cls, rows: Rows) -> tuple[int, int]:
        """Padded widths of the longest input and the longest target of these rows."""
        return int(rounded(rows.input_lengths).max()), int(rounded(rows.target_lengths).max())

    def size(self, bucket: str) -> int:
        """Of a bucket, in rows of the longest shape."""
        return min(self.micro_batch, self.safe[bucket].size) if bucket in self.safe else self.micro_batch

    def rows(self, input_width: int, target_width: int, *others: str) -> int:
        """Rows of this shape that may go together, at least one; by the smallest size of its own and other buckets."""
        size = min(self.size(bucket) for bucket in (bucket_of(input_width, target_width), *others))
        if size == 1 or self.by_rows:
            return size
        fit = min(self.input_width / input_width, self.target_width / target_width)
        return max(1, int(size * fit))

    def of_texts(self, together: int) -> Self:
        """For so many rows whose texts are written at once: a short row may get a text as long as any."""
        return replace(self, micro_batch=together, safe={}, by_rows=True)

    @property
    def longest(self) -> MicroBatchShape:
        """One row of the longest shape."""
        return MicroBatchShape(1, self.input_width, self.target_width)

    def shapes(self, rows: Rows, groups: Sequence[Int64]) -> list[MicroBatchShape]:
        """Of the micro-batches of these groups, in order."""
        return [MicroBatchShape(len(piece), *self.widths(rows, piece)) for piece in cut(rows, groups, self)]

    def widths(self, rows: Rows, chosen: Int64) -> tuple[int, int]:
        """Padded widths of input and target when these rows go together."""
        return widths(rows, chosen)

    @abstractmethod
    def batch(self, rows: Rows, chosen: Int64, pad_id: int, input_width: int, target_width: int) -> AnyBatch:
        """These rows as one micro-batch of these widths, on the CPU."""

    def batches(self, rows: Rows, groups: Sequence[Int64], pad_id: int) -> list[AnyBatch]:
        """The rows of these groups in micro-batches, on the CPU."""
        return [self.batch(rows, piece, pad_id, *self.widths(rows, piece)) for piece in cut(rows, groups, self)]

    def lowered(self, rows: Rows, groups: Sequence[Int64], failed: MicroBatchShape, *, passing: bool) -> Self | None:
        """A smaller size for the bucket of a micro-batch that `failed`.

        With it the largest micro-batch that the bucket has in these groups is really smaller, and so is any of the
        failed widths. Half, or less; what is known to do, where that is known. None at one row. `passing`: the cause
        may be gone by the next epoch, which then begins with the present size again.
        """
        bucket = failed.bucket
        now, known = self.size(bucket), self.safe.get(bucket)
        most = self._most(rows, groups, bucket)
        former = None
        if passing:
            former = known.former if known is not None and known.former is not None else now
        size = now
        if known is not None and known.fallback is not None:
            size = min(now, 2 * known.fallback)  # the first half of it is the fallback itself
        while size > 1:
            size //= 2
            limit = replace(self, safe={**self.safe, bucket: SafeSize(size=size, former=former)})
            same_widths = limit.rows(failed.input_width, failed.target_width)
            if limit._most(rows, groups, bucket) < most and (same_widths < failed.rows or failed.rows == 1):
                return limit
        return None

    def regrown(self) -> Self:
        """At the beginning of an epoch: what was lowered for a cause that may have passed is as it was before."""
        grown = {
            bucket: SafeSize(size=known.former, fallback=known.size) if known.former is not None else known
            for bucket, known in self.safe.items()
        }
        return replace(self, safe=grown)

    def _most(self, rows: Rows, groups: Sequence[Int64], bucket: str) -> int:
        pieces = cut(rows, groups, self)
        return max((len(piece) for piece in pieces if bucket_of(*self.widths(rows, piece)) == bucket), default=0)


def widths(rows: Rows, chosen: Int64) -> tuple[int, int]:
    """Padded widths of input and target when these rows go together."""
    return int(rounded(rows.input_lengths[chosen].max())), int(rounded(rows.target_lengths[chosen].max()))


def cut(rows: Rows, groups: Sequence[Int64], limit: MicroBatchLimit[Batch]) -> list[Int64]:
    """Row numbers of each micro-batch: small groups together, a large one in as few equal parts as the limit allows.

    Groups go together only where the limit of each of their buckets, and of what they become, allows it.
    """
    pieces: list[Int64] = []
    waiting: Int64 = np.empty(0, np.int64)
    for group in groups:
        both = np.concatenate([waiting, group])
        if not len(waiting):
            waiting = group
        elif len(both) <= limit.rows(
            *limit.widths(rows, both), bucket_of(*limit.widths(rows, waiting)), bucket_of(*limit.widths(rows, group))
        ):
            waiting = both
        else:
            pieces.append(waiting)
            waiting = group
        *whole, waiting = _parts(rows, waiting, limit)
        pieces += whole
        if len(waiting) * sum(limit.widths(rows, waiting)) >= limit.least_positions:
            pieces.append(waiting)
            waiting = np.empty(0, np.int64)
    return [*pieces, waiting] if len(waiting) else pieces


def _parts(rows: Rows, chosen: Int64, limit: MicroBatchLimit[Batch]) -> list[Int64]:
    """As few equal parts as the limit allows; a part of shorter rows may be of a bucket that allows less."""
    count = -(-len(chosen) // limit.rows(*limit.widths(rows, chosen)))
    if count == 1:
        return [chosen]
    return [part for each in np.array_split(chosen, count) for part in _parts(rows, each, limit)]
