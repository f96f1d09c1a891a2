"""Text from elsewhere (rows, names, errors, a trainer's output) as a person may read it.

What a terminal obeys is taken out: the control characters C0 and C1 with ESC among them, and what reorders or breaks a
line (bidirectional marks, embeddings, overrides and isolates; separators of lines and paragraphs). Newlines and tabs
stay. Records and files keep the text as it is.
"""

from __future__ import annotations

import re
from typing import Any

_REORDERING = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROL = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_REORDERING}]")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_RETURN = re.compile("\r\n?")
_UNESCAPED = re.compile(f"[\x7f-\x9f{_REORDERING}\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without what a terminal obeys; a carriage return ends a line."""
    return _RETURN.sub("\n", without_controls(text))


def without_controls(text: str) -> str:
    """`printable`, with carriage returns as they are: the lines of progress bars end with them."""
    return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub("", text))


def one_line(text: str) -> str:
    """`printable`, on one line."""
    return printable(text).replace("\n", " ")


def printable_document(document: Any) -> Any:
    """A JSON document with each text in it, names as well, `printable`."""
    match document:
        case str():
            return printable(document)
        case dict():
            return {printable(name): printable_document(value) for name, value in document.items()}
        case list():
            return [printable_document(value) for value in document]
        case _:
            return document


def escaped(json_text: str) -> str:
    """JSON that means the same, with `\\u…` for what a terminal obeys and JSON leaves as it is."""
    if json_text.isascii() and "\x7f" not in json_text:  # most are, and this is found out ten times as fast
        return json_text
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", json_text)
