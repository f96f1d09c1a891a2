"""Classes of a classifier."""

from __future__ import annotations

from jobs.frozen import Frozen

CONFUSION = "confusion.json"
"""In the run directory: a `ConfusionMatrix` of the newest evaluation."""


class LabelPlan(Frozen):
    """A class that a classifier knows."""

    name: str
    """As in the rows."""
    rows: int
    """Training rows that have it; before prepare, of those looked at."""


class ConfusionMatrix(Frozen):
    """Which class is taken for which other."""

    labels: tuple[str, ...]
    """Classes, the commonest first; the last may stand for all others together."""
    rows: tuple[tuple[int, ...], ...]
    """[class, class that it is taken for]: held-out rows."""
