"""What the columns beside input and target mean, by their names and by the values of the first rows.

A verdict, a weight, a system prompt or a history is read as what it is where the values leave no doubt. What looks like
one and is not read is named to people: no row is silently taken for something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.companions import LEFT_OUT, CompanionColumns, Meaning, UnreadColumn
from worker.training.rows.chat import CHAT_COLUMNS, is_history, is_system
from worker.training.rows.row import Defect

SURVEYED = 1_000
"""Rows whose values are looked at."""
_COLUMNS, _MOST, _LONGEST, _NAMED = 1_000, 12, 40, 4
"""Columns that are looked at; different values of one that are known; characters of one; those that a message names."""
_SYSTEM, _HISTORY = ("system", "system_prompt"), ("history",)
PROMPTS = frozenset({*_SYSTEM, *_HISTORY})
"""Names of columns, in lower case, that may hold what stands before the turns of a row."""
_WEIGHT = ("weight", "sample_weight", "loss_weight", "example_weight", "row_weight")
_ANSWER, _LABEL = "answer", ("label", "kto_tag")
_JUDGED = frozenset({"completion", "response", "output", *CHAT_COLUMNS})
"""Columns beside which a truth value is KTO's: whether what stands there is good."""
_PROMPTED = frozenset({"instruction", "prompt", *CHAT_COLUMNS})
"""Columns of formats that know a system prompt and a history."""
_ORCA = frozenset({"question", "response"})
"""Columns of OpenOrca, which knows a system prompt."""
_ANSWERS, _TRUTH = frozenset({"accept", "reject", "ignore"}), frozenset({"true", "false"})
_COUNTS = frozenset({"0", "1"})
_NO = frozenset({"reject", "ignore", "false"})
_VERDICTS = frozenset(
    {
        *_ANSWERS, *_TRUTH, "accepted", "rejected", "ignored", "approve", "approved", "decline", "declined",
        "disapproved", "good", "bad", "keep", "kept", "skip", "skipped", "drop", "dropped", "discard", "discarded",
        "pass", "passed", "fail", "failed", "yes", "no", "valid", "invalid", "correct", "incorrect", "wrong",
    }
)  # fmt: skip
_OF_VERDICTS = re.compile(r"(is|was|has)_.+|answer|label|status|verdict|keep|selected|accepted|rejected|approved|valid")
"""Names of columns in which 0 and 1, or one known verdict among other values, is one."""
_SPLITS = frozenset(
    {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation", "holdout"}
)
_TRAIN = frozenset({"train", "training"})
_OF_SPLITS = re.compile(r"(data_?|dataset_?)?(split|subset|partition|fold|set)")


@dataclass
class ColumnValues:
    """What a column holds in the first rows; missing and empty values are none."""

    different: set[str] = field(default_factory=set)
    """Plain values, in lower case, numbers as short as they can be written; no more than a few."""
    many: bool = False
    """Whether there are more than these, or others than plain ones."""
    numbers: bool = True
    """Whether all of them are numbers."""
    turns: bool = True
    """Whether all of them are histories."""
    prompts: bool = True
    """Whether all of them are system prompts."""
    filled: bool = False
    """Whether there is one at all."""

    def add(self, value: Any) -> None:
        """The value of the next row."""
        if is_nothing(value):
            return
        self.filled = True
        self.turns = self.turns and is_history(value)
        self.prompts = self.prompts and is_system(value)
        plain = plain_value(value)
        self.numbers = self.numbers and plain is not None and _number(plain) is not None
        if plain is None or len(plain) > _LONGEST or (len(self.different) == _MOST and plain not in self.different):
            self.many = True
        else:
            self.different.add(plain)

    def within(self, known: Collection[str]) -> bool:
        """Whether there are values, and all are among these."""
        return self.filled and not self.many and self.different <= set(known)


def values_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, ColumnValues]:
    """By column, what it holds in these rows."""
    found: dict[str, ColumnValues] = {}
    for row in rows:
        for name, value in row.items():
            if name in found or len(found) < _COLUMNS:
                found.setdefault(name, ColumnValues()).add(value)
    return found


def companions_of(
    values: Mapping[str, ColumnValues], read: Collection[str], *, recognized: bool, labelled: bool, held_out: bool
) -> CompanionColumns:
    """The columns that rows are read by. `read`: those of the templates.

    `recognized`: the rows are of a known format, by their columns; `labelled`: their targets are labels; `held_out`:
    none of them is trained on.
    """
    known = {name.lower() for name in read}
    unread = {name.lower(): name for name in sorted(values) if name not in read}

    def first(names: Iterable[str], fits: Callable[[ColumnValues], bool]) -> str | None:
        return next((unread[name] for name in names if name in unread and fits(values[unread[name]])), None)

    def divides(column: ColumnValues) -> bool:
        return column.within(_SPLITS) and bool(column.different & _TRAIN)  # a file of test rows alone is meant as it is

    prompted = recognized and not labelled and (bool(known & _PROMPTED) or known >= _ORCA)
    verdict = first([_ANSWER], lambda column: column.within(_ANSWERS))
    if verdict is None and not labelled and known & _JUDGED:
        verdict = first(_LABEL, lambda column: column.within(_TRUTH))
    return CompanionColumns(
        system=first(_SYSTEM, lambda column: column.prompts) if prompted else None,
        history=first(_HISTORY, lambda column: column.turns) if prompted else None,
        verdict=verdict,
        weight=first(_WEIGHT, lambda column: column.within(_COUNTS) and "1" in column.different),
        split=None if held_out else first(filter(_OF_SPLITS.fullmatch, unread), divides),
    )


def unread_columns(
    values: Mapping[str, ColumnValues], read: Collection[str], *, labelled: bool, held_out: bool
) -> tuple[UnreadColumn, ...]:
    """Columns that are not in `read`, and whose values look as if they meant something. `labelled`, `held_out`: as of
    `companions_of`."""
    found = []
    for name in sorted(values.keys() - set(read)):
        column = values[name]
        meaning = _meaning(name.lower(), column) if column.filled else None
        if (held_out and meaning == "split") or (labelled and meaning in ("system", "history")):
            continue
        if meaning is not None:
            shown = () if column.many and meaning != "split" else tuple(sorted(column.different)[:_NAMED])
            found.append(UnreadColumn(name=name, meaning=meaning, values=shown))
    return tuple(found)


def _meaning(name: str, column: ColumnValues) -> Meaning | None:
    splits = len(column.different & _SPLITS)
    if (splits and _OF_SPLITS.fullmatch(name)) or (splits > 1 and column.within(_SPLITS)):
        return "split"
    by_name = _OF_VERDICTS.fullmatch(name) is not None
    if column.within(_VERDICTS) or (by_name and (column.within(_COUNTS) or column.different & _VERDICTS)):
        return "verdict"
    if name in _WEIGHT and column.numbers:
        return "weight"
    if name in _SYSTEM and column.prompts:
        return "system"
    if name in _HISTORY and column.turns:
        return "history"
    return None


def is_nothing(value: Any) -> bool:
    """Whether a column says nothing there."""
    return value is None or value in ("", "[]") or value == [] or (isinstance(value, float) and math.isnan(value))


def plain_value(value: Any) -> str | None:
    """A text, truth value or number as it is compared: lower case, `1.0` as `1`; None: it is none of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        value = value.strip().lower()
        number = _number(value)
        return value if number is None else f"{number:g}"
    if isinstance(value, int):
        return str(value)
    return f"{value:g}" if isinstance(value, float) else None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def judged(row: Mapping[str, Any], columns: CompanionColumns) -> str | None:
    """What is odd about a row's verdict, weight or split, which it is used in spite of; None: nothing.

    Raises Defect where one of them leaves the row out.
    """
    odd = None
    for name, none, known in (
        (columns.verdict, _NO, _ANSWERS | _TRUTH),
        (columns.weight, frozenset({"0"}), _COUNTS),
        (columns.split, _SPLITS - _TRAIN, _SPLITS),
    ):
        if name is None or is_nothing(row.get(name)):
            continue
        value = plain_value(row[name])
        if value in none:
            raise Defect(f"{LEFT_OUT}{name} is {value}")
        if value not in known:
            odd = f"a value of {name} that says neither whether the row is used nor not: it is used"
    return odd
