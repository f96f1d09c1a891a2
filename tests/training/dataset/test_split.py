"""Training and validation."""

from __future__ import annotations

import numpy as np
import pytest

from worker.training.dataset.split import shared_inputs, split


@pytest.mark.parametrize(
    ("rows", "fraction", "least", "most"),
    [(2, 0.001, 1, 1), (2, 0.999, 1, 1), (1, 0.5, 0, 0), (50, 0.0, 0, 0), (50, 0.999999999999999, 49, 49)],
)
def test_a_fraction_is_at_least_one_row_and_never_all(rows: int, fraction: float, least: int, most: int) -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 64, rows, np.uint64, endpoint=False)
    parts = split(keys, [rows], fraction)
    assert least <= len(parts["validation"]) <= most
    assert sorted([*parts["train"], *parts["validation"]]) == list(range(rows))


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.999])
def test_rows_of_one_input_are_on_one_side(fraction: float) -> None:
    inputs = np.random.default_rng(1).integers(0, 1 << 64, 20, np.uint64, endpoint=False)
    keys = inputs[np.random.default_rng(2).integers(0, 20, 500)]
    parts = split(keys, [500], fraction)
    assert len(parts["train"]) and len(parts["validation"])
    assert shared_inputs(keys, parts) == 0


def test_a_single_input_is_learnt_from() -> None:
    parts = split(np.full(5, 7, np.uint64), [5], 0.5)
    assert (len(parts["train"]), len(parts["validation"])) == (5, 0)


def test_a_source_of_its_own_is_held_out_whole() -> None:
    keys = np.array([1, 2, 3, 2, 9], np.uint64)
    parts = split(keys, [3, 5], "validation.jsonl")
    assert (parts["train"].tolist(), parts["validation"].tolist()) == ([0, 1, 2], [3, 4])
    assert shared_inputs(keys, parts) == 1
