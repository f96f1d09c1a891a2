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

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product, takewhile
from typing import Any, NamedTuple

from jobs.spec import Learn
from jobs.text.units import format_bytes, format_duration
from worker.training.machine.host import ROW_S, Endless, TooLarge, costly_template, cpu_limit, memory_growth
from worker.training.rows.chat import ASSISTANT, REASONING, SYSTEM, TOOL, Turn
from worker.training.rows.row import NO_TOOLS, SPECIAL, Defect
from worker.training.rows.text import Texts
from worker.training.tasks.causal.tool_calls import possible_calls

SEPARATOR = "\n"
"""Between a prompt and its completion."""
_LONGEST_S = ROW_S
_MOST_BYTES = 512 << 20
"""Of memory to write a row; the largest row has 4 MiB."""
_MOST_ADDED, _MOST_TIMES = 1 << 15, 4
"""Characters that a template may write beyond so many times those of the turns."""
_MOST_CHARACTERS = 64 << 20
"""Of all examples of a row."""
_PROBE = ("two plus two", "four altogether")
NO_TEMPLATE = "a chat, and the tokenizer has no chat template"
NOT_A_BEGINNING = "the chat template changes earlier turns"
NO_END = "the chat template does not end a reply with an end token"
ENDS_EARLY = "the chat template writes an end token within a reply"
NOT_SAID = "the chat template does not repeat a reply as it is"
NO_CALLS = "the chat template leaves out a tool call of a reply"
NOT_THOUGHT = "the chat template leaves out the reasoning of a reply"
NOT_RENDERED = "the chat template refuses the turns"
NO_REASONING = "a chat without reasoning, of which alone is learned (data.learn)"
LEFT_OUT = "the chat template leaves out turns of the role"
TOO_MANY = "a long chat of too many replies, each of which the chat template writes otherwise"
TOO_LONG = "the chat template writes far more than the turns hold"
DEVELOPER = "developer"
"""What OpenAI calls the role of the system since 2025, and few templates know."""
_THINKING = re.compile(r"<think>\s*(?P<ended></think>\s*)?$")
"""How generation prompts end that begin to think, or say that nothing is thought."""
_THOUGHT = re.compile(r"\A\s*(?P<thought><think>.*?</think>\s*|</think>\s*)?", re.DOTALL)
"""How replies begin that have thought, or that close what the prompt has begun."""
_NO_THOUGHT = "\n</think>\n\n"
_ENDED_THINKING = re.compile(r"(\s*(<think>\s*)?</think>\s*)?")
"""What stands between the reasoning of a reply, or its beginning, and the answer."""
_CALLED, _TOOL, _TOOLS = "callprobe", "tool_of_all", -1
"""Names of functions that nothing else says; as an id, the first has nine characters, as Mistral's. And what stands for
tools in place of a turn."""
_TOOL_PROBE = json.dumps(
    [{"type": "function", "function": {"name": _TOOL, "description": "", "parameters": {"type": "object"}}}]
)
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
    tool_template: str | None = None
    """What writes chats with tools, where the tokenizer has another template for these."""
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
            found = self._chat(texts.turns, texts.tools, learn)
        elif self.takes(texts):
            found = self._chat((Turn("user", texts.input, False), Turn(ASSISTANT, texts.target, True)), "", learn)
        else:
            before = f"{texts.input}{SEPARATOR}" if texts.input else ""
            text = f"{before}{texts.target}{self.ends[0]}"
            found = [Rendered(text, [_plain_span(len(before), text, texts.target, learn)], as_chat=False)]
        if not everything:
            return found
        begins = [0, *(_alike(one.text, other.text) for one, other in pairwise(found))]
        return [
            each._replace(spans=[Span(at, len(each.text), (0, len(each.text)))])
            for at, each in zip(begins, found, strict=True)
        ]

    def prompt(self, texts: Texts) -> tuple[str, bool]:
        """What a reply follows, of texts without one, and whether the template wrote it (`Rendered.as_chat`).

        Raises Defect.
        """
        if any(token in text for text in texts.all for token in self.special):
            raise Defect(SPECIAL)
        if texts.turns and self.template is None:
            raise Defect(NO_TEMPLATE)
        if self.takes(texts):
            turns = self._known(texts.turns or (Turn("user", texts.input, False),), texts.tools)
            text = self._written(turns, texts.tools, asking=True)
            self._check_all_said(turns, texts.tools)
            return text, True
        return f"{texts.input}{SEPARATOR}" if texts.input else texts.target, False

    def called(self, texts: Texts, reply: str) -> Turn | None:
        """What a reply to a chat says and calls, where the template writes exactly this for it; None: it calls nothing.

        `reply`: as it was generated, without special tokens. White space may differ.
        """
        turns, tools, bare = self._known(texts.turns, texts.tools), texts.tools, self._bare(reply)
        for content, calls in possible_calls(reply, _loaded(tools)):
            said = Turn(ASSISTANT, content, True, calls=calls)
            apart = [replace(said, reasoning=said.parts[0], content=said.parts[1])] if said.parts[0] else []
            for turn in (*apart, said):
                with contextlib.suppress(Defect):
                    text, begin, _, end = self._reply((*turns, turn), tools)
                    same = re.escape(self._bare(text[begin:end]))
                    for call in json.loads(calls):
                        same = same.replace(call["id"], r"\w+")  # which is ours
                    if re.fullmatch(same, bare):
                        return turn
        return None

    def _bare(self, text: str) -> str:
        """Without special tokens and white space."""
        for token in self.special:
            text = text.replace(token, "")
        return "".join(text.split())

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
        found = self
        last = followed = self._written(turns).rpartition(_PROBE[1])[2]
        with contextlib.suppress(Defect):
            followed = self._written((*turns, turns[0])).partition(_PROBE[1])[2]
        ends = last[: _alike(last, followed)]  # of every reply
        if not any(token in ends for token in self.ends):
            if end := (last.rstrip().endswith(self.special) and self._last_special_in(ends)) or self._special_in(last):
                found = self._ending(end)
            else:
                end = next((token for token in self.special if followed.lstrip().startswith(token)), None)
                found = found if end is None else replace(self._ending(end), follows=end)
        with contextlib.suppress(Defect):
            asked = turns[0], _calling(_PROBE[1], "")
            called = self._written(asked, _TOOL_PROBE).partition(_PROBE[1])[2].rstrip()
            end = next((token for token in self.special if called.endswith(token)), None)
            if end is not None and not any(token in called for token in found.ends):
                found = found._ending(end)
            elif end is None and found.follows is not None:
                answered = (*asked, Turn(TOOL, _PROBE[0], False))
                followed = self._written(answered, _TOOL_PROBE).partition(_PROBE[1])[2].removeprefix(called).lstrip()
                end = next((token for token in self.special if followed.startswith(token)), None)
                found = found if end is None else found._ending(end)
        return found

    def _ending(self, end: str) -> ChatFormat:
        return replace(self, ends=tuple(dict.fromkeys([*self.ends, end])))

    def _special_in(self, text: str) -> str | None:
        """The first special token of a text."""
        found = [(at, token) for token in self.special if (at := text.find(token)) >= 0]
        return min(found)[1] if found else None

    def _last_special_in(self, text: str) -> str | None:
        """The last special token of a text."""
        found = [(at, token) for token in self.special if (at := text.rfind(token)) >= 0]
        return max(found)[1] if found else None

    def _chat(self, turns: Sequence[Turn], tools: str, learn: Learn) -> Sequence[Rendered]:
        if self.template is None:
            raise Defect(NO_TEMPLATE)
        turns = self._known(turns, tools)
        if tools and _TOOLS in self._left_out(turns, tools):
            raise Defect(NO_TOOLS)
        examples: list[Rendered] = []
        for place in range(len(turns) - 1, -1, -1):
            if turns[place].learned and (learn != "reasoning" or turns[place].parts[0]):
                text, begin, answer, end = self._reply(turns[: place + 1], tools)
                of = None if learn == "all" else (begin, end)
                span = Span(answer if learn == "answer" else begin, answer if learn == "reasoning" else end, of)
                beginning = text[:end]
                shared = (number for number, each in enumerate(examples) if each.text.startswith(beginning))
                if (number := next(shared, None)) is None:
                    examples.append(Rendered(text, [span], as_chat=True))
                    if sum(len(each.text) for each in examples) > _MOST_CHARACTERS:
                        raise Defect(TOO_MANY)
                else:
                    examples[number] = examples[number]._replace(spans=[span, *examples[number].spans])
        self._check_all_said(turns, tools)
        if not examples:
            raise Defect(NO_REASONING)
        return examples[::-1]

    def _known(self, turns: Sequence[Turn], tools: str) -> Sequence[Turn]:
        """Turns of the developer as those of the system, where the template writes only these."""
        if all(turn.role != DEVELOPER for turn in turns):
            return turns
        as_system = [replace(turn, role=SYSTEM) if turn.role == DEVELOPER else turn for turn in turns]
        try:
            self._written(turns, tools)
        except Defect:
            return as_system
        left_out = self._left_out(turns, tools)
        return as_system if any(turns[place].role == DEVELOPER for place in left_out if place >= 0) else turns

    def _check_all_said(self, turns: Sequence[Turn], tools: str) -> None:
        """Raise Defect where a turn or the tools are not in the text; replies that are learned are looked for as they
        are."""
        for place in self._left_out(turns, tools):
            if place == _TOOLS:
                raise Defect(NO_TOOLS)
            if not turns[place].learned:
                raise Defect(f"{LEFT_OUT} {turns[place].role[:_ROLE_SHOWN]!r}")

    def _left_out(self, turns: Sequence[Turn], tools: str) -> tuple[int, ...]:
        """Places of turns whose content or calls the template does not write, whatever these are; _TOOLS: the tools."""
        shape = tuple((turn.role, bool(turn.content), bool(turn.calls)) for turn in turns)
        return _left_out(self._template_of(tools), tuple(self.names.items()), shape, bool(tools))

    def _template_of(self, tools: str) -> str | None:
        return self.tool_template if tools and self.tool_template is not None else self.template

    def _reply(self, turns: Sequence[Turn], tools: str) -> tuple[str, int, int, int]:
        """What a server has once it has answered with the last of these turns, and where in it that reply begins, its
        answer begins, and it ends.

        Raises Defect.
        """
        before, text = self._written(turns[:-1], tools, asking=True), self._written(turns, tools)
        thought, answer = turns[-1].parts
        own, text = text.rstrip(), self._continued(before, text, turns, tools)
        if self.follows is not None and not any(token in text[len(before) :] for token in self.ends):
            text = text.rstrip() + self._following(own, turns, tools, self.follows)
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
        at = _end_of_calls(turns[-1], text, found + len(answer))
        ends = [(place, token) for token in self.ends if (place := text.find(token, at)) >= 0]
        if not ends:
            raise Defect(NO_END)
        at, token = min(ends)
        if any(token in text[begin:at] for token in self.ends):
            raise Defect(ENDS_EARLY)
        said_at = len(text) - len(text[answer_at:].lstrip())  # a reply may begin with white space
        if not text.startswith(answer, said_at):  # a short one may stand in what the template writes before it
            answer_at = found if turns[-1].calls else text.rindex(answer, answer_at, at)
        return text, begin, answer_at, at + len(token)

    def _continued(self, before: str, text: str, turns: Sequence[Turn], tools: str) -> str:
        """A chat as text, its last reply behind the prompt `before` that a server asks with, where the template writes
        what is before the reply otherwise than that prompt. Raises Defect."""
        thought = turns[-1].parts[0]
        opened = _THINKING.search(before)
        if text.startswith(before):
            if opened is None or opened["ended"]:
                return text
            said = text[len(before) :]
            if thought and said.lstrip().startswith("<think>"):
                return before + said.lstrip().removeprefix("<think>").lstrip()
            return text if thought or "</think>" in said else before + _NO_THOUGHT + said
        closed = opened is not None and bool(opened["ended"])
        at = self._reply_at(before if opened is None else before[: opened.start()], text, turns, tools)
        if at is None and opened is None and (begun := self._empty_thought(before, turns, tools)) is not None:
            at, closed = self._reply_at(before[: begun[0]], text, turns, tools), True
            if at is not None and text[at:].lstrip().startswith(begun[1]):
                at = None
        if at is None:
            raise Defect(NOT_A_BEGINNING)
        if closed and thought:
            raise Defect(NOT_THOUGHT)
        said = text[at:]
        if opened is None and not closed:
            return before + said
        found = _THOUGHT.match(said)
        assert found is not None, "it matches everywhere"
        rest, bare = said[found.end() :], (found["thought"] or "").startswith("</think>")
        if closed:
            return before + rest
        return before + (found["thought"] if bare and not thought else f"{thought}{_NO_THOUGHT}") + rest

    def _reply_at(self, prompt: str, text: str, turns: Sequence[Turn], tools: str) -> int | None:
        """Where the last reply begins in a text whose beginning may differ from that of the prompt: behind what the
        prompt has from the last turn on."""
        if text.startswith(prompt):
            return len(prompt)
        since = self._last_said(turns, tools)
        if since is None or since >= len(prompt):
            return None
        end, at = prompt[since:], -1
        for _ in range(prompt.count(end)):
            if (at := text.find(end, at + 1)) < 0:
                return None
        return at + len(end)

    def _last_said(self, turns: Sequence[Turn], tools: str) -> int | None:
        """Where in the prompt the content of the turn before the last reply begins, as it is or as JSON."""
        said = turns[-2].said.strip() if len(turns) > 1 else ""
        if not said:
            return None
        forms = {said, *(json.dumps(said, ensure_ascii=each)[1:-1] for each in (True, False))}
        prompt = self._written(turns[:-1], tools)
        return max((at for form in forms if (at := prompt.rfind(form)) >= 0), default=None)

    def _empty_thought(self, before: str, turns: Sequence[Turn], tools: str) -> tuple[int, str] | None:
        """Where in the prompt a thought of nothing begins, between two special tokens at its end, and the first of
        these; None: there is none."""
        asked = self._written(turns[:-1], tools)
        begin = len(asked) if before.startswith(asked) else 0
        found = sorted((at, token) for token in self.special if (at := before.find(token, begin)) >= 0)
        for at, token in found:
            thought = before[at:].strip()
            last = next((each for each in self.special if thought.endswith(each)), None)
            if last not in (None, token, thought) and sum(map(thought.count, self.special)) == 2:
                return at, token
        return None

    def _following(self, text: str, turns: Sequence[Turn], tools: str, otherwise: str) -> str:
        """What ends the last of these turns, with which the text ends: behind a call the result follows."""
        if turns[-1].calls:
            with contextlib.suppress(Defect):
                followed = self._written((*turns, Turn(TOOL, _PROBE[0], False)), tools).removeprefix(text).lstrip()
                return next((token for token in self.ends if followed.startswith(token)), otherwise)
        return otherwise

    def _written(self, turns: Sequence[Turn], tools: str = "", *, asking: bool = False) -> str:
        """`asking`: with the generation prompt behind it. Raises Defect; Rejected (`chat_template`) beyond a limit."""
        template, names = self._template_of(tools), tuple(self.names.items())
        style = _style(template, names) if any(turn.calls for turn in turns) else _Style(True, "")
        return self._rendered([_message(turn, style) for turn in turns], tools, asking)

    def _rendered(self, said: list[dict[str, object]], tools: str, asking: bool) -> str:
        """As `_written`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with cpu_limit(_LONGEST_S, or_killed=True), memory_growth(_MOST_BYTES):
                rendered: Any = render_jinja_template(
                    [said],
                    [dict(tool) for tool in _loaded(tools)] or None,
                    chat_template=self._template_of(tools),
                    add_generation_prompt=asking,
                    **dict[str, Any](self.names),
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
        if len(written) > _MOST_ADDED + _MOST_TIMES * (len(str(said)) + len(tools)):
            raise Defect(TOO_LONG)
        return written


class _Style(NamedTuple):
    """How a template takes replies with calls."""

    as_objects: bool
    """Whether arguments are objects; else JSON."""
    no_content: str | None
    """The content of a reply that only calls."""


def _message(turn: Turn, style: _Style) -> dict[str, object]:
    """A turn as templates know it."""
    found: dict[str, object] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        found |= dict.fromkeys(REASONING, turn.reasoning)
    if turn.calls:
        calls = json.loads(turn.calls)
        for function in (call["function"] for call in calls if not style.as_objects):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        found |= {"tool_calls": calls, "content": turn.content or style.no_content}
    return found | {key: value for key, value in (("name", turn.name), ("tool_call_id", turn.call_id)) if value}


@functools.lru_cache(_SEQUENCES)
def _style(template: str | None, names: tuple[tuple[str, str], ...]) -> _Style:
    """That in which the template writes a call; the usual one where it writes none."""
    turns = Turn("user", _PROBE[0], False), _calling(_PROBE[1], "")
    for style in (_Style(*both) for both in product((True, False), ("", None))):
        with contextlib.suppress(Defect):
            text = ChatFormat(template, dict(names), (), ())._rendered(
                [_message(turn, style) for turn in turns], _TOOL_PROBE, asking=False
            )
            if _CALLED in text and _PROBE[1] in text and "{'" not in text:
                return style
    return _Style(True, "")


def _calling(said: str, content: str) -> Turn:
    """A reply that calls a function, with one argument."""
    call = {"id": _CALLED, "type": "function", "function": {"name": _CALLED, "arguments": {"said": said}}}
    return Turn(ASSISTANT, content, False, calls=json.dumps([call]))


def _end_of_calls(turn: Turn, text: str, at: int) -> int:
    """Where the last call of a reply ends in its text, whose content ends `at`. Raises Defect."""
    last = at
    for function in (call["function"] for call in json.loads(turn.calls or "[]")):
        last = text.find(function["name"], last)
        if last < 0:
            raise Defect(NO_CALLS)
        last += len(function["name"])
        for value in _values(function["arguments"]):
            as_json = (json.dumps(value, ensure_ascii=ascii_alone) for ascii_alone in (False, True))
            forms = {str(value), *(form.strip('"') for form in as_json)}
            found = [place + len(form) for form in forms if (place := text.find(form, at)) >= 0]
            if not found:
                raise Defect(NO_CALLS)
            last = max(last, *found)
    return last


def _values(value: object) -> Iterator[str | int | float]:
    """Texts and numbers in a value of JSON."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _values(each)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


@functools.lru_cache(64)
def _loaded(tools: str) -> tuple[Mapping[str, object], ...]:
    return tuple(json.loads(tools or "[]"))


def _plain_span(begin: int, text: str, target: str, learn: Learn) -> Span:
    """What is learned of a text without a template, whose target begins there. Raises Defect."""
    thought, answer = Turn(ASSISTANT, target, True).parts
    if learn == "all" or (learn == "answer" and not thought):
        return Span(begin, len(text))
    if not thought:
        raise Defect(NO_REASONING)
    answer_at, of = text.rindex(answer, begin), (begin, len(text))
    return Span(answer_at, len(text), of) if learn == "answer" else Span(begin, answer_at, of)


def _alike(one: str, other: str) -> int:
    """Characters with which both begin."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


@functools.lru_cache(_SEQUENCES)
def _left_out(
    template: str | None, names: tuple[tuple[str, str], ...], shape: tuple[tuple[str, bool, bool], ...], tools: bool
) -> tuple[int, ...]:
    """Of a chat in which every turn says something that nothing else in it says. `shape`: of each turn its role, and
    whether it has a content and calls."""
    said = [f"what turn {place} of all says" for place in range(len(shape))]
    called = [f"what turn {place} of all calls with" for place in range(len(shape))]
    turns = [
        _calling(argument, content if has_content else "")
        if calls
        else Turn(role, content, False, call_id=_CALLED if role == TOOL else "")
        for (role, has_content, calls), content, argument in zip(shape, said, called, strict=True)
    ]
    chat, tools_json = ChatFormat(template, dict(names), (), ()), _TOOL_PROBE if tools else ""
    try:
        text = chat._written(turns, tools_json)
        if turns[-1].role == ASSISTANT:  # a template may write a system prompt with the last question alone
            text += chat._written(turns[:-1], tools_json, asking=True)
    except Defect:  # it wants contents of its own, such as JSON
        return ()
    left_out = [
        place
        for place, (_, has_content, calls) in enumerate(shape)
        if (calls and called[place] not in text) or ((has_content or not calls) and said[place] not in text)
    ]
    return (*left_out, *([_TOOLS] if tools and _TOOL not in text else []))
