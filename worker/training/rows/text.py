"""From a row to the texts a model sees: templates over columns, checks, normalization."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, ClassVar

from jobs.companions import NO_COMPANIONS, CompanionColumns
from jobs.errors import Rejected
from jobs.spec import PAIR
from worker.training.rows.characters import Rewriter
from worker.training.rows.chat import (
    ASSISTANT,
    CHAT_COLUMNS,
    SYSTEM,
    TOOL,
    TOOLS,
    Turn,
    asked_turns,
    chat_field,
    is_chat,
    of_text_alone,
    tools_of,
    turns_before,
    turns_of,
    turns_of_pair,
    without_json,
    written,
)
from worker.training.rows.companions import is_nothing, judged
from worker.training.rows.row import NO_RESULT, NO_RESULT_CELL, NOT_A_CHAT, TOO_DEEP, Defect, RowCounts

# Tab, newline and carriage return are white space to every tokenizer; the others are damage.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_PATH = re.compile(r"([^.\[\]]+)((?:\.[^.\[\]]+|\[-?\d{1,9}\])*)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(-?\d+)\]")
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")
_AS_JSON = "|json"
"""Behind a column or a path."""
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
OBJECT = "an object"
"""Where a text should be; its fields can be named."""
ENDS = "white space at both ends removed"
ONE_TEXT = "one text, and the model reads a pair"
UNUSED_TOOLS = f"a column {TOOLS}, which is not used: the chat template gets no tools"


Joined = tuple[str, list[Any], str]
"""Name of a column, the list in it, and the text that it became."""
Changed = tuple[str, str, str]
"""What was done to a text, before and after."""


@dataclass(frozen=True)
class Placeholder:
    """What braces hold: a column, or a path into one such as `messages[0].content`; with `|json` behind it, what is
    there as JSON; with `?` behind that, optional."""

    text: str
    """As written. A column of exactly that name is meant first, whatever is in it."""
    name: str
    """Without the question mark."""
    column: str
    path: tuple[str | int, ...]
    """From the column's value on; empty: that value."""
    optional: bool
    """Whether a row may lack it."""
    as_json: bool = False
    """Whether its value becomes text as JSON, whatever it is."""

    @classmethod
    def parse(cls, text: str) -> Placeholder:
        """Any text; one that is no path is a column's name."""
        name = text.removesuffix("?") or text
        place = name.removesuffix(_AS_JSON) or name
        parts = _PATH.fullmatch(place)
        steps = _STEP.findall(parts[2]) if parts else []
        path = tuple(key or int(index) for key, index in steps)
        return cls(text, name, parts[1] if parts else place, path, optional=text != name, as_json=place != name)

    @property
    def columns(self) -> set[str]:
        """Names of the columns that may be meant."""
        return {self.text, self.name, self.column}

    def value(self, row: Mapping[str, Any]) -> Any:
        """What the row has there; None: nothing. Raises Defect where it has no JSON."""
        if self.text in row:
            return row[self.text]
        if self.name in row:
            return row[self.name]
        if self.as_json and not self.path:
            return _as_json(row.get(self.column), self.name)
        value = without_json(row.get(self.column)) if self.path else None
        for step in self.path:
            if isinstance(step, int):
                value = value[step] if isinstance(value, list) and -len(value) <= step < len(value) else None
            elif isinstance(value, list):
                value = chat_field(value, step)
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return _as_json(value, self.name) if self.as_json else value


@dataclass(frozen=True)
class Template:
    """A text with placeholders, e.g. `"{title}: {ingredients}"`: literals[0] placeholders[0] literals[1] …"""

    source: str
    literals: tuple[str, ...]
    placeholders: tuple[Placeholder, ...]
    companions: CompanionColumns = NO_COMPANIONS
    """Of a target: the columns beside it that a row is read by."""
    in_turns: bool = False
    """Of a target: whether earlier turns and a system prompt stay turns, for a model that reads chats."""
    keeps_ends: bool = False
    """Of a target: whether the texts of a row keep the white space that they begin and end with."""
    pair: tuple[Template, Template] | None = None
    """Of an input that is a pair of texts: the template of each; `literals` are then empty."""
    verbatim: ClassVar[bool] = False
    """Whether no character of the text is rewritten, whatever the tokenizer knows."""

    @property
    def columns(self) -> set[str]:
        """Names of the columns that it may take, of its companions, and of the tools beside chats."""
        own = {column for one in self.placeholders for column in one.columns}
        tools = {TOOLS} if self.of_chats or (self.in_turns and self.alone) else set()
        return own | set(self.companions.names) | tools

    @property
    def decides(self) -> object:
        """Whatever of it decides what a row becomes; JSON."""
        beside = self.companions.model_dump(exclude_none=True) | ({"keeps_ends": True} if self.keeps_ends else {})
        return [self.source, beside] if beside else self.source

    @property
    def of_chats(self) -> bool:
        """Whether it takes a column of chats, by its name."""
        return any(one.column.lower() in CHAT_COLUMNS and not one.as_json for one in self.placeholders)

    @property
    def alone(self) -> bool:
        """Whether it is one placeholder and nothing else."""
        return len(self.placeholders) == 1 and not any(self.literals)

    def whole_value(self, row: Mapping[str, Any]) -> Any:
        """The row's value where the template is a placeholder alone; None: it is more, or has none."""
        return self.placeholders[0].value(row) if self.alone else None

    def turns(self, row: Mapping[str, Any]) -> tuple[Turn, ...] | None:
        """The turns of the row's chat, where the template is a placeholder alone; None: it has none.

        Raises Defect as `turns_of`, and where a column of chats holds something else.
        """
        if self.alone and self.placeholders[0].as_json:
            return None
        turns = turns_of(without_json(self.whole_value(row)))
        if turns is None and self.alone and self.of_chats and not self.placeholders[0].path:
            self.fill(row)  # what is missing or empty has its own reason
            raise Defect(NOT_A_CHAT)
        return turns

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
            text = _join(value, one.name) if isinstance(value, list) else plain_text(value, one.name)
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


Templates = tuple[Template | None, Template]
"""Of input and target. Without an input, the target is all there is: a text, or the turns of a chat."""


@dataclass(frozen=True)
class Texts:
    """The texts of a row."""

    input: str
    """Of a chat: what comes before the last reply. Empty where the target is all there is."""
    target: str
    """Of a chat: the last reply."""
    turns: tuple[Turn, ...] = ()
    """Of a chat that is taken as a whole: all turns up to the last reply; else none."""
    tools: str = ""
    """What its replies may call, as of `tools_of`."""
    second: str = ""
    """Of a pair of texts, the second; `input` is the first."""

    @property
    def key(self) -> int:
        """The first 64 bits of the hash of all but the white space at their ends: equal rows have equal keys."""
        if self.turns:
            turns = tuple(map(_without_ends, self.turns))
            return _hash64(repr((turns, self.tools) if self.tools else turns).encode())
        return _hash64("\0".join(text.strip() for text in (*self.read, self.target)).encode())

    @property
    def split_key(self) -> int:
        """The same of the input's letters and digits (without an input, the target's): rows whose inputs differ only in
        case, accents, spaces or punctuation have equal ones, and go to the same side of a split."""
        if self.second:
            return _hash64(b"\0".join(map(letters_and_digits, self.read)))
        return _hash64(letters_and_digits(self.input.strip() or self.target))

    @property
    def read(self) -> Sequence[str]:
        """The input: one text, or both of a pair."""
        return (self.input, self.second) if self.second else (self.input,)

    def without_indents(self) -> Texts:
        """The same, where no learned text begins with white space."""
        turns = tuple(replace(turn, content=turn.content.lstrip()) if turn.learned else turn for turn in self.turns)
        return replace(self, target=self.target.lstrip(), turns=turns)

    @property
    def all(self) -> Sequence[str]:
        """Every text that a tokenizer meets."""
        if self.turns:
            return [*([self.tools] if self.tools else []), *(text for turn in self.turns for text in turn.texts)]
        return [text for text in (*self.read, self.target) if text]

    @property
    def characters(self) -> tuple[int, int]:
        """Of what is only read, and of what is learned."""
        if not self.turns:
            return sum(map(len, self.read)), len(self.target)
        learned = sum(len(text) for turn in self.turns if turn.learned for text in turn.texts)
        return sum(map(len, self.all)) - learned, learned


class RowReader:
    """Turns rows into `Texts`. Counts what it rewrote, and rows with something odd that they keep."""

    def __init__(self, input: Template | None, target: Template, rewrite: Rewriter | None) -> None:
        self._input, self._target = input, target
        self._columns = {
            one.name for each in (input, target) if each and not each.verbatim for one in each.placeholders
        }
        """Of texts. A label that is a JSON array is read as one."""
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
        changed: list[Changed] = []
        odd = judged(columns, self._target.companions)
        before = self._before(columns)
        turns = self._target.turns(columns) if self._input is None else self._pair(columns)
        if turns is not None:
            if not self._target.in_turns:
                of_text_alone(turns)
            turns = tuple(self._checked_turn(turn, changed) for turn in _joined_turns(before, turns))
            found = Texts(written(turns[:-1]), turns[-1].said, turns, self._tools(columns))
        else:
            input, second, asked = self._asked(columns, before, joined, changed)
            found = Texts(input, self._text(self._target, columns, joined, changed), second=second)
            if asked and self._target.in_turns:
                found = replace(found, turns=(*asked, Turn(ASSISTANT, found.target, learned=True)))
        if odd is not None:
            self.noticed[odd] += 1
        for column, items, text in joined:
            self._count(f"list in {column} joined", items, text)
        for what, text, rewritten in changed:
            self._count(what, text, rewritten)
        for column in self._columns:
            if list_in(columns.get(column)) is not None:
                self.noticed[f"a JSON array as the text of {column}"] += 1
        if self._target.of_chats and not found.tools and columns.get(TOOLS) not in (None, "", [], "[]"):
            self.noticed[UNUSED_TOOLS] += 1
        for oddity, found_in in ODDITIES.items():
            if any(map(found_in, found.all)):
                self.noticed[oddity] += 1
        return found

    def read_asked(self, columns: Mapping[str, Any]) -> Texts:
        """What the model reads of a row before it answers; the target may be missing. Raises Defect."""
        before = self._before(columns)
        if self._input is not None:
            if self._in_pairs and is_chat(prompt := without_json(self._input.whole_value(columns))):
                asked_of = asked_turns(prompt)
                assert asked_of is not None
                return self.asked(_joined_turns(before, asked_of), columns.get(TOOLS))
            input, second, asked = self._asked(columns, before, [], [])
            return Texts(input, "", asked if self._target.in_turns else (), second=second)
        turns = asked_turns(without_json(self._target.whole_value(columns)))
        if turns is None:
            return Texts("", self._text(self._target, columns, [], []))
        return self.asked(_joined_turns(before, turns), columns.get(TOOLS) if self._target.in_turns else None)

    def _tools(self, columns: Mapping[str, Any]) -> str:
        """Of a chat that a template writes. Raises Defect."""
        tools = columns.get(TOOLS)
        return tools_of(tools) if self._target.in_turns and not _is_missing(tools) else ""

    @property
    def _in_pairs(self) -> bool:
        """Whether input and target may both be turns of one chat."""
        both = [each for each in (self._input, self._target) if each is not None]
        return self._target.in_turns and all(each.alone and not each.placeholders[0].as_json for each in both)

    @property
    def reads_pairs(self) -> bool:
        """Whether an input is two texts."""
        return self._input is not None and self._input.pair is not None

    def _pair(self, columns: Mapping[str, Any]) -> tuple[Turn, ...] | None:
        """The turns of a prompt and its completion, as TRL writes chats. Raises Defect."""
        if self._input is None or not self._in_pairs:
            return None
        return turns_of_pair(self._input.whole_value(columns), self._target.whole_value(columns))

    def _before(self, columns: Mapping[str, Any]) -> tuple[Turn, ...]:
        """The turns that those of the row itself follow. Raises Defect."""
        beside = self._target.companions
        if beside.system is None and beside.history is None:
            return ()
        system, history = (
            None if name is None or is_nothing(columns.get(name)) else columns[name]
            for name in (beside.system, beside.history)
        )
        return _joined_turns(turns_before(system, None), turns_before(None, history))

    def _asked(
        self, columns: Mapping[str, Any], before: tuple[Turn, ...], joined: list[Joined], changed: list[Changed]
    ) -> tuple[str, str, tuple[Turn, ...]]:
        """The input of a row as text, and of a pair the second; where turns are before it, these and its own as well.
        Raises Defect."""
        if self._input is not None and self._input.pair is not None:
            first, second = (self._text(each, columns, joined, changed) for each in self._input.pair)
            return first, second, ()
        if self._input is None or not before:
            return "" if self._input is None else self._text(self._input, columns, joined, changed), "", ()
        own = None
        if self._input.of_chats and self._input.alone:
            own = of_text_alone(turns_of(without_json(columns.get(self._input.placeholders[0].column))))
        if own is None:
            earlier = tuple(self._checked_turn(turn, changed) for turn in before)
            turns = (*earlier, Turn("user", self._text(self._input, columns, joined, changed), learned=False))
        else:
            turns = tuple(self._checked_turn(turn, changed) for turn in _joined_turns(before, own[:-1]))
        return written(turns), "", turns

    def asked(self, turns: Sequence[Turn], tools: Any = None) -> Texts:
        """The same of turns, with what the reply may call; of a pair of texts the last two. Raises Defect."""
        callable_tools = tools_of(tools)
        if not self._target.in_turns:
            of_text_alone(tuple(turns))
            if callable_tools:
                raise Defect("tools, which only a chat template writes")
        if self.reads_pairs:
            if len(turns) < 2:
                raise Defect(ONE_TEXT)
            first, second = (self._checked(turn.content, "messages", []) for turn in turns[-2:])
            return Texts(first, "", second=second)
        checked = tuple(self._checked_turn(turn, []) for turn in turns)
        return Texts(written(checked), "", checked, callable_tools)

    def asked_text(self, text: str) -> Texts:
        """The same of a text that a template has made: of chats what the user says, of plain texts their beginning."""
        if self._input is None and self._target.of_chats:
            return self.asked((Turn("user", text, False),))
        if self.reads_pairs:
            raise Defect(ONE_TEXT)
        checked = self._checked(text, "input", [])
        return Texts("", checked) if self._input is None else Texts(checked, "")

    def _count(self, what: str, before: str | list[Any], after: str) -> None:
        self.rewritten[what] += 1
        if what not in self.examples:
            text = before if isinstance(before, str) else json.dumps(before, ensure_ascii=False)
            self.examples[what] = [text[:_EXAMPLE], after[:_EXAMPLE]]

    def _text(
        self, template: Template, columns: Mapping[str, Any], joined: list[Joined], changed: list[Changed]
    ) -> str:
        names = " and ".join(one.name for one in template.placeholders)
        return self._checked(template.fill(columns, joined), names, changed, verbatim=template.verbatim)

    def _checked_turn(self, turn: Turn, changed: list[Changed]) -> Turn:
        """A system prompt may be empty, which is not the same as none: Qwen2.5 then writes one of its own."""
        if turn.role == "system" and not turn.content.strip():
            return turn if self._target.keeps_ends else replace(turn, content="")
        if not turn.content.strip() and (turn.calls or turn.role == TOOL):
            content = ""
        else:
            content = self._checked(turn.content, f"{turn.role} turn", changed)
        reasoning = self._checked(turn.reasoning.strip(), "reasoning", changed) if turn.reasoning.strip() else ""
        return replace(turn, content=content, reasoning=reasoning)

    def _checked(self, text: str, name: str, changed: list[Changed], *, verbatim: bool = False) -> str:
        """A text as it is learned from; `name`: what it is, for a defect."""
        if not text.isprintable() and NO_RESULT_CELL in text:
            raise Defect(NO_RESULT)
        if not text.isprintable() and (damage := _CONTROL.search(text)):
            raise Defect(f"control character U+{ord(damage.group()):04X}")
        if not verbatim and self._rewrite is not None and (rewritten := self._rewrite(text, self.normalized)) != text:
            changed.append(("characters rewritten", text, rewritten))
            text = rewritten
        bare = text.strip()
        if not bare:
            raise Defect(f"empty {name}")
        if bare != text and not self._target.keeps_ends:
            changed.append((ENDS, text, bare))
            text = bare
        if not text.isascii() and _half_a_character(text):
            raise Defect("half a surrogate pair")
        return text


def _joined_turns(before: tuple[Turn, ...], turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The system prompt first. Raises Defect where both have one, and not the same."""
    if not before or not turns or turns[0].role != SYSTEM:
        return (*before, *turns)
    if before[0].role == SYSTEM:
        if before[0].content.strip() != turns[0].content.strip():
            raise Defect("a system prompt beside the chat, and another one in it")
        before = before[1:]
    return (turns[0], *before, *turns[1:])


def letters_and_digits(text: str) -> bytes:
    """A text without case, accents, spaces and punctuation; the whole text if it has no letter or digit."""
    if text.isascii():
        bare = text.lower().encode().translate(None, _NOT_ALPHANUMERIC)
    else:
        bare = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text).casefold())).encode()
    return bare or text.strip().encode()


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
            "written {messages[0].content}, an object as JSON {output|json}, what may be missing {input?}, a brace {{",
        )
    return Template(text, tuple(literals), tuple(placeholders))


def input_template(text: str) -> Template:
    """`data.input` as written in a job: as of `template`, or two of these with `{}` between, which are a pair.

    Raises Rejected (`bad_template`)."""
    between = [piece.span() for piece in _PIECE.finditer(text) if piece[0] == PAIR]  # `{{}}` is none
    sides = [text[: between[0][0]].strip(), text[between[0][1] :].strip()] if len(between) == 1 else []
    if not sides or not all(sides):
        return template(text, "data.input")
    first, second = (template(side, "data.input") for side in sides)
    source = f"{first.source} {PAIR} {second.source}"
    return Template(source, (), (*first.placeholders, *second.placeholders), pair=(first, second))


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
    texts = [text for text in (plain_text(item, column).strip() for item in items) if text]
    sentences = 2 * sum(text.endswith(_SENTENCE_END) for text in texts) > len(texts)
    return (" " if sentences else "; ").join(texts)


def plain_text(value: Any, column: str) -> str:
    """A single value as text. Raises Defect where there is none, or it is of a type that is no text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if _is_missing(value):
        raise Defect(f"missing {column}")
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (date, time)):
        return iso_text(value)
    raise Defect(f"{OBJECT} in {column}" if isinstance(value, dict) else f"wrong type in {column}")


def _as_json(value: Any, name: str) -> Any:
    """A value as JSON, in the order of its keys; what is missing stays so, and is null within. Raises Defect."""
    if _is_missing(value):
        return value
    plain = functools.partial(_json_value, name=name)
    try:
        try:
            return json.dumps(value, ensure_ascii=False, default=plain, allow_nan=False)
        except ValueError:
            return json.dumps(_without_nan(value, name), ensure_ascii=False, default=plain)
    except RecursionError:
        raise Defect(TOO_DEEP) from None
    except TypeError:  # a key that is no text
        raise Defect(f"wrong type in {name}") from None


def _json_value(value: Any, name: str) -> Any:
    """What JSON has for a value of Parquet's. Raises Defect where it has none."""
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        number = float(value)
        if Decimal(repr(number)) != value:
            raise Defect(f"a decimal with more digits than a float in {name}")
        return number
    if isinstance(value, (date, time)):
        return iso_text(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        raise Defect(f"bytes that are not UTF-8 in {name}")
    raise Defect(f"wrong type in {name}")


def _without_nan(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one, name) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one, name) for one in value]
    if isinstance(value, float) and math.isinf(value):
        raise Defect(f"an infinite number in {name}")
    return None if _is_missing(value) else value


def iso_text(value: date | time) -> str:
    """A date, a time or both as ISO 8601 has them: 2026-01-31, 10:30:00, 2026-01-31 10:30:00; of midnight the date."""
    if isinstance(value, datetime):
        return value.date().isoformat() if value.timetz() == time() else value.isoformat(" ")
    return value.isoformat()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))  # how pandas writes a missing one


def _without_ends(turn: Turn) -> Turn:
    return replace(turn, content=turn.content.strip())


def _half_a_character(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _hash64(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
