"""The space of a sweep: the values that each parameter may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from jobs.frozen import Part
from jobs.spec import canonical_sha256

MOST_TRIALS = 10_000
Value = str | int | float | bool | None | list[Any] | dict[str, Any]
Settings = dict[str, Value]
"""A value for each parameter of a trial, by the dotted key of the job."""
Key = Annotated[str, StringConstraints(pattern=r"^[a-z_0-9]+(\.[A-Za-z_0-9]+){0,5}$", max_length=128)]


class Parameter(Part):
    """The values that one key of the job may have. One of `choice`, `range` and `int` is needed."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    choice: Annotated[list[Value], Field(min_length=1, max_length=1000)] | None = None
    """One of these."""
    span: Annotated[list[float], Field(min_length=2, max_length=2)] | None = Field(None, alias="range")
    """A number from the first to the second, both included."""
    whole: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(None, alias="int")
    """An integer from the first to the second, both included."""
    log: bool = False
    """With `range` or `int`: draw its logarithm evenly, as for a learning rate."""
    step: Annotated[float, Field(gt=0)] | None = None
    """With `range` or `int`: only the first value and steps of this size from there."""
    when: dict[Key, Value] = Field({})
    """Only where other parameters have these values; a list stands for any of its values."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name, value in (("choice", self.choice), ("range", self.span), ("int", self.whole)) if value]
        if len(given) != 1:
            raise ValueError(f"give one of choice, range and int (got {' and '.join(given) or 'none'})")
        if self.choice is not None:
            if self.log or self.step is not None:
                raise ValueError("log and step go with range or int")
            if len({canonical_sha256(value) for value in self.choice}) < len(self.choice):
                raise ValueError("choice names a value twice")
            return self
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"the first bound must be below the second (got {low} and {high})")
        if self.log and low <= 0:
            raise ValueError(f"the bounds of a logarithm are above 0 (got {low})")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other")
        if self.whole is not None and self.step is not None and self.step != int(self.step):
            raise ValueError(f"the step of an integer is an integer (got {self.step})")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Of a range or an integer."""
        found = self.span or self.whole
        assert found is not None
        return found[0], found[1]

    @property
    def listed(self) -> list[Value] | None:
        """All values, in order; None: there are too many, or they are not discrete."""
        if self.choice is not None:
            return list(self.choice)
        if self.span is not None and self.step is None:
            return None
        step = self.step or 1
        if self.steps >= MOST_TRIALS:
            return None
        numbers = range(math.floor(self.steps) + 1)
        if self.whole is not None:
            return [int(self.bounds[0] + number * step) for number in numbers]
        return [self.after(number) for number in numbers]

    @property
    def steps(self) -> float:
        """From the first bound of a range or an integer to the second; it need not be whole."""
        low, high = self.bounds
        try:
            return (high - low) / (self.step or 1) + 1e-9
        except OverflowError:  # integers beyond any float
            return math.inf

    def after(self, number: int) -> float:
        """The value of a range with a step after so many steps."""
        return float(f"{self.bounds[0] + number * (self.step or 1):.12g}")

    def step_of(self, value: float) -> int:
        """After how many steps a range has the value that is nearest."""
        return min(math.floor(self.steps), max(0, round((value - self.bounds[0]) / (self.step or 1))))

    @property
    def examples(self) -> list[Value]:
        """Values that are tried when a sweep is submitted: every choice, both ends of a range."""
        return list(self.choice) if self.choice is not None else list(self.span or self.whole or [])

    def can_be(self, value: Value) -> bool:
        """Whether this may be a value of it."""
        if self.choice is not None:
            return value in self.choice
        low, high = self.bounds
        return isinstance(value, int | float) and low <= value <= high

    def active(self, settings: Mapping[str, Value]) -> bool:
        """Whether it has a value beside these."""
        return all(
            key in settings and settings[key] in (wanted if isinstance(wanted, list) else [wanted])
            for key, wanted in self.when.items()
        )


def spelled_out(given: object) -> object:
    """What a list stands for. Raises ValueError for a bare value."""
    if isinstance(given, list):
        return {"choice": given}
    if not isinstance(given, Mapping | Parameter):
        raise ValueError("must be a list of values, or an object with choice, range or int")
    return given
