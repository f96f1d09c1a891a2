"""From a row to the two texts a model sees: templates over columns, checks, normalisation.

What a row can be set aside for is in `Defect`'s message, a short stable phrase such as "missing ingredients".
"""

from __future__ import annotations

import hashlib
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.errors import BadData, Refused
from worker.training.rows.characters import Rewriter

RECIPE_INPUT = "Write the directions. {title}: {ingredients}"
RECIPE_TARGET = "{directions}"
RECIPE_COLUMNS = frozenset({"title", "ingredients", "directions"})

# Tab, newline and carriage return are white space to every tokenizer; the others are damage.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SENTENCE_END = (".", "!", "?")
_NOT_ALPHANUMERIC = bytes(code for code in range(128) if not chr(code).isalnum())
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}|#\d{2,6});")
ODDITIES: Mapping[str, Callable[[str], bool]] = {
    "newlines": lambda text: "\n" in text,  # T5 and many others read them as spaces
    "replacement characters (U+FFFD)": lambda text: "\ufffd" in text,
    "HTML tags": lambda text: "<" in text and _TAG.search(text) is not None,
    "HTML entities": lambda text: "&" in text and _ENTITY.search(text) is not None,
}
"""What may be wrong with a text and is for its owner to judge: kept as it is, and counted."""


class Defect(Exception):
    """Why a row is set aside."""


@dataclass(frozen=True)
class Template:
    """A text with holes, e.g. `"{title}: {ingredients}"`: literals[0] column[0] literals[1] … literals[-1]."""

    source: str
    literals: tuple[str, ...]
    columns: tuple[str, ...]

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text for one row. Raises Defect where a column is missing, empty or not text."""
        parts = [self.literals[0]]
        for column, literal in zip(self.columns, self.literals[1:], strict=True):
            parts += (_column_text(row, column), literal)
        return "".join(parts)


@dataclass(frozen=True)
class Texts:
    """The two texts of a row."""

    input: str
    target: str

    @property
    def key(self) -> int:
        """The first 64 bits of the hash of both: equal rows have equal keys."""
        return _hash64(f"{self.input}\0{self.target}".encode())

    @property
    def split_key(self) -> int:
        """The same of the input's letters and digits: rows whose inputs differ only in case, accents, spaces or
        punctuation have equal ones, and go to the same side of a split."""
        return _hash64(letters_and_digits(self.input))


class RowReader:
    """Turns rows into `Texts`. Counts the characters it rewrote, and rows with something odd that they keep."""

    def __init__(self, input: Template, target: Template, rewrite: Rewriter | None) -> None:
        self._templates = (input, target)
        self._rewrite = rewrite
        self.normalised: Counter[str] = Counter()
        self.noticed: Counter[str] = Counter()

    def read(self, columns: Mapping[str, Any]) -> Texts:
        """The texts of one row. Raises Defect."""
        input, target = (self._text(template, columns) for template in self._templates)
        for oddity, found_in in ODDITIES.items():
            if found_in(input) or found_in(target):
                self.noticed[oddity] += 1
        return Texts(input, target)

    def _text(self, template: Template, columns: Mapping[str, Any]) -> str:
        text = template.fill(columns)
        if not text.isprintable() and (damage := _CONTROL.search(text)):
            raise Defect(f"control character U+{ord(damage.group()):04X}")
        text = (text if self._rewrite is None else self._rewrite(text, self.normalised)).strip()
        if not text:
            raise Defect(f"empty {' and '.join(template.columns)}")
        if not text.isascii() and _half_a_character(text):
            raise Defect("half a surrogate pair")
        return text


def letters_and_digits(text: str) -> bytes:
    """A text without case, accents, spaces and punctuation; all of it where it has no letter or digit."""
    if text.isascii():
        bare = text.lower().encode().translate(None, _NOT_ALPHANUMERIC)
    else:
        bare = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold())).encode()
    return bare or text.encode()


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


def _column_text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        raise Defect(f"missing {column}")
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = _list_in(value)
    text = _join(value, column) if isinstance(value, list) else _plain_text(value, column)
    if not text or text.isspace():
        raise Defect(f"empty {column}")
    return text


def _list_in(text: str) -> str | list[str]:
    """The list of texts that a text is, written as JSON: the way lists are kept in CSV (RecipeNLG's, for one)."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return items if items and all(isinstance(item, str) for item in items) else text


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


def _half_a_character(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _hash64(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
