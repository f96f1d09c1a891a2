"""Rows of metrics, and what is drawn of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model
from pydantic.json_schema import SkipJsonSchema

from jobs.frozen import left_out
from jobs.metrics import MetricRow
from service.answers.parts import Answer, Page


class MetricPointBase(Answer):
    """Some fields of a row (`fields`); or, with `points`, the mean of each over a stretch of rows."""

    step: int
    """Optimizer steps done, at the end of the stretch."""
    at: float
    """Unix time of its last row, seconds."""
    attempt: int
    """The attempt that wrote that."""
    first_step: int | SkipJsonSchema[None] = left_out()
    """Step of its first row; of points alone."""
    loss_min: float | SkipJsonSchema[None] = left_out()
    """Lowest loss in it; of points alone, with `loss`."""
    loss_max: float | SkipJsonSchema[None] = left_out()
    """Highest loss in it; of points alone, with `loss`."""


def _figures() -> dict[str, Any]:
    """The other fields of a row, each of which may be left out."""
    return {
        name: (float | None, Field(default=None, description=field.description))
        for name, field in MetricRow.model_fields.items()
        if name not in MetricPointBase.model_fields
    }


if TYPE_CHECKING:
    MetricPoint = MetricPointBase
else:
    MetricPoint = create_model("MetricPoint", __base__=MetricPointBase, __doc__=MetricPointBase.__doc__, **_figures())


class MetricList(Page):
    """Rows in order of step; with `points`, the means of stretches."""

    data: list[MetricRow | MetricPoint]
    """The rows, or points."""
