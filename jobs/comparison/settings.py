"""The settings of a job file by dotted key, and which of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import BaseModel, JsonValue
from pydantic_core import PydanticUndefined, to_jsonable_python

from jobs.comparison.answer import GroupName
from jobs.spec import JobSpec

_LABELS = ("name", "metadata", "priority", "integrations")
_GROUPS: dict[str, GroupName] = {
    "data": "data", "model": "model", "method.base_dtype": "model",
    "method.adapter_dtype": "model", "memory": "memory", "resources": "gpu",
}  # fmt: skip
"""By the beginning of a key; all others are `training`."""


@dataclass(frozen=True)
class JobSetting:
    """A key of one job."""

    value: JsonValue
    default: JsonValue
    """What the key is where it is left out; null for one that has to be set."""


def settings_of(spec: JobSpec) -> dict[str, JobSetting]:
    """Every key that this job has: of `method: full`, for one, none of LoRA's."""
    return dict(_leaves(spec, ""))


def differing_settings(specs: Sequence[JobSpec]) -> tuple[dict[str, list[JsonValue]], int]:
    """Values of each job by key, where they differ; and how many other keys there are, labels aside.

    A key that one job does not have, and that has its default in all others, is no difference: the one that brought it
    (`method.type`) is.
    """
    every = [settings_of(spec) for spec in specs]
    found: dict[str, list[JsonValue]] = {}
    equal = 0
    for key in dict.fromkeys(key for settings in every for key in settings):
        having = [settings[key] for settings in every if key in settings]
        values = [settings[key].value if key in settings else having[0].default for settings in every]
        if any(value != values[0] for value in values):
            found[key] = [settings[key].value if key in settings else None for settings in every]
        elif not is_label(key):
            equal += 1
    return found, equal


def is_label(key: str) -> bool:
    """Whether it says nothing about the model that comes of the job."""
    return key.partition(".")[0] in _LABELS


def group_of(key: str) -> GroupName:
    """Where a difference of the job file belongs that is no label."""
    return _GROUPS.get(key) or _GROUPS.get(key.partition(".")[0], "training")


def _leaves(part: BaseModel, prefix: str) -> Iterator[tuple[str, JobSetting]]:
    for name, field in type(part).model_fields.items():
        key, value = f"{prefix}{name}", getattr(part, name)
        default = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            if type(None) in get_args(field.annotation):  # null switches it off (`integrations.wandb`)
                yield key, JobSetting(True, None)
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, dict):
            yield from ((f"{key}.{each}", JobSetting(text, None)) for each, text in value.items())
        else:
            plain = None if default is PydanticUndefined else to_jsonable_python(default)
            yield key, JobSetting(to_jsonable_python(value), plain)
