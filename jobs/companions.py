"""Columns beside those that are learned from: some decide how a row is read, or whether it is; others nobody reads."""

from __future__ import annotations

from typing import Literal

from jobs.frozen import Frozen

Meaning = Literal["verdict", "split", "weight", "system", "history"]
"""What the values of a column look like."""
LEFT_OUT = "left out: "
"""How the reason begins for which a row is left out as its file asks: nothing is wrong with it."""
_HINTS: dict[Meaning, str] = {
    "verdict": "every row is used, whatever it says. Take the rows that are not to be learned out of the file, or "
    "rename it to answer, with accept or reject in each row",
    "split": "every row is used, whatever it says. Write the rows that are not to be learned to a file of their own, "
    "and name it in data.validation",
    "weight": "every row counts once. Write the rows of each weight to a file of their own, and give each file its "
    "weight in data.train; a row whose weight is 0 is left out where all others are 1",
    "system": "write it as the first turn of each chat, or name it in data.input, and the target in data.target",
    "history": "write it as the first turns of each chat, or name it in data.input, and the target in data.target",
}


class CompanionColumns(Frozen):
    """Columns beside input and target that a row is read by, as they are called in the file; null: there is none."""

    system: str | None = None
    """The system prompt of a row, before all its turns."""
    history: str | None = None
    """Earlier turns of a row: `[[question, answer], …]`, or a list of turns."""
    verdict: str | None = None
    """A row of which it says `reject`, `ignore` or `false` is left out."""
    weight: str | None = None
    """A row whose weight is 0 is left out."""
    split: str | None = None
    """A row of which it does not say `train` or `training` is left out of the training rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that there are."""
        columns = (self.system, self.history, self.verdict, self.weight, self.split)
        return tuple(name for name in columns if name is not None)

    @property
    def text(self) -> str | None:
        """What becomes of each, for people; None: there is none."""
        parts = (
            (self.system, "is the system prompt"),
            (self.history, "has earlier turns"),
            (self.verdict, "leaves rows out where it is reject, ignore or false"),
            (self.weight, "leaves rows out where it is 0"),
            (
                self.split,
                "leaves rows out where it is not train: to evaluate on these, write them to a file of their "
                "own, and name it in data.validation",
            ),
        )
        return "; ".join(f"the column {name} {what}" for name, what in parts if name is not None) or None


NO_COMPANIONS = CompanionColumns()


class UnreadColumn(Frozen):
    """A column that nobody reads, whose values look as if they meant something."""

    name: str
    """As in the file."""
    meaning: Meaning
    """What they look like."""
    values: tuple[str, ...]
    """Some of them."""

    @property
    def text(self) -> str:
        """What is not used, and what to do about it."""
        values = f" ({', '.join(self.values)})" if self.values else ""
        return f"the column {self.name}{values} is not used: {_HINTS[self.meaning]}"
