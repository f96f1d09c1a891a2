"""The form of a new job: a field for each key, as the JSON schema of `JobSpec` tells of it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from jobs.spec import JobSpec
from jobs.text.schemas import REQUIRED, Schema, kinds, line, object_of, part, values

LONG = 1024
"""Characters from which on a text is given more than one line."""
_SETTING = r"""--set (?:'[^']*'|"[^"]*"|[\w@%+=:,./-])+"""  # a word as shlex.quote writes it
_SETTINGS = re.compile(rf"(?P<verb>\b[Aa]dd )?(?P<settings>{_SETTING}(?: {_SETTING})*)")
_DISCRETE = {"boolean", "null"}


@dataclass(frozen=True)
class Switch:
    """Another field that decides whether one counts."""

    key: str
    value: str
    """JSON: what it must be."""


@dataclass(frozen=True)
class Field:
    """One key of a job. What is left empty has its default."""

    key: str
    """Dotted."""
    meaning: str
    values: str
    """For people: type and range."""
    default: str
    """JSON; REQUIRED where there is none."""
    choices: tuple[str, ...]
    """JSON of all values that it can have; empty: it is typed."""
    types: tuple[str, ...]
    """Types of JSON that it takes."""
    long: bool
    """Whether it may have several lines."""
    switch: Switch | None
    """None: it always counts."""

    @property
    def label(self) -> str:
        """Its last name in words."""
        return self.key.rpartition(".")[2].replace("_", " ")

    @property
    def keyboard(self) -> Literal["text", "decimal", "numeric"]:
        """What a phone shows for it."""
        if not {"integer", "number"} & {*self.types} or "string" in self.types or "-" in self.values:
            return "text"  # a phone's numbers have no minus
        return "decimal" if "number" in self.types else "numeric"


@dataclass(frozen=True)
class FieldGroup:
    """Fields that belong together."""

    name: str
    meaning: str
    fields: tuple[Field, ...]


@cache
def groups() -> tuple[FieldGroup, ...]:
    """All fields: those of the job itself, then those of each part."""
    schema = JobSpec.model_json_schema()
    properties, defs = schema["properties"], schema["$defs"]
    own = {name: field for name, field in properties.items() if part(field, defs) is None}
    found = [FieldGroup("job", line(schema["description"]), tuple(_fields(own, defs)))]
    for name, field in properties.items():
        if (inner := part(field, defs)) is not None:
            meaning = line(field.get("description") or inner["description"])
            found.append(FieldGroup(name, meaning, tuple(_fields({name: field}, defs))))
    return tuple(found)


@cache
def fields() -> Mapping[str, Field]:
    """All of them, by key."""
    return {field.key: field for group in groups() for field in group.fields}


def _fields(
    properties: Mapping[str, Schema], defs: Mapping[str, Schema], prefix: str = "", switch: Switch | None = None
) -> Iterator[Field]:
    for name, schema in properties.items():
        key = prefix + name
        objects = [object_of(kind, defs) for kind in kinds(schema) if "$ref" in kind]
        if len(objects) > 1:  # told apart by their type
            types = [json.dumps(each["properties"]["type"]["const"]) for each in objects]
            by_type = dict(zip(types, objects, strict=True))
            meaning = " ".join(f"`{kind[1:-1]}`: {each['description']}" for kind, each in by_type.items())
            default = json.dumps(schema["default"]["type"])
            yield _field(f"{key}.type", {"description": meaning}, default, tuple(types), switch)
            for kind, each in by_type.items():
                rest = {name: field for name, field in each["properties"].items() if name != "type"}
                yield from _fields(rest, defs, f"{key}.", Switch(f"{key}.type", kind))
        elif objects and any(kind.get("type") == "boolean" for kind in kinds(schema)):  # can be switched off
            on = "false" if schema.get("default") is None else "true"
            yield _field(key, schema, on, ("true", "false"), switch)
            yield from _fields(objects[0]["properties"], defs, f"{key}.", Switch(key, "true"))
        elif objects:
            yield from _fields(objects[0]["properties"], defs, f"{key}.", switch)
        else:
            default = json.dumps(schema["default"], ensure_ascii=False) if "default" in schema else REQUIRED
            yield _field(key, schema, default, tuple(_choices(schema)), switch)


def _field(key: str, schema: Schema, default: str, choices: tuple[str, ...], switch: Switch | None) -> Field:
    types = tuple(dict.fromkeys(kind["type"] for kind in kinds(schema) if "type" in kind))
    long = any(kind.get("type") in ("array", "object") or kind.get("maxLength", 0) > LONG for kind in kinds(schema))
    shown = ", ".join(choices) if choices else values(schema).replace("`", "")
    return Field(key, line(schema.get("description", "")), shown, default, choices, types, long, switch)


def _choices(schema: Schema) -> list[str]:
    """JSON of all values; none where there are more than can be listed."""
    found: list[str] = []
    for kind in kinds(schema):
        if "const" in kind or "enum" in kind:
            found += [json.dumps(value) for value in kind.get("enum", [kind.get("const")])]
        elif kind.get("type") in _DISCRETE:
            found += ["null"] if kind["type"] == "null" else ["true", "false"]
        else:
            return []
    return found


def in_fields(text: str) -> str:
    """A hint in the words of the page: `Add --set data.input=body` becomes `Set data.input = body`."""
    return _SETTINGS.sub(_settings, text)


def _settings(found: re.Match[str]) -> str:
    verb = {"Add ": "Set ", "add ": "set "}.get(found["verb"] or "", "")
    try:
        words = shlex.split(found["settings"])
    except ValueError:  # no hint of ours, but what somebody wrote
        return found[0]
    *before, last = (each.replace("=", " = ", 1) for each in words if each != "--set")
    return verb + (f"{', '.join(before)} and {last}" if before else last)


def filled_in(spec: JobSpec) -> dict[str, str]:
    """What to write into the fields, by key, for this job: those that differ from their defaults."""
    given = spec.model_dump(mode="json", exclude_defaults=True)
    found = {}
    for key, field in fields().items():
        place: object = given
        for name in key.split("."):
            place = place.get(name, REQUIRED) if isinstance(place, dict) else REQUIRED
        if place is None and field.choices == ("true", "false"):
            place = False  # a part that is switched off
        if isinstance(place, dict) and field.choices == ("true", "false"):
            place = True  # a part that is switched on
        if place is REQUIRED or (isinstance(place, dict) and field.choices):
            continue
        text = place if isinstance(place, str) and not field.choices else json.dumps(place, ensure_ascii=False)
        if text != field.default:
            found[key] = text
    return found


def changes(before: JobSpec, after: JobSpec) -> list[tuple[str, str, str]]:
    """Fields in which two jobs differ: key, value before, value after."""
    old, new = filled_in(before), filled_in(after)
    differing = [key for key in fields() if old.get(key) != new.get(key)]
    return [(key, old.get(key, fields()[key].default), new.get(key, fields()[key].default)) for key in differing]
