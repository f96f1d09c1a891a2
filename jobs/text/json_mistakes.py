"""What is wrong with text that is not JSON, in words of JSON instead of the parser's."""

from __future__ import annotations

import json


def json_mistake(error: json.JSONDecodeError) -> str:
    """Such as `an extra comma before } at line 3, column 14`: the place of the mistake, both counted from 1."""
    place = error.pos
    if error.msg.startswith("Expecting") and error.doc[place : place + 1] in ("}", "]"):
        place = len(error.doc[:place].rstrip()) - 1  # Python 3.13 says itself that it is the comma
    bracket = error.doc[place + 1 :].lstrip()[:1] if error.doc[place : place + 1] == "," else ""
    if bracket not in ("}", "]"):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    line, column = error.doc.count("\n", 0, place) + 1, place - error.doc.rfind("\n", 0, place)
    return f"an extra comma before {bracket} at line {line}, column {column}"
