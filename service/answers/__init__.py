"""What pydantic and the OpenAPI document are told of `jobs.answers`: every field by its docstring, that no answer has
another field, and what an event of each type, a row of metrics and a point of them are.

Rows of metrics, thousands in one answer, are only described; the tests validate those.
"""

from __future__ import annotations

import ast
import inspect
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType, is_typeddict

from jobs import answers
from jobs.answers import ShownEvent
from jobs.events import AnyFact
from jobs.frozen import Frozen, left_out
from jobs.metrics import MetricRow
from jobs.trainer_facts import Fact


def _describe() -> None:
    """Pydantic finds docstrings in a TypedDict's own source alone, which it searches each time that one is used."""
    known: dict[str, dict[str, Any]] = {}
    for node in ast.parse(inspect.getsource(answers)).body:
        if not (isinstance(node, ast.ClassDef) and is_typeddict(kind := getattr(answers, node.name))):
            continue
        fields = reduce(or_, (known.get(ast.unparse(base), {}) for base in node.bases), dict[str, Any]())
        fields |= {name: hint for name, hint in kind.__annotations__.items() if name not in fields}
        for field, text in pairwise(node.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    fields[name] = Annotated[fields[name], Field(description=inspect.cleandoc(words))]
        known[node.name] = kind.__annotations__ = fields
        kind.__pydantic_config__ = ConfigDict(extra="forbid")


_describe()

# -- events ------------------------------------------------------------------------------------------------------------
# One model per type of event, made from the facts of `jobs.events.AnyFact`.

NO_SOURCE = {"use_attribute_docstrings": False}
"""A model that is made has no source: pydantic would search all loaded modules for it, each time that one starts."""


def _of_type(fact: type[Fact]) -> Any:
    """A `ShownEvent` with this fact's type, and with its fields as `data`."""
    fields: dict[str, Any] = {name: (each.annotation, each) for name, each in fact.model_fields.items()}
    _, kind = fields.pop("type")
    made: Any = {"__base__": Frozen, "__doc__": fact.__doc__, "__cls_kwargs__": NO_SOURCE}
    shown: Any = dict(ShownEvent.__annotations__)
    shown["type"] = Annotated[Literal[kind.default], Field(description="What happened.")]
    shown["data"] = Annotated[create_model(f"{fact.__name__}Data", **made, **fields), Field(description="The fact.")]
    return create_model(f"{fact.__name__}Event", **made, **shown)


_MODELS = [_of_type(fact) for fact in get_args(get_args(AnyFact)[0])]
if TYPE_CHECKING:
    EventOfType = ShownEvent
else:
    EventOfType = TypeAliasType("Event", Annotated[reduce(or_, _MODELS), Field(discriminator="type")])
    answers.EventList.__annotations__["data"] = list[EventOfType]


# -- rows of metrics ---------------------------------------------------------------------------------------------------
# As they were written, or points that stand for many.


class MetricPointBase(Frozen):
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
    answers.MetricList.__annotations__["data"] = Annotated[
        list[MetricRow | MetricPoint], Field(description="The rows, or points.")
    ]

EVENT: TypeAdapter[ShownEvent] = TypeAdapter(EventOfType)
EVENT_LIST = TypeAdapter(answers.EventList)
GENERATION = TypeAdapter(answers.Generation)
JOB = TypeAdapter(answers.Job)
JOB_LIST = TypeAdapter(answers.JobList)
