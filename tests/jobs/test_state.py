"""The table of moves is that of docs/architecture.md, no more and no less."""

from __future__ import annotations

import itertools

import pytest

from jobs.errors import IllegalMove
from jobs.state import MOVES, Status, move

DESIGN = {
    ("validating", "queued"), ("queued", "running"), ("running", "succeeded"),
    *itertools.product(("validating", "queued", "running", "paused"), ("failed", "cancelled")),
    ("queued", "paused"), ("running", "paused"), ("paused", "queued"), ("running", "queued"),
    ("validating", "validated"), ("running", "validating"), ("validating", "paused"),
}  # fmt: skip


def test_the_table_is_the_design() -> None:
    assert {(source.value, target.value) for source, targets in MOVES.items() for target in targets} == DESIGN


@pytest.mark.parametrize(("source", "target"), list(itertools.product(Status, Status)))
def test_a_move_is_made_or_both_names_are_said(source: Status, target: Status) -> None:
    if (source.value, target.value) in DESIGN:
        assert move(source, target) is target
    else:
        with pytest.raises(IllegalMove, match=f"{source.value} cannot become {target.value}"):
            move(source, target)


def test_terminal_states() -> None:
    assert {status.value for status in Status if status.terminal} == {"succeeded", "failed", "cancelled", "validated"}
