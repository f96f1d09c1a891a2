"""The card as it travels from a worker's report to the stages that plan for it."""

from __future__ import annotations

import pytest

from jobs.cards import REFERENCE, CardFacts, memory_bandwidth, peak_flops
from worker.training.settings import from_environment


def test_a_card_travels_through_the_environment() -> None:
    card = CardFacts("NVIDIA H200", 143_771 * 2**20)
    assert CardFacts.parse(card.encode()) == card
    assert from_environment({"LONGHAUL_CARD": card.encode()}).card == card
    assert from_environment({"LONGHAUL_CARD": ""}).card is None


@pytest.mark.parametrize(
    "text", ["NVIDIA H200", "[]", '{"name": "NVIDIA H200"}', '{"name": "a", "memory_bytes": null}']
)
def test_what_is_no_card_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"LONGHAUL_CARD is .*; it is JSON such as"):
        CardFacts.parse(text)


def test_the_reference_card_is_known_in_full() -> None:
    assert REFERENCE.memory_bytes / 2**30 == pytest.approx(31.84, abs=0.01)
    assert peak_flops(REFERENCE.name) == 209.5e12
    assert memory_bandwidth(REFERENCE.name) == 1.792e12
    assert memory_bandwidth("NVIDIA T4") is None
