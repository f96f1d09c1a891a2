"""From a row to the two texts a model sees: templates over columns, checks, normalisation.

What a row can be set aside for is in `Defect`'s message, a short stable phrase such as "missing ingredients".
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from jobs.errors import BadData, Refused

RECIPE_INPUT = "Write the directions. {title}: {ingredients}"
RECIPE_TARGET = "{directions}"
RECIPE_COLUMNS = frozenset({"title", "ingredients", "directions"})

_VULGAR = {
    "¼": "1/4", "½": "1/2", "¾": "3/4", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10", "⅓": "1/3", "⅔": "2/3",
    "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8",
    "⅝": "5/8", "⅞": "7/8", "⅟": "1/", "↉": "0/3",
}  # fmt: skip
_PLAIN = {
    "⁄": "/", "∕": "/", "‘": "'", "’": "'", "‚": "'", "‛": "'", "′": "'", "“": '"', "”": '"', "„": '"',
    "‟": '"', "″": '"', "‐": "-", "‑": "-", "‒": "-", "–": "-", "―": "-", "−": "-", "…": "...",
    "\u00ad": "", "\u200b": "", "\u2060": "", "\ufeff": "",  # soft hyphen, zero width
    "\u00a0": " ", "\u2007": " ", "\u2009": " ", "\u200a": " ", "\u202f": " ", "\u2028": " ", "\u2029": " ",
}  # fmt: skip
_EM_DASH = "—"
_ODD = re.compile("[" + "".join([*_VULGAR, *_PLAIN, _EM_DASH]) + "]")
# Tab, newline and carriage return are white space to every tokenizer; the others are damage.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SENTENCE_END = (".", "!", "?")


class Defect(Exception):
    """Why a row is set aside."""


@dataclass(frozen=True)
class Template:
    """A text with holes, e.g. `"{title}: {ingredients}"`: literals[0] column[0] literals[1] … literals[-1]."""

    source: str
    literals: tuple[str, ...]
    columns: tuple[str, ...]

    def fill(self, row: dict[str, Any]) -> str:
        """The text for one row. Raises Defect where a column is missing, empty or not text."""
        parts = [self.literals[0]]
        for column, literal in zip(self.columns, self.literals[1:], strict=True):
            parts += (_column_text(row, column), literal)
        return "".join(parts)


@dataclass(frozen=True)
class Texts:
    """The two texts of a row, and the first 64 bits of the hash of both: equal rows have equal keys."""

    input: str
    target: str
    key: int


class RowReader:
    """Turns lines into `Texts`, and counts the characters it rewrote."""

    def __init__(self, input: Template, target: Template, normalise: bool) -> None:
        self._templates = {"input": input, "target": target}
        self._normalise = normalise
        self.normalised: Counter[str] = Counter()

    def read(self, line: str) -> Texts:
        """The texts of one JSON line. Raises Defect."""
        row = parse_row(line)
        texts = {name: self._text(template, row) for name, template in self._templates.items()}
        try:
            both = "\0".join(texts.values()).encode()
        except UnicodeEncodeError:
            raise Defect("half a surrogate pair") from None
        key = int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "little")
        return Texts(texts["input"], texts["target"], key)

    def _text(self, template: Template, row: dict[str, Any]) -> str:
        text = template.fill(row)
        if damage := _CONTROL.search(text):
            raise Defect(f"control character U+{ord(damage.group()):04X}")
        text = (normalise(text, self.normalised) if self._normalise else text).strip()
        if not text:
            raise Defect(f"empty {' and '.join(template.columns)}")
        return text


def parse_row(line: str) -> dict[str, Any]:
    """The JSON object on a line. Raises Defect."""
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Defect("bad JSON") from None
    if not isinstance(row, dict):
        raise Defect("not a JSON object")
    return row


def normalise(text: str, counts: Counter[str]) -> str:
    """Vulgar fractions and typographic characters in plain ones (½ → 1/2, 1½ → 1 1/2); `counts` goes up per character.

    Not NFKC: that would write 1½ as 11⁄2, and ⁄ is unknown to T5.
    """
    if text.isascii():
        return text

    def plain(found: re.Match[str]) -> str:
        character, before, after = found.group(), found.string[: found.start()][-1:], found.string[found.end() :][:1]
        counts[character] += 1
        if character in _VULGAR:
            return (" " if before.isdigit() else "") + _VULGAR[character]
        if character == _EM_DASH:
            return (" " if before.strip() else "") + "-" + (" " if after.strip() else "")
        return _PLAIN[character]

    return _ODD.sub(plain, text)


def template(text: str, param: str) -> Template:
    """A column name or a template as written in a job. Raises Refused (`bad_template`)."""
    if "{" not in text and "}" not in text:
        return Template("{" + text + "}", ("", ""), (text,))
    literals, columns = [""], []
    try:
        for literal, column, form, conversion in string.Formatter().parse(text):
            literals[-1] += literal
            if column is None:
                continue
            if not column or form or conversion:
                raise ValueError("braces hold a column's name and nothing else")
            columns.append(column)
            literals.append("")
        if not columns:
            raise ValueError("it names no column")
    except ValueError as error:
        raise Refused(
            f"{param} = {text!r}: {error}",
            code="bad_template",
            param=param,
            hint='write a column\'s name, or text with names in braces such as "{title}: {ingredients}"; {{ is a brace',
        ) from None
    return Template(text, tuple(literals), tuple(columns))


def choose_templates(input: str | None, target: str | None, columns: Collection[str]) -> tuple[Template, Template]:
    """The templates of a job: those it names, else recognised by the columns of the data.

    Raises BadData (`unknown_column`, `no_usable_columns`), Refused (`bad_template`).
    """
    found = ", ".join(sorted(columns)[:50]) or "none"
    if input is not None and target is not None:
        chosen = template(input, "data.input"), template(target, "data.target")
        for param, one in zip(("data.input", "data.target"), chosen, strict=True):
            for column in one.columns:
                if column not in columns:
                    raise BadData(
                        f"{param}: no row has a column {column!r}; there are: {found}",
                        code="unknown_column",
                        param=param,
                        hint="name one of these columns, or a template over them with the names in braces",
                    )
        return chosen
    if "input" in columns and "target" in columns:
        return template("input", "data.input"), template("target", "data.target")
    if RECIPE_COLUMNS.issubset(columns):
        return template(RECIPE_INPUT, "data.input"), template(RECIPE_TARGET, "data.target")
    raise BadData(
        f"no columns to learn from are recognised; the data has: {found}",
        code="no_usable_columns",
        param="data.input",
        hint='say which: data.input and data.target, each a column\'s name or a template such as "Answer: {question}"; '
        "without them, columns input and target, or title, ingredients and directions, are recognised",
    )


def _column_text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        raise Defect(f"missing {column}")
    text = _join(value, column) if isinstance(value, list) else _plain_text(value, column)
    if not text or text.isspace():
        raise Defect(f"empty {column}")
    return text


def _join(items: list[Any], column: str) -> str:
    """A list as one text: sentences with spaces between, other things with semicolons; blank items are passed over."""
    texts = [text for text in (_plain_text(item, column).strip() for item in items) if text]
    sentences = 2 * sum(text.endswith(_SENTENCE_END) for text in texts) > len(texts)
    return (" " if sentences else "; ").join(texts)


def _plain_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise Defect(f"wrong type in {column}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
