"""From a row to the texts that a causal model reads, and which parts of them are learned.

With a chat template, every row is a chat: of a prompt and its completion, one turn of the user and one reply. A reply
is learned as a server has it: behind the text of the turns before it, with the generation prompt, up to the token that
ends it, that included. What the template makes of the chat up to that reply says how it is written.

Many templates write earlier turns otherwise than the last one: Qwen3 leaves out what earlier replies thought. So a row
becomes as many texts, its examples, as it takes for each reply to stand behind its own beginning; replies whose texts
are the beginning of a longer one share that. Where the generation prompt begins to think, as DeepSeek-R1's does, and
the template writes replies without it, the reply continues there. A template that says something else of a beginning
than of the whole would train what nobody asks for, and one that leaves out a turn, of a role that it does not know,
would teach replies to what nobody said: such rows are defects.

Without a template, a completion follows its prompt on a new line, and the tokenizer's end token ends it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from jobs.spec import Learn
from jobs.text.units import format_bytes, format_duration
from worker.training.machine.host import ROW_S, Endless, TooLarge, costly_template, cpu_limit, memory_growth
from worker.training.rows.chat import ASSISTANT, REASONING, SYSTEM, Turn
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
NOT_THOUGHT = "the chat template leaves out the reasoning of a reply"
NOT_RENDERED = "the chat template refuses the turns"
NO_REASONING = "a chat without reasoning, of which alone is learned (data.learn)"
LEFT_OUT = "the chat template leaves out turns of the role"
TOO_LONG = "the chat template writes far more than the turns hold"
DEVELOPER = "developer"
"""What OpenAI calls the role of the system since 2025, and few templates know."""
_THINKING = re.compile(r"<think>\s*(?P<ended></think>\s*)?$")
"""How generation prompts end that begin to think, or say that nothing is thought."""
_THOUGHT = re.compile(r"\A\s*(<think>.*?</think>\s*)?", re.DOTALL)
"""How replies begin that have thought."""
_ENDED_THINKING = re.compile(r"(\s*(<think>\s*)?</think>\s*)?")
"""What stands between the reasoning of a reply, or its beginning, and the answer."""
_SEQUENCES, _ROLE_SHOWN = 1024, 30
"""Sequences of roles whose turns that are left out are remembered; characters of a role that are shown."""


class Span(NamedTuple):
    """Characters [begin, end) that are learned."""

    begin: int
    end: int
    of: tuple[int, int] | None = None
    """The whole reply, where they are a part of it."""

    @property
    def reply(self) -> tuple[int, int]:
        """Where the reply begins and ends."""
        return self.of or (self.begin, self.end)


class Rendered(NamedTuple):
    """An example as text."""

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
    follows: str | None = None
    """What ends a reply where the template itself writes it only with the next turn, as GLM's does."""

    def render(self, texts: Texts, *, everything: bool, learn: Learn = "all") -> Sequence[Rendered]:
        """The examples of a row, in the order of their last replies; of most rows one. Raises Defect.

        `everything`: all of it is learned, of further examples what the one before does not begin with. `learn`: what
        of each reply.
        """
        if any(token in text for text in texts.all for token in self.special):
            raise Defect(SPECIAL)
        if texts.turns:
            found = self._chat(texts.turns, learn)
        elif self.takes(texts):
            found = self._chat((Turn("user", texts.input, False), Turn(ASSISTANT, texts.target, True)), learn)
        else:
            before = f"{texts.input}{SEPARATOR}" if texts.input else ""
            text = f"{before}{texts.target}{self.ends[0]}"
            found = [Rendered(text, [Span(len(before), len(text))], as_chat=False)]
        if not everything:
            return found
        begins = [0, *(_alike(one.text, other.text) for one, other in pairwise(found))]
        return [each._replace(spans=[Span(at, len(each.text))]) for at, each in zip(begins, found, strict=True)]

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
        turns = Turn("user", _PROBE[0], False), Turn(ASSISTANT, _PROBE[1], True)
        if found := self._special_in(self._written(turns).rpartition(_PROBE[1])[2]):
            return replace(self, ends=tuple(dict.fromkeys([*self.ends, found])))
        try:
            followed = self._written((*turns, turns[0])).partition(_PROBE[1])[2]
        except Defect:
            return self
        follows = self._special_in(followed)
        if follows is None or not followed.lstrip().startswith(follows):
            return self
        return replace(self, ends=tuple(dict.fromkeys([*self.ends, follows])), follows=follows)

    def _special_in(self, text: str) -> str | None:
        """The first special token of a text."""
        found = [(at, token) for token in self.special if (at := text.find(token)) >= 0]
        return min(found)[1] if found else None

    def _chat(self, turns: Sequence[Turn], learn: Learn) -> Sequence[Rendered]:
        if self.template is None:
            raise Defect(NO_TEMPLATE)
        turns = self._known(turns)
        examples: list[Rendered] = []
        for place in range(len(turns) - 1, -1, -1):
            if turns[place].learned and (learn != "reasoning" or turns[place].parts[0]):
                text, begin, answer, end = self._reply(turns[: place + 1])
                of = None if learn == "all" else (begin, end)
                span = Span(answer if learn == "answer" else begin, answer if learn == "reasoning" else end, of)
                beginning = text[:end]
                shared = (number for number, each in enumerate(examples) if each.text.startswith(beginning))
                if (number := next(shared, None)) is None:
                    examples.append(Rendered(text, [span], as_chat=True))
                else:
                    examples[number] = examples[number]._replace(spans=[span, *examples[number].spans])
        self._check_all_said(turns)
        if not examples:
            raise Defect(NO_REASONING)
        return examples[::-1]

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

    def _reply(self, turns: Sequence[Turn]) -> tuple[str, int, int, int]:
        """What a server has once it has answered with the last of these turns, and where in it that reply begins, its
        answer begins, and it ends.

        Raises Defect.
        """
        before, text = self._written(turns[:-1], asking=True), self._written(turns)
        thought, answer = turns[-1].parts
        if not text.startswith(before):
            text = _continued(before, text, thought)
        if self.follows is not None and not any(token in text[len(before) :] for token in self.ends):
            text = text.rstrip() + self.follows
        begin = len(before)
        if not any(token in text[begin:] for token in self.ends):
            raise Defect(NO_END)
        if (found := text.find(thought, begin)) < 0:
            raise Defect(NOT_THOUGHT)
        ended = _ENDED_THINKING.match(text, found + len(thought))
        assert ended is not None, "it matches everywhere"
        answer_at = ended.end()
        if (found := text.find(answer, answer_at)) < 0:
            raise Defect(NOT_SAID)
        at = found + len(answer)
        ends = [(found, token) for token in self.ends if (found := text.find(token, at)) >= 0]
        if not ends:
            raise Defect(NO_END)
        at, token = min(ends)
        if not text.startswith(answer, answer_at):
            answer_at = text.rindex(answer, answer_at, at)
        return text, begin, answer_at, at + len(token)

    def _written(self, turns: Sequence[Turn], *, asking: bool = False) -> str:
        """`asking`: with the generation prompt behind it. Raises Defect; Rejected (`chat_template`) beyond a limit."""
        from transformers.utils.chat_template_utils import render_jinja_template

        said = [_message(turn) for turn in turns]
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
        if len(written) > _MOST_ADDED + _MOST_TIMES * sum(len(text) for turn in turns for text in turn.texts):
            raise Defect(TOO_LONG)
        return written


def _message(turn: Turn) -> dict[str, object]:
    """A turn as templates know it."""
    reasoning = dict.fromkeys(REASONING, turn.reasoning) if turn.reasoning else {}
    return {"role": turn.role, "content": turn.content, **reasoning}


def _alike(one: str, other: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def _continued(before: str, text: str, thought: str) -> str:
    """The text of a chat whose last reply continues where the prompt `before` has begun to think. Raises Defect."""
    found = _THINKING.search(before)
    if found is None or not text.startswith(before[: found.start()]) or (found["ended"] and thought):
        raise Defect(NOT_A_BEGINNING)
    said = _THOUGHT.sub("", text[found.start() :], count=1)
    return f"{before}{said}" if found["ended"] else f"{before}{thought}\n</think>\n\n{said}"


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
