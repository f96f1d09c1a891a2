"""How a step's groups are cut into micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.samples import dataset_summary
from worker.training.dataset.data import Int64, PreparedDataset, Rows, Writer
from worker.training.steps.order import StepOrder
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.limits import MIN_POSITIONS, cut, widths
from worker.training.tasks.seq2seq.batches import PairLimit
from worker.training.tasks.widths import PairWidths


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Inputs of 1 … 20 tokens and targets of 20 … 1; token = 100 x row + place."""
    with Writer(tmp_path, 32_000) as writer:
        writer.add(
            [np.arange(n + 1, dtype=np.uint32) + 100 * n for n in range(20)],
            [np.arange(20 - n, dtype=np.uint32) + 100 * n for n in range(20)],
        )
        writer.finish({"train": np.arange(20), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(tmp_path).train


@pytest.fixture
def recipes(tmp_path: Path) -> Rows:
    """1,000 rows as long as recipes are; one of 512 and 512 tokens."""
    rng = np.random.default_rng(1)
    inputs = np.clip(np.exp(rng.normal(4.4, 0.45, 1000)), 8, 512).astype(int)
    targets = np.clip(np.exp(rng.normal(4.9, 0.65, 1000)), 8, 512).astype(int)
    inputs[0] = targets[0] = 512
    with Writer(tmp_path, 32_000) as writer:
        writer.add([np.ones(n, np.uint32) for n in inputs], [np.ones(n, np.uint32) for n in targets])
        writer.finish({"train": np.arange(1000), "validation": np.arange(0)}, dataset_summary())
    return PreparedDataset.open(tmp_path).train


def test_micro_batches_hold_each_row_once_padded_to_their_longest(rows: Rows) -> None:
    groups = [np.array([3, 19]), np.array([0, 7, 11])]
    batches = PairLimit.of(rows, 2).batches(rows, groups, pad_id=9)
    assert [batch.rows.tolist() for batch in batches] == [[3, 19], [0, 7], [11]]
    assert [batch.input_padded for batch in batches] == [True, True, True]
    assert not PairLimit.of(rows, 2).batches(rows, [np.array([15])], pad_id=9)[0].input_padded
    for batch in batches:
        assert batch.input_ids.shape == batch.attention_mask.shape
        assert batch.input_ids.shape[1] % 8 == batch.labels.shape[1] % 8 == 0
        assert batch.target_tokens == int((batch.labels != -100).sum())
        for place, row in enumerate(batch.rows):
            inputs, targets = rows.input(int(row)), rows.target(int(row))
            real = batch.attention_mask[place].bool()
            assert batch.input_ids[place][real].tolist() == inputs.tolist()
            assert batch.input_ids[place][~real].unique().tolist() in ([9], [])
            assert int(real[: len(inputs)].sum()) == len(inputs)
            assert batch.labels[place][: len(targets)].tolist() == targets.tolist()
            assert (batch.labels[place][len(targets) :] == -100).all()


def test_a_limit_is_so_many_rows_of_the_longest_shape_and_shorter_rows_are_more(recipes: Rows) -> None:
    limit = PairLimit.of(recipes, 8)
    assert limit == PairLimit(8, 512, 512)
    assert limit.rows(512, 512) == 8
    assert limit.rows(64, 512) == limit.rows(512, 64) == 8  # never more targets, nor inputs, than eight of the longest
    assert limit.rows(128, 256) == 16
    assert PairLimit(1, 512, 512).rows(8, 8) == 1


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8, 32])
def test_no_micro_batch_is_over_the_limit(recipes: Rows, micro_batch: int) -> None:
    limit = PairLimit.of(recipes, micro_batch)
    order = StepOrder(PairWidths(recipes), 100, 1, seed=3)
    for step in range(order.steps):
        groups = order.groups_of(step)
        batches = limit.batches(recipes, groups, 0)
        assert np.concatenate([batch.rows for batch in batches]).tolist() == np.concatenate(groups).tolist()
        shapes = [(batch.input_ids.shape, batch.labels.shape) for batch in batches]
        for (count, inputs), (_, targets) in shapes:
            assert count * inputs <= micro_batch * 512 and count * targets <= micro_batch * 512


def test_small_groups_go_together_until_it_is_worth_a_launch(recipes: Rows) -> None:
    by_length = np.argsort(recipes.input_lengths + recipes.target_lengths)
    groups = [by_length[start : start + 2] for start in range(0, 60, 2)]
    batches = PairLimit.of(recipes, 8).batches(recipes, groups, 0)
    positions = [batch.input_ids.numel() + batch.labels.numel() for batch in batches]
    assert all(MIN_POSITIONS <= one < 1.5 * MIN_POSITIONS for one in positions[:-1])
    assert 1 < len(batches) < 15
    # Not where the limit forbids it, nor where the next group would not fit as a whole.
    assert [len(piece) for piece in cut(recipes, groups, PairLimit.of(recipes, 1))] == [1] * 60
    longest = [by_length[-2:], by_length[-8:-2]]
    assert [len(piece) for piece in cut(recipes, longest, PairLimit(6, 512, 512))] == [2, 6]


def shape_of_largest(rows: Rows, groups: list[Int64], limit: PairLimit) -> MicroBatchShape:
    piece = max(cut(rows, groups, limit), key=len)
    return MicroBatchShape(len(piece), *widths(rows, piece))


def test_a_smaller_limit_makes_the_largest_micro_batch_smaller_down_to_one_row(recipes: Rows) -> None:
    groups = StepOrder(PairWidths(recipes), 100, 1, seed=3).groups_of(4)
    limit: PairLimit | None = PairLimit.of(recipes, 64)
    largest = []
    while limit is not None:
        largest.append(max(len(piece) for piece in cut(recipes, groups, limit)))
        limit = limit.lowered(recipes, groups, shape_of_largest(recipes, groups, limit), passing=False)
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] == 1
