"""The table of moves is that of docs/run-directory.md, no more and no less."""

from __future__ import annotations

import itertools
import re

import pytest

from jobs.errors import InvalidTransition
from jobs.state import TRANSITIONS, Status, transition
from tests.support.stack import ROOT

_DIAGRAM = (ROOT / "docs" / "run-directory.md").read_text().split("stateDiagram-v2")[1].split("```")[0]
_ARROWS = re.findall(r"(\w+) --> (\w+)", _DIAGRAM)
_OVER = [target for source, target in _ARROWS if source == "over"]
DESIGN = {
    (source, end) for source, target in _ARROWS if source != "over" for end in (_OVER if target == "over" else [target])
}
"""State, and state that may follow; "over" is the diamond."""


def test_the_table_is_the_design() -> None:
    assert {(source.value, target.value) for source, targets in TRANSITIONS.items() for target in targets} == DESIGN


@pytest.mark.parametrize(("source", "target"), list(itertools.product(Status, Status)))
def test_a_move_is_made_or_both_names_are_said(source: Status, target: Status) -> None:
    if (source.value, target.value) in DESIGN:
        assert transition(source, target) is target
    else:
        with pytest.raises(InvalidTransition, match=f"{source.value} cannot become {target.value}"):
            transition(source, target)


def test_terminal_states() -> None:
    assert {status.value for status in Status if status.terminal} == {"succeeded", "failed", "cancelled", "validated"}
