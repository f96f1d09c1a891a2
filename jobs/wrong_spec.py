"""What is wrong with a specification, in a user's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from pydantic import ValidationError

from jobs.errors import UserError

KEYS_OF_A_JOB = "docs/reference/job.md lists the keys of a job"


def explain(error: ValidationError, *, keys: str = KEYS_OF_A_JOB) -> UserError:
    """The first error, an unknown key before all others: its dotted key, the value, and what it may be.

    `keys` says which keys there are.
    """
    found = error.errors(include_url=False)
    # What a misspelt key leaves missing is not the user's mistake: the misspelt one is.
    first = next((entry for entry in found if entry["type"] == "extra_forbidden"), found[0])
    others = [entry for entry in found if entry is not first]
    # Tags of union members ("literal['auto']", "constrained-float") are not part of the key the user wrote.
    names = [str(part) for part in first["loc"] if re.fullmatch(r"[\w.\- ]+", str(part)) and not _is_union_tag(part)]
    param = ".".join(names) or None
    message = first["msg"].removeprefix("Value error, ")
    hint = None
    if first["type"] == "extra_forbidden":
        missing = [str(entry["loc"][-1]) for entry in others if entry["type"] == "missing"]
        near = get_close_matches(str(first["loc"][-1]), missing, n=1)
        message, hint = "unknown key", f"did you mean {near[0]}? {keys}" if near else keys
    elif first["type"] == "missing":
        message = "is required"
    else:
        alternatives = {
            entry["msg"].removeprefix("Value error, ")
            for entry in others
            if entry["loc"][: len(names)] == first["loc"][: len(names)]
        }
        message = "; or: ".join([message, *sorted(alternatives - {message})])
        if not isinstance(first["input"], Mapping):
            message += f" (got {shorten(first['input'])})"
    return UserError(f"{param}: {message}" if param else message, param=param, hint=hint)


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
