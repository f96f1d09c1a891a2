"""What every model that is stored or read from a user is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict


class Frozen(BaseModel):
    """Frozen and closed. NaN and infinities are refused: JSON has none, and a file with one could not be read again."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Part(BaseModel):
    """What a user wrote, such as one part of a job: frozen, closed, and of exactly the types that it names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        strict=True,
    )


class Empty(Frozen):
    """Nothing is known yet."""


def left_out() -> Any:
    """A field that is left out, and never null, where there is nothing to say."""
    return Field(default=None, exclude_if=lambda value: value is None, json_schema_extra=_without_default)


def _without_default(schema: JsonDict) -> None:
    del schema["default"]
