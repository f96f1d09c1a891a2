"""Counts over rows. The counts of consecutive parts add up to those of the whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.companions import LEFT_OUT
from jobs.errors import BadData
from jobs.text.units import format_share
from worker.training.rows.row import NOT_UTF8, REPAIRS, reencode

_FIRST_ROWS = 3
_MOST_LEFT_OUT = 0.1
"""Where more rows cannot be used, their reason is to be mended: what is left would be another data set."""


@dataclass
class RowCounts:
    """Counts over the rows of one source."""

    read: int = 0
    """Rows, not blank lines."""
    kept: int = 0
    duplicates: int = 0
    """Rows equal to an earlier one: rejected too, but nothing is wrong with the file, so that they do not count
    towards `max_invalid_fraction`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows that are not used, by reason: unusable ones, and those that are left out as their file asks."""
    first: dict[str, list[int]] = field(default_factory=dict)
    """By reason, the numbers of the first few rows."""
    normalized: Counter[str] = field(default_factory=Counter)
    """Characters that were rewritten, in all rows read."""
    noticed: Counter[str] = field(default_factory=Counter)
    """Rows with something odd that was left as it is, among all that can be used."""
    rewritten: Counter[str] = field(default_factory=Counter)
    """Texts that are not as they stood in the row, by what was done, among all that can be used."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Of each of these the first: before and after."""
    truncated: Counter[str] = field(default_factory=Counter)
    """By side (input, target): texts that were cut, among those kept. So are the next four."""
    tokens: Counter[str] = field(default_factory=Counter)
    """By side."""
    unknown_texts: Counter[str] = field(default_factory=Counter)
    """By side: texts with something that the tokenizer does not know."""
    unknown_tokens: int = 0
    """A run of unknown characters may be one token."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Characters that the tokenizer does not know."""

    @classmethod
    def from_json(cls, counts: Mapping[str, Any]) -> RowCounts:
        """From what `as_json` gave."""
        fields: dict[str, Any] = {name: Counter(it) if name in _COUNTERS else it for name, it in counts.items()}
        return cls(**fields)

    def as_json(self) -> dict[str, object]:
        """As plain dictionaries and numbers."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    @property
    def invalid(self) -> int:
        """Unusable rows; those that are left out as their file asks are none."""
        return self._unusable().total()

    @property
    def left_out(self) -> int:
        """Rows that themselves say that they are not to be learned."""
        return self.rejected.total() - self.invalid

    def _unusable(self) -> Counter[str]:
        return Counter({reason: rows for reason, rows in self.rejected.items() if not reason.startswith(LEFT_OUT)})

    def reject(self, number: int, reason: str) -> None:
        """Row `number` cannot be used."""
        self.rejected[reason] += 1
        first = self.first.setdefault(reason, [])
        if len(first) < _FIRST_ROWS:
            first.append(number)

    def add(self, later: RowCounts) -> None:
        """Count the rows that follow."""
        for name in ("read", "kept", "duplicates", "unknown_tokens"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(later, name))
        for reason, numbers in later.first.items():
            self.first[reason] = [*self.first.get(reason, []), *numbers][:_FIRST_ROWS]
        self.examples = later.examples | self.examples

    def check_invalid(self, limit: float, name: str, of: int) -> None:
        """Raise BadData (`too_many_invalid_rows`) if more than `limit` of `of` rows of `name` are unusable."""
        if self.invalid <= limit * of:
            return
        share = self.invalid / of
        [(most, _)] = self._unusable().most_common(1)
        hint = reencode(name) if most == NOT_UTF8 else REPAIRS.get(most, "repair these lines")
        if share <= _MOST_LEFT_OUT:  # rounded up, so that it helps
            enough = math.ceil(share * 1000) / 1000
            hint += f", or set data.max_invalid_fraction to {enough:g} to continue without them"
        elif share == 1 and most not in (NOT_UTF8, *REPAIRS):
            hint += ", or say in data.input and data.target what else to learn from"
        commonest = "; ".join(
            f"{reason}: {count} (line{'s' if count > 1 else ''} {', '.join(map(str, self.first[reason]))}"
            f"{', …' if count > _FIRST_ROWS else ''})"
            for reason, count in self._unusable().most_common(3)
        )
        raise BadData(
            f"{self.invalid:,} of {of:,} rows of {name} cannot be used ({format_share(share)}; "
            f"data.max_invalid_fraction allows {format_share(limit)}). Commonest: {commonest}",
            code="too_many_invalid_rows",
            param="data.max_invalid_fraction",
            hint=hint,
        )


_COUNTERS = ("rejected", "normalized", "noticed", "rewritten", "truncated", "tokens", "unknown_texts", "unknown")
