"""From a row to the text that a causal model reads, and which parts of it are learned.

With a chat template, every row is a chat: of a prompt and its completion, one turn of the user and one reply. The text
is what the template makes of all turns. A reply is learned from where the template asks for it (the text of the turns
before, with the generation prompt) to the token that ends it, that included: what the model itself has to write. Where
replies begin is found by rendering each beginning of the chat, for templates that mark replies are rare. A template
that says something else of a beginning than of the whole would train what nobody asks for, and one that leaves out a
turn, of a role that it does not know, would teach replies to what nobody said: such rows are defects.

Without a template, a completion follows its prompt on a new line, and the tokenizer's end token ends it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jobs.text.units import format_bytes, format_duration
from worker.training.machine.host import ROW_S, Endless, TooLarge, costly_template, cpu_limit, memory_growth
from worker.training.rows.chat import ASSISTANT, SYSTEM, Turn
from worker.training.rows.row import SPECIAL, Defect
from worker.training.rows.text import Texts

SEPARATOR = "\n"
"""Between a prompt and its completion."""
_LONGEST_S = ROW_S
_MOST_BYTES = 512 << 20
"""Of memory to write a row; the largest row has 4 MiB."""
_MOST_ADDED, _MOST_TIMES = 1 << 15, 4
"""Characters that a template may write beyond so many times those of the turns."""
_PROBE = ("two plus two", "four altogether")
NO_TEMPLATE = "a chat, and the tokenizer has no chat template"
NOT_A_BEGINNING = "the chat template changes earlier turns"
NO_END = "the chat template does not end a reply with an end token"
NOT_SAID = "the chat template does not repeat a reply as it is"
NOT_RENDERED = "the chat template refuses the turns"
LEFT_OUT = "the chat template leaves out turns of the role"
TOO_LONG = "the chat template writes far more than the turns hold"
DEVELOPER = "developer"
"""What OpenAI calls the role of the system since 2025, and few templates know."""
_SEQUENCES, _ROLE_SHOWN = 1024, 30
"""Sequences of roles whose turns that are left out are remembered; characters of a role that are shown."""


class Span(NamedTuple):
    """Characters [begin, end) that are learned."""

    begin: int
    end: int


class Rendered(NamedTuple):
    """A row as text."""

    text: str
    spans: Sequence[Span]
    as_chat: bool
    """By the template, which writes also what a text begins with, such as `<s>`."""


@dataclass(frozen=True)
class ChatFormat:
    """How a tokenizer writes chats. Can be sent to another process."""

    template: str | None
    """Jinja; None: it has none."""
    names: Mapping[str, str]
    """Special tokens by the name that a template has for them, such as `bos_token`."""
    ends: tuple[str, ...]
    """Tokens that end a reply; of a text without a template, the first."""
    special: tuple[str, ...]
    """All special tokens, as written."""

    def render(self, texts: Texts, *, everything: bool) -> Rendered:
        """The text of a row. `everything`: all of it is learned. Raises Defect."""
        if any(token in text for text in texts.all for token in self.special):
            raise Defect(SPECIAL)
        if texts.turns:
            found = self._chat(texts.turns)
        elif self.takes(texts):
            found = self._chat((Turn("user", texts.input, False), Turn(ASSISTANT, texts.target, True)))
        else:
            before = f"{texts.input}{SEPARATOR}" if texts.input else ""
            text = f"{before}{texts.target}{self.ends[0]}"
            found = Rendered(text, [Span(len(before), len(text))], as_chat=False)
        return found._replace(spans=[Span(0, len(found.text))]) if everything else found

    def prompt(self, texts: Texts) -> tuple[str, bool]:
        """What a reply follows, of texts without one, and whether the template wrote it (`Rendered.as_chat`).

        Raises Defect.
        """
        if any(token in text for text in texts.all for token in self.special):
            raise Defect(SPECIAL)
        if texts.turns and self.template is None:
            raise Defect(NO_TEMPLATE)
        if self.takes(texts):
            turns = self._known(texts.turns or (Turn("user", texts.input, False),))
            text = self._written(turns, asking=True)
            self._check_all_said(turns)
            return text, True
        return f"{texts.input}{SEPARATOR}" if texts.input else texts.target, False

    def takes(self, texts: Texts) -> bool:
        """Whether a row is written as a chat; else it is plain text."""
        return bool(texts.turns or (texts.input and self.template is not None))

    def with_end(self) -> ChatFormat:
        """With the token by which the template ends a reply, where that is another than those known so far.

        Raises Defect where it refuses a plain question and reply.
        """
        if self.template is None:
            return self
        text = self._written((Turn("user", _PROBE[0], False), Turn(ASSISTANT, _PROBE[1], True)))
        after = text.rpartition(_PROBE[1])[2]
        found = [(at, token) for token in self.special if (at := after.find(token)) >= 0]
        return self if not found else replace(self, ends=tuple(dict.fromkeys([*self.ends, min(found)[1]])))

    def _chat(self, turns: Sequence[Turn]) -> Rendered:
        if self.template is None:
            raise Defect(NO_TEMPLATE)
        turns = self._known(turns)
        text = self._written(turns)
        spans = list(self._spans(text, turns))
        self._check_all_said(turns)
        return Rendered(text, spans, as_chat=True)

    def _known(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Turns of the developer as those of the system, where the template writes only these."""
        if all(turn.role != DEVELOPER for turn in turns):
            return turns
        as_system = [replace(turn, role=SYSTEM) if turn.role == DEVELOPER else turn for turn in turns]
        try:
            self._written(turns)
        except Defect:
            return as_system
        return as_system if any(turns[place].role == DEVELOPER for place in self._left_out(turns)) else turns

    def _check_all_said(self, turns: Sequence[Turn]) -> None:
        """Raise Defect where a turn is not in the text; replies that are learned are looked for as they are."""
        for place in self._left_out(turns):
            if not turns[place].learned:
                raise Defect(f"{LEFT_OUT} {turns[place].role[:_ROLE_SHOWN]!r}")

    def _left_out(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Places of turns whose content the template does not write, whatever it is."""
        return _left_out(self.template, tuple(self.names.items()), tuple(turn.role for turn in turns))

    def _spans(self, text: str, turns: Sequence[Turn]) -> Iterator[Span]:
        for place, turn in enumerate(turns):
            if not turn.learned:
                continue
            before = self._written(turns[:place], asking=True)
            if not text.startswith(before):
                raise Defect(NOT_A_BEGINNING)
            found = [(at, token) for token in self.ends if (at := text.find(token, len(before))) >= 0]
            if not found:
                raise Defect(NO_END)
            at, token = min(found)
            if turn.content.strip() not in text[len(before) : at]:
                raise Defect(NOT_SAID)
            yield Span(len(before), at + len(token))

    def _written(self, turns: Sequence[Turn], *, asking: bool = False) -> str:
        """`asking`: with the generation prompt behind it. Raises Defect; Rejected (`chat_template`) beyond a limit."""
        from transformers.utils.chat_template_utils import render_jinja_template

        said = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            with cpu_limit(_LONGEST_S, or_killed=True), memory_growth(_MOST_BYTES):
                rendered: Any = render_jinja_template(
                    [said], chat_template=self.template, add_generation_prompt=asking, **dict[str, Any](self.names)
                )
                written = str(rendered[0][0])
                written.encode()  # a half of a surrogate pair is no text
        except MemoryError:
            raise
        except Endless:
            raise costly_template(f"computes for more than {format_duration(_LONGEST_S)}") from None
        except TooLarge:
            raise costly_template(f"needs more than {format_bytes(_MOST_BYTES)} of memory") from None
        except Exception as error:  # a program from outside: it may raise anything
            raise Defect(f"{NOT_RENDERED}: {str(error)[:100]}") from None
        if len(written) > _MOST_ADDED + _MOST_TIMES * sum(len(turn.content) for turn in turns):
            raise Defect(TOO_LONG)
        return written


@functools.lru_cache(_SEQUENCES)
def _left_out(template: str | None, names: tuple[tuple[str, str], ...], roles: tuple[str, ...]) -> tuple[int, ...]:
    """Of a chat in which every turn says something that nothing else in it says."""
    said = [f"what turn {place} of all says" for place in range(len(roles))]
    turns = [Turn(role, content, False) for role, content in zip(roles, said, strict=True)]
    try:
        text = ChatFormat(template, dict(names), (), ())._written(turns)
    except Defect:  # it wants contents of its own, such as JSON
        return ()
    return tuple(place for place, content in enumerate(said) if content not in text)
