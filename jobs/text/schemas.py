"""What a JSON schema says of its fields, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
REQUIRED = "required"
_EVERY_TYPE = {"string", "integer", "number", "boolean", "array", "object", "null"}


@dataclass(frozen=True)
class Key:
    """A key of a document."""

    name: str
    """Dotted."""
    values: str
    """Type and range of its values."""
    default: str
    """JSON; or REQUIRED."""
    meaning: str
    holds_keys: bool


def keys(fields: Mapping[str, Schema], defs: Mapping[str, Schema], prefix: str = "") -> Iterator[Key]:
    """These fields, and those of the objects that they hold."""
    for name, field in fields.items():
        inner = part(field, defs)
        default = json.dumps(field["default"], ensure_ascii=False) if "default" in field else REQUIRED
        meaning = field.get("description") or (inner or {}).get("description", "")
        yield Key(f"{prefix}{name}", values(field), default, line(meaning), inner is not None)
        if inner:
            yield from keys(inner["properties"], defs, f"{prefix}{name}.")
        if item := _item(field, defs):
            yield from keys(item["properties"], defs, f"{prefix}{name}[].")


def part(field: Schema, defs: Mapping[str, Schema]) -> Schema | None:
    """The object that a key holds, or what several kinds of it have together; None where it holds a value."""
    objects = [object_of(kind, defs) for kind in kinds(field) if "$ref" in kind]
    return _together(objects) if len(objects) > 1 else next(iter(objects), None)


def _together(objects: list[Schema]) -> Schema:
    """One object with the fields of all, which their `type` tells apart."""
    fields: Schema = {}
    for each in objects:
        for name, field in each["properties"].items():
            if name in fields:
                fields[name] = {**fields[name], "anyOf": [*kinds(fields[name]), field]}
            else:
                fields[name] = field
    meanings = [f"`{each['properties']['type']['const']}`: {each['description']}" for each in objects]
    return {"description": " ".join(meanings), "properties": fields}


def _item(field: Schema, defs: Mapping[str, Schema]) -> Schema | None:
    """The object that each item of a list is."""
    items = [kind["items"] for kind in kinds(field) if "items" in kind]
    return next((object_of(item, defs) for item in items if "$ref" in item), None)


def object_of(reference: Schema, defs: Mapping[str, Schema]) -> Schema:
    """The object that a `$ref` names."""
    return defs[reference["$ref"].rpartition("/")[2]]


def kinds(field: Schema) -> list[Schema]:
    """What a value may be."""
    return [*field.get("anyOf", []), *field.get("oneOf", [])] or [field]


def values(field: Schema, *, links: bool = False) -> str:
    """The type and range of a value, such as: integer, 1 to 64. `links`: objects are named, each with a heading."""
    if len(several := kinds(field)) > 1:
        if {kind.get("type") for kind in several} >= _EVERY_TYPE:
            return "anything"
        return " or ".join(dict.fromkeys(values(kind, links=links) for kind in several))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if links else "object"
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "type" not in field:
        return "anything"
    if field["type"] == "array":
        return f"list of {values(field['items'], links=links)}"
    return f"{field['type']}{_range(field)}"


def _range(field: Schema) -> str:
    if "minimum" in field and "maximum" in field:
        return f", {_number(field['minimum'])} to {_number(field['maximum'])}"
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    text = " and ".join(f"{sign} {_number(field[bound])}" for bound, sign in words.items() if bound in field)
    if "pattern" in field:
        text = f"matching `{field['pattern']}`"
    elif "maxLength" in field:
        text = f"{field.get('minLength', 0)} to {field['maxLength']:,} characters"
    return f", {text}" if text else ""


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def line(text: str) -> str:
    """A docstring in one line."""
    return " ".join(text.split())
