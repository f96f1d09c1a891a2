"""Scores of rows: one finite number each."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from worker.training.rows.row import DECIMAL_COMMA, NOT_A_NUMBER, NOT_FINITE, Defect
from worker.training.rows.text import Joined, Template

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


_FEWEST = 5
"""Different numbers that look like scores."""


class ScoreTemplate(Template):
    """What the score of a row is made of. Filled in, it is the number as Python writes it."""

    verbatim: ClassVar[bool] = True

    def fill(self, row: Mapping[str, Any], joined: list[Joined] | None = None) -> str:
        """See `Template`. Raises Defect also for what is no finite number."""
        value = self.whole_value(row)
        return repr(number_in(str(value) if isinstance(value, float) and math.isinf(value) else super().fill(row)))


def number_in(text: str) -> float:
    """The number that a text is. Raises Defect where it is none, or is not finite."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        comma = text.count(",") == 1 and _NUMBER.fullmatch(text.replace(",", "."))
        raise Defect(NOT_FINITE if _NOT_FINITE.fullmatch(text) else DECIMAL_COMMA if comma else NOT_A_NUMBER)
    if not math.isfinite(number := float(text)):
        raise Defect(NOT_FINITE)
    return number


def like_scores(found: Collection[str]) -> bool:
    """Whether these labels are numbers that are not whole, and different enough to be no classes."""
    try:
        return len(found) >= _FEWEST and sum(not number_in(label).is_integer() for label in found) * 2 > len(found)
    except Defect:
        return False
