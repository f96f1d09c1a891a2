"""What answers have in common: closed models, the one shape of errors; health, and workers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import SkipJsonSchema

from jobs.frozen import left_out
from jobs.heartbeat import Worker


class Answer(BaseModel):
    """Closed, and its fields documented by their docstrings. Field without default: it is always there."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Page(Answer):
    """What every list has beside its `data`."""

    cursor: ClassVar[str | None] = None
    """Field of an item that `first_id` and `last_id` show, and that the next page's `after` takes; None: one page."""
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
    """For people: what, the value, and what to do."""
    param: str | None
    """The parameter, header, or dotted key of the body that is wrong; null where it is none of them."""
    hint: str | SkipJsonSchema[None] = left_out()
    """Only what to do; left out if there is no hint."""


class ErrorResponse(Answer):
    """The one shape of every error."""

    error: Error


class Health(Answer):
    """All is well."""

    status: Literal["ok"]
    """Always `ok`: what is not well is an error."""


# -- workers -----------------------------------------------------------------------------------------------------------
# Who works here, by what each reported of itself.


class WorkerList(Page):
    """Workers by name."""

    data: list[Worker]
    damaged: list[str]
    """Ids of jobs whose run directory cannot be read, oldest first: no worker takes them."""
