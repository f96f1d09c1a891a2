"""What is wrong with a specification, in a user's words: all of it at once."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from jobs.errors import UserError

KEYS_OF_A_JOB = "docs/reference/job.md lists the keys of a job"
UNKNOWN, MISSING = "extra_forbidden", "missing"
LISTED, LONGEST = 20, 200
"""Errors that are named; characters of a key."""
_IN_JSON = {
    "model_type": "must be an object", "dict_type": "must be an object", "list_type": "must be an array",
    "string_type": "must be a string", "int_type": "must be an integer", "float_type": "must be a number",
    "bool_type": "must be true or false", MISSING: "is required", UNKNOWN: "unknown key",
}  # fmt: skip
"""By pydantic's type of error, where its words are Python's."""


def explain(error: ValidationError, model: type[BaseModel], *, keys: str = KEYS_OF_A_JOB) -> UserError:
    """Every error, unknown keys before all others: the dotted key, the value, and what it may be.

    `model`: what was validated. `keys` says which keys there are.
    """
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for entry in error.errors(include_url=False):
        by_key.setdefault(_key(entry["loc"]), []).append(entry)
    unknown = [key for key, entries in by_key.items() if entries[0]["type"] == UNKNOWN]
    meant = {key: _nearest(key, model, by_key) for key in unknown[:LISTED]}
    # What a misspelt key leaves missing is not the user's mistake: the misspelt one is.
    excused = {(*key[:-1], near) for key, near in meant.items()}
    wrong = [*unknown, *(
        key for key, entries in by_key.items()
        if entries[0]["type"] != UNKNOWN and not (entries[0]["type"] == MISSING and key in excused)
    )]  # fmt: skip
    texts = [
        f"{'.'.join(key)[:LONGEST]}: {text}" if key else text
        for key in wrong[:LISTED]
        for text in [_said(by_key[key], meant.get(key))]
    ]
    param = ".".join(wrong[0])[:LONGEST] or None
    if len(wrong) == 1:
        near = meant.get(wrong[0])
        hint = (f"did you mean {near}? {keys}" if near else keys) if unknown else None
        return UserError(texts[0].partition("; did you mean")[0], param=param, hint=hint)
    head = f"{len(wrong)} errors" + (f", the first {LISTED} of them:" if len(wrong) > LISTED else ":")
    message = "\n".join([head, *(f"- {text}" for text in texts)])
    return UserError(message, param=param, hint=keys if unknown else None)


def _key(place: Sequence[int | str]) -> tuple[str, ...]:
    """As the user wrote it: without the tags of union members ("literal['auto']", "constrained-float")."""
    return tuple(str(part) for part in place if re.fullmatch(r"[\w.\- ]+", str(part)) and not _is_union_tag(part))


def _said(entries: list[Any], near: str | None) -> str:
    """Of one key."""
    first = entries[0]
    texts = [_IN_JSON.get(entry["type"]) or _in_our_words(entry["msg"]) for entry in entries]
    if first["type"] == UNKNOWN:
        return f"{texts[0]}; did you mean {near}?" if near else texts[0]
    if first["type"] == MISSING:
        return texts[0]
    text = "; or: ".join([texts[0], *sorted({*texts} - {texts[0]})])
    return text if isinstance(first["input"], Mapping) else f"{text} (got {shorten(first['input'])})"


def _in_our_words(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Input should be ", "must be ")


def _nearest(key: tuple[str, ...], model: type[BaseModel], wrong: Mapping[tuple[str, ...], list[Any]]) -> str | None:
    """The key that was meant by one that there is not: a required one that is missing before all others."""
    if not key:
        return None
    legal = _keys_of(model, key[:-1])
    missing = [name for name in legal if wrong.get((*key[:-1], name), [{"type": None}])[0]["type"] == MISSING]
    near = get_close_matches(key[-1], missing, n=1) or get_close_matches(key[-1], legal, n=1)
    return near[0] if near else None


def _keys_of(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the object at this path."""
    for name in path:
        field = model.model_fields.get(name)
        inner = [] if field is None else [field.annotation, *typing.get_args(field.annotation)]
        models = [each for each in inner if isinstance(each, type) and issubclass(each, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and part in {
        "float",
        "int",
        "str",
        "bool",
        "constrained-str",
        "constrained-int",
        "constrained-float",
    }


def shorten(value: object) -> str:
    """Its repr, in 80 characters at most."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
