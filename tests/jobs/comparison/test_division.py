"""A difference in bytes, divided among the settings behind it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.comparison.attribution import Factor, Product, divide

AMOUNTS = st.floats(1e-3, 1e6)
PAIRS = st.tuples(AMOUNTS, AMOUNTS)


def product(*factors: tuple[float, float, str], exact: bool = True) -> Product:
    """Of these factors: before, after, and the one key behind each ('': none)."""
    before = after = 1.0
    for was, now, _ in factors:
        before, after = before * was, after * now
    told = [Factor(was, now, (key,) if key else ()) for was, now, key in factors]
    return Product("weights", before, after, told, exact)


@settings(deadline=None)
@given(PAIRS, PAIRS, PAIRS)
def test_the_parts_add_up_whichever_job_comes_first(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]
) -> None:
    forth = product((*a, "a"), (*b, "b"), (*c, "c"))
    back = product((*a[::-1], "a"), (*b[::-1], "b"), (*c[::-1], "c"))
    scale = max(forth.before, forth.after)
    assert sum(divide(forth).values()) == pytest.approx(forth.after - forth.before, abs=1e-9 * scale)
    mirrored = {keys: -amount for keys, amount in divide(back).items()}
    assert divide(forth) == pytest.approx(mirrored, abs=1e-6 * scale)


def test_one_difference_costs_all_of_it() -> None:
    assert divide(product((2, 4, "dtype"), (100, 100, "parameters"))) == {("dtype",): 200}


def test_two_that_double_it_cost_the_same() -> None:
    assert divide(product((1, 2, "rows"), (8, 16, "tokens"))) == pytest.approx({("rows",): 12, ("tokens",): 12})


def test_what_has_no_key_is_told_of_what_has() -> None:
    """Activations that grow faster than the tokens do: attention."""
    assert divide(product((1, 4, "tokens"), (1, 1.5, ""))) == {("tokens",): 5}


def test_what_nothing_explains_has_no_keys() -> None:
    assert divide(product((1, 2, ""))) == {(): 1}


def test_parts_that_cancel_each_other_out_are_not_told_apart() -> None:
    assert divide(product((1, 4, "tokens"), (1, 0.2500001, "recomputation"))).keys() == {("tokens", "recomputation")}


def test_a_factor_that_comes_from_nothing_costs_all_of_it() -> None:
    assert divide(product((3, 5, "rank"), (0, 2, "method"))) == {("method",): 10}


def test_temporaries_share_what_is_no_product() -> None:
    rows_and_tokens = divide(product((1, 2, "rows"), (8, 16, "tokens"), (1, 1, ""), exact=False))
    assert rows_and_tokens == pytest.approx({("rows",): 12, ("tokens",): 12})
    assert divide(product((1, 2, "tokens"), (1, 3, "dora"), exact=False)) == {("tokens", "dora"): 5}
    assert divide(product((2, 2, "tokens"), (1, 3, "dora"), exact=False)) == {("dora",): 4}
