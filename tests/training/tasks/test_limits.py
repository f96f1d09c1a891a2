"""Safe sizes by length bucket: each learns for itself, and goes back where the cause has passed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.support.samples import dataset_summary
from worker.training.dataset.data import Int64, PreparedDataset, Rows, Writer
from worker.training.steps.order import StepOrder
from worker.training.steps.shape import MicroBatchShape, SafeSize, bucket_of
from worker.training.tasks.limits import cut, widths
from worker.training.tasks.seq2seq.batches import PairLimit
from worker.training.tasks.widths import PairWidths

SHORT, LONG = "input ≤ 64, target ≤ 64", "input ≤ 256, target ≤ 512"


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """300 rows of 64 and 64 tokens, then 100 of 200 and 400, then 600 of any length."""
    rng = np.random.default_rng(1)
    lengths = [(64, 64)] * 300 + [(200, 400)] * 100
    lengths += list(zip(rng.integers(1, 257, 600).tolist(), rng.integers(1, 513, 600).tolist(), strict=True))
    with Writer(tmp_path, 32_000) as writer:
        writer.add([np.ones(n, np.uint32) for n, _ in lengths], [np.ones(n, np.uint32) for _, n in lengths])
        writer.finish({"train": np.arange(1000), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(tmp_path).train


@pytest.fixture
def groups() -> list[Int64]:
    return [np.arange(300, 332), np.arange(0, 64)]


def a(bucket: str) -> MicroBatchShape:
    """One row of the bucket's longest."""
    return MicroBatchShape(1, *(int(part.split("≤ ")[1]) for part in bucket.split(", ")))


def largest(rows: Rows, groups: list[Int64], limit: PairLimit) -> dict[str, int]:
    """Rows of the largest micro-batch of each bucket."""
    found: dict[str, int] = defaultdict(int)
    for piece in cut(rows, groups, limit):
        bucket = bucket_of(*widths(rows, piece))
        found[bucket] = max(found[bucket], len(piece))
    return dict(found)


@pytest.mark.parametrize(
    ("input_width", "target_width", "name"),
    [
        (8, 8, SHORT),
        (64, 64, SHORT),
        (65, 64, "input ≤ 128, target ≤ 64"),
        (256, 512, LONG),
        (136, 264, LONG),
        (2048, 8, "input ≤ 2048, target ≤ 64"),
    ],
)
def test_a_bucket_is_named_by_the_next_powers_of_two(input_width: int, target_width: int, name: str) -> None:
    assert bucket_of(input_width, target_width) == name


def test_only_the_bucket_that_failed_is_lowered(rows: Rows, groups: list[Int64]) -> None:
    limit = PairLimit.of(rows, 8)
    before = largest(rows, groups, limit)
    assert before == {LONG: 8, SHORT: 32}
    lowered = limit.lowered(rows, groups, a(LONG), passing=False)
    assert lowered is not None
    assert lowered.safe == {LONG: SafeSize(4)}
    assert (lowered.size(LONG), lowered.size(SHORT)) == (4, 8)
    assert largest(rows, groups, lowered) == {LONG: 5, SHORT: 32}
    again = lowered.lowered(rows, groups, a(SHORT), passing=False)
    assert again is not None
    assert largest(rows, groups, again) == {LONG: 5, SHORT: 16}


def test_every_lowering_makes_the_largest_of_its_bucket_smaller_down_to_one_row(rows: Rows) -> None:
    for step in range(10):
        groups = StepOrder(PairWidths(rows), 100, 1, seed=3).groups_of(step)
        for bucket in largest(rows, groups, PairLimit.of(rows, 64)):
            limit: PairLimit | None = PairLimit.of(rows, 64)
            seen = []
            while limit is not None:
                seen.append(largest(rows, groups, limit).get(bucket, 0))
                limit = limit.lowered(rows, groups, a(bucket), passing=False)
            assert seen == sorted(set(seen), reverse=True)
            assert seen[-1] in (0, 1), "0: in smaller micro-batches its rows are of other buckets"


def test_what_failed_is_smaller_next_time_even_where_others_of_its_bucket_were_larger(
    rows: Rows, groups: list[Int64]
) -> None:
    limit = PairLimit.of(rows, 8)
    assert largest(rows, groups, limit)[LONG] == 8
    lowered = limit.lowered(rows, groups, MicroBatchShape(3, 200, 400), passing=False)
    assert lowered is not None and lowered.rows(200, 400) < 3


@pytest.mark.parametrize("safe", [{}, {LONG: 3}, {SHORT: 2, LONG: 1}, {"input ≤ 128, target ≤ 256": 2}])
def test_no_micro_batch_is_over_the_size_of_its_own_bucket(rows: Rows, safe: dict[str, int]) -> None:
    limit = PairLimit.of(rows, 12, {bucket: SafeSize(size) for bucket, size in safe.items()})
    order = StepOrder(PairWidths(rows), 100, 1, seed=3)
    for step in range(order.steps):
        groups = order.groups_of(step)
        pieces = cut(rows, groups, limit)
        assert np.concatenate(pieces).tolist() == np.concatenate(groups).tolist()
        for piece in pieces:
            assert len(piece) <= limit.rows(*widths(rows, piece))


def test_joined_groups_follow_the_smaller_of_their_sizes(tmp_path: Path) -> None:
    """A long input with a short target, and the other way round, become a bucket that has no size of its own yet."""
    with Writer(tmp_path, 32_000) as writer:
        writer.add(
            [np.ones(n, np.uint32) for n in [100] * 2 + [8] * 2], [np.ones(n, np.uint32) for n in [8] * 2 + [100] * 2]
        )
        writer.finish({"train": np.arange(4), "validation": np.arange(0)}, dataset_summary())
    rows = PreparedDataset.open(tmp_path).train
    groups = [np.arange(0, 2), np.arange(2, 4)]
    assert [len(piece) for piece in cut(rows, groups, PairLimit.of(rows, 4))] == [4]
    for bucket in ("input ≤ 128, target ≤ 64", "input ≤ 64, target ≤ 128", "input ≤ 128, target ≤ 128"):
        limit = PairLimit.of(rows, 4, {bucket: SafeSize(2)})
        assert [len(piece) for piece in cut(rows, groups, limit)] == [2, 2]


def test_what_was_lowered_for_a_passing_cause_goes_back_and_falls_at_once(rows: Rows, groups: list[Int64]) -> None:
    limit = PairLimit.of(rows, 16)
    for _ in range(2):
        limit = limit.lowered(rows, groups, a(LONG), passing=True) or limit
    limit = limit.lowered(rows, groups, a(SHORT), passing=False) or limit
    assert limit.safe == {LONG: SafeSize(4, former=16), SHORT: SafeSize(8)}
    epoch = limit.regrown()
    assert epoch.safe == {LONG: SafeSize(16, fallback=4), SHORT: SafeSize(8)}
    assert epoch.regrown() == epoch
    for passing, former in ((True, 16), (False, None)):
        fallen = epoch.lowered(rows, groups, a(LONG), passing=passing)
        assert fallen is not None and fallen.safe[LONG] == SafeSize(4, former=former)
    # Rejected for real after all: nothing goes back any more.
    refused = limit.lowered(rows, groups, a(LONG), passing=False)
    assert refused is not None and refused.safe[LONG] == SafeSize(2)


def test_a_smaller_plan_is_never_exceeded(rows: Rows) -> None:
    limit = PairLimit.of(rows, 2, {LONG: SafeSize(4, former=16), SHORT: SafeSize(1)})
    assert (limit.size(LONG), limit.regrown().size(LONG), limit.size(SHORT)) == (2, 2, 1)
