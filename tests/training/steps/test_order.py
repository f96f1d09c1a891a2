"""Order of rows and steps: everything once, nothing padded that need not be, and no step unlike the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.samples import dataset_summary
from worker.training.dataset.data import Int64, PreparedDataset, Rows, Writer
from worker.training.steps.order import POOL_ROWS, Mixture, StepOrder, rounded
from worker.training.tasks.widths import PairWidths

MakeRows = Callable[..., Rows]


@pytest.fixture
def make_rows(tmp_path: Path) -> MakeRows:
    """`make_rows(n)`: n rows as long as recipes are, inputs and targets alike in tendency."""

    def make(count: int) -> Rows:
        folder = tmp_path / str(count)
        folder.mkdir()
        rng = np.random.default_rng(count)
        likeness = rng.standard_normal(count)
        inputs = np.clip(np.exp(4.4 + 0.45 * likeness), 8, 512).astype(int)
        targets = np.clip(np.exp(4.9 + 0.65 * (0.5 * likeness + 0.87 * rng.standard_normal(count))), 8, 512).astype(int)
        with Writer(folder, 32_000) as writer:
            for start in range(0, count, 1000):
                part = slice(start, start + 1000)
                writer.add(*([np.ones(n, np.uint32) for n in lengths[part]] for lengths in (inputs, targets)))
            writer.finish({"train": np.arange(count), "validation": np.arange(0)}, dataset_summary())
        return PreparedDataset.open(folder).train

    return make


def steps_of(order: StepOrder) -> list[Int64]:
    return [order.rows_of(step) for step in range(order.steps)]


def padded(rows: Rows, group: Int64) -> int:
    """Positions of a group padded to its longest."""
    return len(group) * int(rounded(rows.input_lengths[group].max()) + rounded(rows.target_lengths[group].max()))


def real(rows: Rows, group: Int64) -> int:
    return int(rows.input_lengths[group].sum() + rows.target_lengths[group].sum())


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs"),
    [(10, 3, 4), (10, 5, 2), (3, 10, 4), (1, 1, 1), (7, 7, 3), (5, 64, 2), (1000, 16, 3), (999, 128, 2), (300, 1, 1)],
)
def test_every_row_comes_once_an_epoch_in_steps_of_equal_size(
    make_rows: MakeRows, rows: int, batch_size: int, epochs: int
) -> None:
    order = StepOrder(PairWidths(make_rows(rows)), batch_size, epochs, seed=1)
    steps = steps_of(order)
    assert {len(step) for step in steps[:-1]} <= {batch_size}
    assert 1 <= len(steps[-1]) <= batch_size
    # A step across the end of an epoch holds rows of both, in whatever order: count, and compare with the whole.
    seen = np.zeros(rows, int)
    for number, step in enumerate(steps, start=1):
        np.add.at(seen, step, 1)
        done = min(number * batch_size, rows * epochs)
        assert seen.sum() == done
        assert seen.min() >= done // rows and seen.max() <= -(-done // rows)
    assert (seen == epochs).all()
    assert order.epoch_of(order.steps - 1) == epochs


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(make_rows: MakeRows) -> None:
    rows = make_rows(1000)
    straight = StepOrder(PairWidths(rows), 8, 3, seed=5)
    groups = [straight.groups_of(step) for step in range(straight.steps)]
    resumed = StepOrder(PairWidths(rows), 8, 3, seed=5)
    for step in (300, 120, 130, 0, straight.steps - 1, 125):
        again = resumed.groups_of(step)
        assert [group.tolist() for group in again] == [group.tolist() for group in groups[step]]
    steps = steps_of(straight)
    assert not {tuple(sorted(step)) for step in steps[:125]} & {tuple(sorted(step)) for step in steps[125:250]}
    assert not np.array_equal(StepOrder(PairWidths(rows), 8, 3, seed=6).rows_of(0), steps[0])
    # Written down: a change of the order changes every run that is resumed.
    assert steps[0].tolist() == [131, 256, 400, 323, 576, 467, 239, 960]


def test_epochs_completed_are_told_after_each_step(make_rows: MakeRows) -> None:
    order = StepOrder(PairWidths(make_rows(10)), 4, 2, seed=0)
    assert [order.epoch_of(step) for step in range(order.steps)] == [0.4, 0.8, 1.2, 1.6, 2.0]


def test_hardly_anything_is_padded_and_steps_are_more_alike_than_random_ones(make_rows: MakeRows) -> None:
    rows = make_rows(20_000)
    order = StepOrder(PairWidths(rows), 128, 1, seed=1)
    groups = [group for step in range(order.steps) for group in order.groups_of(step)]
    rounding = (rounded(rows.input_lengths).sum() + rounded(rows.target_lengths).sum()) / real(rows, np.arange(20_000))
    waste = sum(padded(rows, group) for group in groups) / sum(real(rows, group) for group in groups)
    assert waste / rounding < 1.025
    tokens = np.array([rows.target_lengths[step].sum() for step in steps_of(order)[:-1]])
    shuffled = np.random.default_rng(0).permutation(20_000)[: len(tokens) * 128].reshape(-1, 128)
    assert tokens.std() < 0.6 * rows.target_lengths[shuffled].sum(1).std()
    # Long rows come in small groups: no group costs much more than another.
    costs = np.array([padded(rows, group) for group in groups[: 11 * 100]])
    assert costs.max() < 3 * costs.mean()


def test_rows_change_their_company_from_epoch_to_epoch(make_rows: MakeRows) -> None:
    order = StepOrder(PairWidths(make_rows(2000)), 50, 2, seed=1)
    company: list[dict[int, set[int]]] = [{}, {}]
    for step in range(order.steps):
        for group in order.groups_of(step):
            company[step // 40].update({int(row): set(group.tolist()) - {int(row)} for row in group})
    same = sum(len(company[0][row] & company[1][row]) for row in range(2000))
    assert same < 0.5 * sum(map(len, company[0].values()))  # in so small a set there are not many of its length


def test_a_large_epoch_is_sorted_in_pools_whose_borders_move(make_rows: MakeRows) -> None:
    order = StepOrder(PairWidths(make_rows(3 * POOL_ROWS)), 128, 3, seed=1)
    borders = [order._borders(epoch, 1536).tolist() for epoch in range(3)]
    assert all(one[0] == 0 and one[-1] == 1536 and len(one) == 4 for one in borders)
    assert len({tuple(one) for one in borders}) == 3
    assert min(min(np.diff(one)) for one in borders) > 1536 / 3 / 3
    seen = np.concatenate([order.rows_of(step) for step in range(1536)])
    assert len(np.unique(seen)) == 3 * POOL_ROWS


def counts(mixture: Mixture, rows: int, epochs: range) -> list[int]:
    seen = np.zeros(rows, int)
    for number in epochs:
        np.add.at(seen, mixture.epoch(number), 1)
    return seen.tolist()


def test_rows_occur_as_often_as_their_source_says() -> None:
    """10 rows twice, 5 once, 8 in halves, 7 at 2.5."""
    mixture = Mixture([(10, 20), (5, 5), (8, 4), (7, 18)], seed=3)
    assert mixture.rows == 47
    for epoch in range(4):
        seen = counts(mixture, 30, range(epoch, epoch + 1))
        assert seen[:10] == [2] * 10 and seen[10:15] == [1] * 5
        assert sorted(seen[15:23]) == [0] * 4 + [1] * 4
        assert sorted(seen[23:]) == [2] * 3 + [3] * 4
    assert counts(mixture, 30, range(2))[15:23] == [1] * 8, "two halves"
    assert sorted(counts(mixture, 30, range(7))[23:]) == [18] * 7, "after as many epochs as rows all are even"


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 11])
def test_no_row_is_ever_more_than_one_ahead_of_another_of_its_source(epochs: int) -> None:
    seen = counts(Mixture([(13, 4), (9, 31)], seed=1), 22, range(epochs))
    for source in (seen[:13], seen[13:]):
        assert max(source) - min(source) <= 1
    assert sum(seen[:13]) == 4 * epochs and sum(seen[13:]) == 31 * epochs


def test_steps_hold_the_rows_of_the_mixture_and_can_begin_anywhere(make_rows: MakeRows) -> None:
    rows = make_rows(1000)
    mixture = Mixture([(600, 1200), (400, 100)], seed=5)
    straight = StepOrder(PairWidths(rows), 16, 3, 5, mixture)
    assert straight.steps == -(-1300 * 3 // 16)
    steps = [straight.rows_of(step) for step in range(straight.steps)]
    seen = np.bincount(np.concatenate(steps), minlength=1000)
    assert (seen[:600] == 6).all() and seen[600:].sum() == 300 and set(seen[600:]) == {0, 1}
    again = StepOrder(PairWidths(rows), 16, 3, 5, Mixture([(600, 1200), (400, 100)], seed=5))
    for step in (200, 3, 81, straight.steps - 1):
        assert again.rows_of(step).tolist() == steps[step].tolist()


def test_one_source_is_in_the_order_that_it_always_had(make_rows: MakeRows) -> None:
    rows = make_rows(1000)
    plain = StepOrder(PairWidths(rows), 16, 2, 5)
    mixed = StepOrder(PairWidths(rows), 16, 2, 5, Mixture([(1000, 1000)], 5))
    for step in range(plain.steps):
        assert plain.rows_of(step).tolist() == mixed.rows_of(step).tolist()
