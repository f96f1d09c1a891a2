"""Classes of a classifier."""

from __future__ import annotations

from jobs.frozen import Frozen


class LabelPlan(Frozen):
    """A class that a classifier knows."""

    name: str
    """As in the rows."""
    rows: int
    """Training rows that have it; before prepare, of those looked at."""
