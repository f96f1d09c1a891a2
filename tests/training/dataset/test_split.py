"""Training and validation."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jobs.errors import BadData
from worker.training.dataset.split import auto_fraction, shared_inputs, split


@pytest.mark.parametrize(
    ("rows", "fraction", "least", "most"),
    [(2, 0.001, 1, 1), (2, 0.999, 1, 1), (300, 0.01, 1, 6), (50, 0.0, 0, 0), (50, 0.999999999999999, 49, 49)],
)
def test_a_fraction_is_at_least_one_row_and_never_all(rows: int, fraction: float, least: int, most: int) -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 64, rows, np.uint64, endpoint=False)
    parts = split(keys, [rows], fraction)
    assert least <= len(parts["validation"]) <= most
    assert sorted([*parts["train"], *parts["validation"]]) == list(range(rows))


@pytest.mark.parametrize("fraction", [0.03, 0.3, 0.999])
def test_rows_of_one_input_are_on_one_side(fraction: float) -> None:
    inputs = np.random.default_rng(1).integers(0, 1 << 64, 20, np.uint64, endpoint=False)
    keys = inputs[np.random.default_rng(2).integers(0, 20, 500)]
    parts = split(keys, [500], fraction)
    assert len(parts["train"]) and len(parts["validation"])
    assert shared_inputs(keys, parts) == 0


@pytest.mark.parametrize(("inputs", "smallest"), [(2, "50 %"), (3, "33.3 %"), (5, "20 %")])
def test_a_split_that_takes_far_more_than_was_asked_is_refused(inputs: int, smallest: str) -> None:
    keys = np.repeat(np.random.default_rng(inputs).integers(0, 1 << 64, inputs, np.uint64, endpoint=False), 100)
    with pytest.raises(BadData) as caught:
        split(keys, [len(keys)], 0.01)
    assert (caught.value.detail_code, caught.value.param) == ("validation_split", "data.validation")
    assert f"at least {smallest} of the rows, and 1 % is asked for" in str(caught.value)
    [advised] = re.findall(r"set it to (0\.[0-9]+), or to 0", str(caught.value.hint))
    assert 100 <= len(split(keys, [len(keys)], float(advised))["validation"]) <= 2 * float(advised) * len(keys)
    assert len(split(keys, [len(keys)], 0.0)["validation"]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_out_is_bounded_where_some_inputs_have_many_rows(seed: int) -> None:
    draw = np.random.default_rng(seed)
    counts = np.array([1000, 700, 300, *[10] * 30])
    keys = np.repeat(draw.integers(0, 1 << 64, len(counts), np.uint64, endpoint=False), counts)
    held_out = split(draw.permutation(keys), [len(keys)], 0.02)["validation"]
    assert 10 <= len(held_out) <= 0.04 * len(keys)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.5])
def test_as_much_is_held_out_as_asked_where_few_inputs_have_most_of_the_rows(fraction: float) -> None:
    for seed in range(40):
        draw = np.random.default_rng(seed)
        counts = np.minimum(draw.zipf(1.5, draw.integers(50, 2000)), 5000)
        keys = np.repeat(draw.integers(0, 1 << 64, len(counts), np.uint64, endpoint=False), counts)
        parts = split(keys, [len(keys)], fraction)
        asked = fraction * len(keys)
        assert 0.5 * min(asked, len(keys) - counts.max()) <= len(parts["validation"]) <= max(1.0, 2 * asked)
        assert shared_inputs(keys, parts) == 0
        shuffled = split(draw.permutation(keys), [len(keys)], fraction)
        assert len(shuffled["validation"]) == len(parts["validation"])


def test_what_is_held_out_stays_so_when_rows_are_added() -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 64, 2000, np.uint64, endpoint=False)
    before = split(keys[:1000], [1000], 0.1)["validation"]
    assert set(before) <= set(split(keys, [2000], 0.1)["validation"])


def test_a_single_input_cannot_be_split() -> None:
    with pytest.raises(BadData, match="the inputs of all 5 rows have the same letters and digits") as caught:
        split(np.full(5, 7, np.uint64), [5], 0.5)
    assert "set it to 0" in str(caught.value.hint)
    assert len(split(np.full(5, 7, np.uint64), [5], 0.0)["train"]) == 5


def test_a_source_of_its_own_is_held_out_whole() -> None:
    keys = np.array([1, 2, 3, 2, 9], np.uint64)
    parts = split(keys, [3, 5], "validation.jsonl")
    assert (parts["train"].tolist(), parts["validation"].tolist()) == ([0, 1, 2], [3, 4])
    assert shared_inputs(keys, parts) == 1


@pytest.mark.parametrize(
    ("rows", "held_out"), [(2, 1), (9, 1), (60, 12), (99, 19), (499, 99), (500, 100), (700, 100), (9_999, 100)]
)
@pytest.mark.parametrize("seed", range(3))
def test_auto_holds_out_100_of_few_rows_and_a_fifth_of_fewer_whatever_their_hashes(
    rows: int, held_out: int, seed: int
) -> None:
    keys = np.random.default_rng(seed).integers(0, 1 << 64, rows, np.uint64, endpoint=False)
    parts = split(keys, [rows], auto_fraction(rows, keys))
    assert abs(len(parts["validation"]) - held_out) <= (rows < 10), (rows, seed)


def test_auto_is_one_percent_of_many_rows_as_it_always_was() -> None:
    assert {auto_fraction(rows) for rows in (10_000, 25_000, 10**9)} == {0.01}
    assert auto_fraction(400) == 0.2 and auto_fraction(2_000) == 0.05, "not all rows were looked at"


def test_auto_holds_whole_inputs_out() -> None:
    inputs = np.random.default_rng(4).integers(0, 1 << 64, 250, np.uint64, endpoint=False)
    keys = np.repeat(inputs, np.random.default_rng(5).integers(1, 9, 250))
    parts = split(keys, [len(keys)], auto_fraction(len(keys), keys))
    assert 100 <= len(parts["validation"]) <= 108 and shared_inputs(keys, parts) == 0
