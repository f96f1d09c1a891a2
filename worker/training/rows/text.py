"""From a row to the two texts a model sees: templates over columns, checks, normalization.

`Defect`'s message says why a row is rejected, in a short stable phrase such as "missing ingredients".
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.errors import Rejected
from worker.training.rows.characters import Rewriter
from worker.training.rows.row_counts import RowCounts

# Tab, newline and carriage return are white space to every tokenizer; the others are damage.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_PATH = re.compile(r"([^.\[\]]+)((?:\.[^.\[\]]+|\[-?\d{1,9}\])*)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(-?\d+)\]")
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
ASSISTANT = "assistant"
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), ASSISTANT)
"""Other names of roles."""
CHAT_FIELDS = ("prompt", "completion")
"""What a list of turns has, beside its items."""
_EXAMPLE = 200
"""Characters of an example."""
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
"""What may be wrong with a text, for its owner to judge: the text is kept, and counted."""


class Defect(Exception):
    """Why a row is rejected."""


Joined = tuple[str, list[Any], str]
"""Name of a column, the list in it, and the text that it became."""


@dataclass(frozen=True)
class Placeholder:
    """What braces hold: a column, or a path into one such as `messages[0].content`; with `?` behind it, optional."""

    text: str
    """As written. A column of exactly that name is meant first, whatever is in it."""
    name: str
    """Without the question mark."""
    column: str
    path: tuple[str | int, ...]
    """From the column's value on; empty: that value."""
    optional: bool
    """Whether a row may lack it."""

    @classmethod
    def parse(cls, text: str) -> Placeholder:
        """Any text; one that is no path is a column's name."""
        name = text.removesuffix("?") or text
        parts = _PATH.fullmatch(name)
        steps = _STEP.findall(parts[2]) if parts else []
        path = tuple(key or int(index) for key, index in steps)
        return cls(text, name, parts[1] if parts else name, path, optional=text != name)

    @property
    def columns(self) -> set[str]:
        """Names of the columns that may be meant."""
        return {self.text, self.name, self.column}

    def value(self, row: Mapping[str, Any]) -> Any:
        """What the row has there; None: nothing."""
        if self.text in row:
            return row[self.text]
        if self.name in row:
            return row[self.name]
        value = row.get(self.column) if self.path else None
        for step in self.path:
            if isinstance(step, int):
                value = value[step] if isinstance(value, list) and -len(value) <= step < len(value) else None
            elif isinstance(value, list):
                value = chat_field(value, step)
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value


@dataclass(frozen=True)
class Template:
    """A text with placeholders, e.g. `"{title}: {ingredients}"`: literals[0] placeholders[0] literals[1] …"""

    source: str
    literals: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]

    @property
    def columns(self) -> set[str]:
        """Names of the columns that it may take."""
        return {column for one in self.placeholders for column in one.columns}

    def fill(self, row: Mapping[str, Any], joined: list[Joined] | None = None) -> str:
        """The text for one row; lists that had to be joined go to `joined`.

        An optional placeholder without a value is left out together with the text before it; at the beginning of the
        template, with the text after it. Raises Defect if any other value is missing, empty or not text.
        """
        parts: list[str] = []
        before = self.literals[0]
        for one, after in zip(self.placeholders, self.literals[1:], strict=True):
            value = one.value(row)
            if one.optional and _is_missing(value):
                value = ""
            text = _join(value, one.name) if isinstance(value, list) else _plain_text(value, one.name)
            if not text or text.isspace():
                if not one.optional:
                    raise Defect(f"empty {one.name}")
                before = after if before or parts else ""
                continue
            if joined is not None and isinstance(value, list):
                joined.append((one.name, value, text))
            parts += (before, text)
            before = after
        return "".join((*parts, before))


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
    """Turns rows into `Texts`. Counts what it rewrote, and rows with something odd that they keep."""

    def __init__(self, input: Template, target: Template, rewrite: Rewriter | None) -> None:
        self._templates = (input, target)
        self._columns = {one.name for template in self._templates for one in template.placeholders}
        self._rewrite = rewrite
        self.normalized: Counter[str] = Counter()
        self.noticed: Counter[str] = Counter()
        self.rewritten: Counter[str] = Counter()
        """Texts that are not as they stood in the row, by what was done, among rows that can be used."""
        self.examples: dict[str, list[str]] = {}
        """Of each of these the first: before and after."""

    def counts(self) -> RowCounts:
        """Its counts, which grow as it reads."""
        return RowCounts(
            normalized=self.normalized, noticed=self.noticed, rewritten=self.rewritten, examples=self.examples
        )

    def read(self, columns: Mapping[str, Any]) -> Texts:
        """The texts of one row. Raises Defect."""
        joined: list[Joined] = []
        changed: list[tuple[str, str]] = []
        input, target = (self._text(template, columns, joined, changed) for template in self._templates)
        for column, items, text in joined:
            self._count(f"list in {column} joined", items, text)
        for before, after in changed:
            self._count("characters rewritten", before, after)
        for column in self._columns:
            if list_in(columns.get(column)) is not None:
                self.noticed[f"a JSON array as the text of {column}"] += 1
        for oddity, found_in in ODDITIES.items():
            if found_in(input) or found_in(target):
                self.noticed[oddity] += 1
        return Texts(input, target)

    def _count(self, what: str, before: str | list[Any], after: str) -> None:
        self.rewritten[what] += 1
        if what not in self.examples:
            text = before if isinstance(before, str) else json.dumps(before, ensure_ascii=False)
            self.examples[what] = [text[:_EXAMPLE], after[:_EXAMPLE]]

    def _text(
        self, template: Template, columns: Mapping[str, Any], joined: list[Joined], changed: list[tuple[str, str]]
    ) -> str:
        text = template.fill(columns, joined)
        if not text.isprintable() and (damage := _CONTROL.search(text)):
            raise Defect(f"control character U+{ord(damage.group()):04X}")
        if self._rewrite is not None and (rewritten := self._rewrite(text, self.normalized)) != text:
            changed.append((text, rewritten))
            text = rewritten
        text = text.strip()
        if not text:
            raise Defect(f"empty {' and '.join(one.name for one in template.placeholders)}")
        if not text.isascii() and _half_a_character(text):
            raise Defect("half a surrogate pair")
        return text


def letters_and_digits(text: str) -> bytes:
    """A text without case, accents, spaces and punctuation; the whole text if it has no letter or digit."""
    if text.isascii():
        bare = text.lower().encode().translate(None, _NOT_ALPHANUMERIC)
    else:
        bare = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold())).encode()
    return bare or text.encode()


def template(text: str, param: str) -> Template:
    """A column name or a template as written in a job. Raises Rejected (`bad_template`)."""
    if "{" not in text and "}" not in text:
        text = "{" + text + "}"
    literals, placeholders, fault = [""], [], ""
    for piece in _PIECE.finditer(text):
        if piece[0] in ("{{", "}}"):
            literals[-1] += piece[0][0]
        elif piece[1]:
            placeholders.append(Placeholder.parse(piece[1]))
            literals.append("")
        elif piece[0] in ("{", "}", "{}"):
            fault = fault or f"{piece[0]!r} at character {piece.start() + 1} holds no column's name"
        else:
            literals[-1] += piece[0]
    if fault or not placeholders:
        raise Rejected(
            f"{param} = {text!r}: {fault or 'it names no column'}",
            code="bad_template",
            param=param,
            hint='write a column\'s name, or text with names in braces such as "{title}: {ingredients}"; a path is '
            "written {messages[0].content}, what may be missing {input?}, and a brace {{",
        )
    return Template(text, tuple(literals), tuple(placeholders))


def chat_field(turns: list[Any], name: str) -> str | None:
    """A field of a chat's turns: `completion` is the last reply, `prompt` all turns before it; None: there is none.

    A single turn is the prompt by itself; several are written `user: … assistant: …`. A reply with OpenAI's `weight` 0
    is never the last. Raises Defect if a turn is not text alone.
    """
    read = [_turn(turn) for turn in turns]
    replies = [
        place
        for place, turn in enumerate(read)
        if turn is not None and turn[0] == ASSISTANT and turns[place].get("weight") != 0
    ]
    if name not in CHAT_FIELDS or None in read or not replies:
        return None
    before, reply = [turn for turn in read[: replies[-1]] if turn is not None], read[replies[-1]]
    if name == "completion":
        return None if reply is None else reply[1]
    return before[0][1] if len(before) == 1 else " ".join(f"{role}: {content}" for role, content in before)


def _turn(turn: Any) -> tuple[str, str] | None:
    """Role and content, as OpenAI or ShareGPT write them; None: no turn. Raises Defect if it is not text alone."""
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if isinstance(turn, dict) and isinstance(role := turn.get(role_key), str):
            content = turn.get(content_key)
            if isinstance(content, list):  # of parts, such as {"type": "text", "text": "…"}
                parts = [part.get("text") if isinstance(part, dict) else part for part in content]
                texts = [text for text in parts if isinstance(text, str)]
                content = "".join(texts) if len(texts) == len(parts) else None
            if not isinstance(content, str) or turn.get("tool_calls") or turn.get("function_call"):
                raise Defect("a turn that is not text alone")
            return ROLES.get(role.lower(), role.lower()), content
    return None


def list_in(value: Any) -> list[str] | None:
    """The list in a text that is a JSON array of strings; None for any other text."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return None
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return items if items and all(isinstance(item, str) for item in items) else None


def _join(items: list[Any], column: str) -> str:
    """A list as one text: sentences joined by spaces, other items by semicolons; blank items are skipped."""
    texts = [text for text in (_plain_text(item, column).strip() for item in items) if text]
    sentences = 2 * sum(text.endswith(_SENTENCE_END) for text in texts) > len(texts)
    return (" " if sentences else "; ").join(texts)


def _plain_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if _is_missing(value):
        raise Defect(f"missing {column}")
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise Defect(f"wrong type in {column}")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))  # how pandas writes a missing one


def _half_a_character(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _hash64(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
