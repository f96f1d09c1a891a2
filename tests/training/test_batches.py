"""Order of rows, steps and micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from worker.training.batches import StepOrder, micro_batches
from worker.training.data import PreparedDataset, Rows, Writer


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs"), [(10, 3, 4), (10, 5, 2), (3, 10, 4), (1, 1, 1), (7, 7, 3), (5, 64, 2)]
)
def test_every_row_comes_once_an_epoch_in_steps_of_equal_size(rows: int, batch_size: int, epochs: int) -> None:
    order = StepOrder(rows, batch_size, epochs, seed=1)
    steps = [order.rows_of(step) for step in range(order.steps)]
    assert {len(step) for step in steps[:-1]} <= {batch_size}
    assert 1 <= len(steps[-1]) <= batch_size
    stream = np.concatenate(steps)
    for epoch in range(epochs):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert len(stream) == rows * epochs
    assert order.epoch_of(order.steps - 1) == epochs


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    straight = StepOrder(100, 8, 3, seed=5)
    steps = [straight.rows_of(step) for step in range(straight.steps)]
    resumed = StepOrder(100, 8, 3, seed=5)
    for step in (30, 12, 13, 0, straight.steps - 1):
        np.testing.assert_array_equal(resumed.rows_of(step), steps[step])
    assert not np.array_equal(np.concatenate(steps)[:100], np.concatenate(steps)[100:200])
    assert not np.array_equal(StepOrder(100, 8, 3, seed=6).rows_of(0), steps[0])
    # Written down: a change of the order changes every run that is resumed.
    assert steps[0].tolist() == [29, 49, 91, 4, 84, 17, 80, 74]


def test_epochs_completed_are_told_after_each_step() -> None:
    order = StepOrder(10, 4, 2, seed=0)
    assert [order.epoch_of(step) for step in range(order.steps)] == [0.4, 0.8, 1.2, 1.6, 2.0]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Inputs of 1 … 20 tokens and targets of 20 … 1; token = 100 x row + place."""
    with Writer(tmp_path, 32_000) as writer:
        writer.add(
            [np.arange(n + 1, dtype=np.uint32) + 100 * n for n in range(20)],
            [np.arange(20 - n, dtype=np.uint32) + 100 * n for n in range(20)],
        )
        writer.finish({"train": np.arange(20), "validation": np.arange(0)}, {})
    return PreparedDataset.open(tmp_path).train


def test_micro_batches_hold_each_chosen_row_once_sorted_and_padded(rows: Rows) -> None:
    chosen = np.array([3, 19, 0, 7, 11])
    batches = micro_batches(rows, chosen, 2, pad_id=9)
    assert [batch.rows.tolist() for batch in batches] == [[19, 11], [7, 3], [0]]
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


def test_rows_of_equal_length_keep_their_order(tmp_path: Path) -> None:
    with Writer(tmp_path, 70_000) as writer:
        same = [np.full(3, 66_000, np.uint32)] * 6
        writer.add(same, same)
        writer.finish({"train": np.arange(6), "validation": np.arange(0)}, {})
    rows = PreparedDataset.open(tmp_path).train
    batches = micro_batches(rows, np.array([4, 1, 5, 0]), 3, pad_id=0)
    assert [batch.rows.tolist() for batch in batches] == [[4, 1, 5], [0]]
    assert batches[0].labels[0, :3].tolist() == [66_000] * 3  # needs uint32
