"""What happened to a job: one model per type of event, made from the facts in `jobs/events.py`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, create_model
from typing_extensions import TypeAliasType

from jobs.events import AnyFact, Fact
from service.answers.parts import Answer, Page


class EventEnvelope(Answer):
    """What every event has."""

    object: Literal["fine_tuning.job.event"]
    """Always `fine_tuning.job.event`."""
    id: str
    """`<job>:<number>`."""
    number: int
    """1, 2, 3 … without gap: `after`, and the `id` of a live stream."""
    job: str
    """Whose it is."""
    created_at: int
    """Unix time, whole seconds."""
    at: float
    """Unix time, seconds."""
    attempt: int
    """The attempt it belongs to; 0 before the first."""
    level: Literal["info", "warn", "error"]
    """How loud it is."""
    message: str
    """The same as `type` and `data`, for people."""


NO_SOURCE = {"use_attribute_docstrings": False}
"""A model that is made has no source: pydantic would search all loaded modules for it, each time that one starts."""


def _described(fact: type[Fact]) -> type[EventEnvelope]:
    """The envelope with this fact's type, and with its fields as `data`."""
    fields: dict[str, Any] = {name: (each.annotation, each) for name, each in fact.model_fields.items()}
    _, kind = fields.pop("type")
    made: Any = {"__doc__": fact.__doc__, "__cls_kwargs__": NO_SOURCE}
    data = create_model(f"{fact.__name__}Data", __base__=Answer, **made, **fields)
    more: dict[str, Any] = {
        "type": (Literal[kind.default], Field(description="What happened.")),
        "data": (data, Field(description="The fact.")),
    }
    return create_model(f"{fact.__name__}Event", __base__=EventEnvelope, **made, **more)


_MODELS: dict[type[Fact], type[EventEnvelope]] = {fact: _described(fact) for fact in get_args(get_args(AnyFact)[0])}

if TYPE_CHECKING:
    Event = EventEnvelope
else:
    Event = TypeAliasType("Event", Annotated[reduce(or_, _MODELS.values()), Field(discriminator="type")])


def model_of(fact: Fact) -> type[EventEnvelope]:
    """Of the event with this fact."""
    return _MODELS[type(fact)]


class EventList(Page):
    """Events in order."""

    cursor = "number"
    data: list[Event]
    first_id: int | None
    """Number of the first one; null for an empty list."""
    last_id: int | None
    """Number of the last one: `after` of the next page."""
