"""What answers have in common: closed models, the one shape of errors, health."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema


def left_out() -> Any:
    """A field that is left out, and never null, where there is nothing to say."""
    return Field(default=None, json_schema_extra=_without_default)


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class Answer(BaseModel):
    """Closed, and its fields documented by their docstrings. Field without default: it is always there."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Page(Answer):
    """What every list has beside its `data`."""

    object: Literal["list"]
    """Always `list`."""
    has_more: bool
    """Whether there is more after the last one."""


class Error(Answer):
    """What went wrong."""

    type: str
    """Kind: `invalid_request_error`, `authentication_error`, `permission_error`, `conflict_error`,
    `rate_limit_error`, `server_error` or `unavailable_error`."""
    code: str
    """Stable, for machines: such as `not_found`, `invalid_value`, `conflict`."""
    message: str
    """For people: what, the value, and the way out."""
    param: str | None
    """The parameter, header, or dotted key of the body that is wrong; null where it is none of them."""
    hint: str | SkipJsonSchema[None] = left_out()
    """The way out alone; left out where there is none."""


class ErrorResponse(Answer):
    """The one shape of every error."""

    error: Error


class Health(Answer):
    """All is well."""

    status: Literal["ok"]
    """Always `ok`: what is not well is an error."""
