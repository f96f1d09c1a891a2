"""The turns of a chat, as OpenAI or ShareGPT write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from worker.training.rows.row import Defect

ASSISTANT, SYSTEM, TOOL = "assistant", "system", "tool"
_CALL = "function_call"
"""A turn, or a key of one, that calls a function."""
ROLES = (
    {"human": "user"}
    | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model", _CALL), ASSISTANT)
    | dict.fromkeys(("observation", "function", "tool_response"), TOOL)
)
"""Other names of roles."""
NO_CALL = "a tool call that is no name with arguments as JSON"
NO_FUNCTIONS = "tools that are no list of functions"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a reply for what it thought, of which a template knows one."""
_THOUGHT = ("<think>", "</think>")
"""Around the reasoning in a reply."""
CHAT_COLUMNS = ("messages", "conversations")
"""Columns, by their names in lower case, that hold chats and nothing else."""
TOOLS = "tools"
"""The column beside them with what OpenAI's chats may call."""
CHAT_FIELDS = ("prompt", "completion")
"""What a list of turns has, beside its items."""


@dataclass(frozen=True)
class Turn:
    """What one side said."""

    role: str
    content: str
    learned: bool
    """Whether it is a reply that the model learns to write."""
    reasoning: str = ""
    """What a reply thought, where the row has it apart from the content."""
    calls: str = ""
    """JSON: the tool calls of a reply, in OpenAI's form, their arguments as objects."""
    name: str = ""
    """Of a result, the function, where the row says it."""
    call_id: str = ""
    """Of a result, the call, likewise."""

    @property
    def texts(self) -> Sequence[str]:
        """All that is said."""
        return [text for text in (self.reasoning, self.content, self.calls, self.name, self.call_id) if text]

    @property
    def said(self) -> str:
        """The content; of a reply that only calls, its calls."""
        return self.content or self.calls

    @property
    def parts(self) -> tuple[str, str]:
        """The reasoning of a reply, apart or as `<think>…</think>`, and the answer; else "" and all of it."""
        if self.reasoning:
            return self.reasoning.strip(), self.content.strip()
        before, closing, answer = self.content.partition(_THOUGHT[1])
        if self.role != ASSISTANT or not closing:
            return "", self.content.strip()
        return before.strip().removeprefix(_THOUGHT[0]).strip(), answer.strip()


def chat_field(turns: list[Any], name: str) -> str | None:
    """A field of a chat's turns: `completion` is the last reply, `prompt` all turns before it; None: there is none.

    Raises Defect as `turns_of` and `of_text_alone`.
    """
    found = of_text_alone(turns_of(turns)) if name in CHAT_FIELDS else None
    if found is None:
        return None
    return found[-1].content if name == "completion" else written(found[:-1])


def tools_of(value: Any) -> str:
    """What a chat may call, a list of functions or its JSON, as JSON in OpenAI's form; "": nothing. Raises Defect."""
    if isinstance(value, str) and value.strip():
        value = _loaded(value, NO_FUNCTIONS)
    if value in (None, "", []) or (isinstance(value, str) and not value.strip()):
        return ""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Defect(NO_FUNCTIONS)
    wrapped = [one if isinstance(one.get("function"), dict) else {"type": "function", "function": one} for one in value]
    if not all(isinstance(one["function"].get("name"), str) for one in wrapped):
        raise Defect(NO_FUNCTIONS)
    return json.dumps(wrapped, ensure_ascii=False, default=str)


def without_json(value: Any) -> Any:
    """The turns of a chat that is written as JSON, as tables hold it; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if is_chat(found) else value


def turns_of_pair(prompt: Any, completion: Any) -> tuple[Turn, ...] | None:
    """The turns of a prompt and its completion, where both are chats or their JSON; only the completion is learned.

    None: they are none. Raises Defect as `turns_of`.
    """
    asked, answered = without_json(prompt), without_json(completion)
    if not (is_chat(asked) and is_chat(answered)):
        return None
    return turns_of([*({**turn, "weight": 0} for turn in asked), *answered])


def is_chat(value: Any) -> bool:
    """Whether it is a list of turns, of which there is one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
    )


def turns_of(value: Any) -> tuple[Turn, ...] | None:
    """The turns up to the last reply; None: it is no chat. A reply with OpenAI's `weight` 0 is not learned.

    Raises Defect if a turn is not text alone, or there is no reply.
    """
    turns = [_turn(turn) for turn in value] if isinstance(value, list) else [None]
    if None in turns:
        return None
    found = [turn for turn in turns if turn is not None]
    last = max((place for place, turn in enumerate(found) if turn.learned), default=None)
    if last is None:
        raise Defect("a chat without a reply")
    return tuple(found[: last + 1])


def of_text_alone(turns: tuple[Turn, ...] | None) -> tuple[Turn, ...] | None:
    """The same turns. Raises Defect where one has more than its content, which only a chat template can write."""
    if any(turn.calls for turn in turns or ()):
        raise Defect("a turn with a tool call, which only a chat template writes")
    if any(turn.reasoning for turn in turns or ()):
        raise Defect("a turn with its reasoning apart from its text")
    return turns


def asked_turns(value: Any, *, whole: bool = False) -> tuple[Turn, ...] | None:
    """The turns that the next reply follows: all, or those before a reply at the end. None: it is no chat.

    `whole`: a reply at the end stays.

    Raises Defect if a turn is not text alone, or nothing was asked.
    """
    turns = [_turn(turn) for turn in value] if isinstance(value, list) else [None]
    if None in turns:
        return None
    found = [turn for turn in turns if turn is not None]
    if found[-1].role == ASSISTANT and not whole:
        found.pop()
    if not found:
        raise Defect("a chat in which nothing is asked")
    return tuple(replace(turn, learned=False) for turn in found)


def turns_before(system: Any, history: Any) -> tuple[Turn, ...]:
    """The turns that a row's own follow: its system prompt, and those of its history, whose replies are learned too.

    Raises Defect where either is something else.
    """
    turns = []
    if system is not None:
        if (prompt := _text_of(system)) is None:
            raise Defect("a system prompt that is not text")
        if prompt.strip():
            turns.append(Turn(SYSTEM, prompt, learned=False))
    for item in _items_of(history):
        if (turn := _turn(item)) is not None:
            turns.append(turn)
        elif _is_exchange(item):
            turns += Turn("user", item[0], learned=False), Turn(ASSISTANT, item[1], learned=True)
        else:
            raise Defect("a history that is no list of turns, nor of [question, answer]")
    return tuple(turns)


def is_system(value: Any) -> bool:
    """Whether it can be a system prompt: a text, or a list of its parts."""
    return isinstance(value, str) or (isinstance(value, list) and _text_of(value) is not None)


def is_history(value: Any) -> bool:
    """Whether it is a list of turns or of [question, answer], or the JSON of one."""
    items = _items_of(value)
    return bool(items) and all(
        _is_exchange(item) or (isinstance(item, dict) and ("role" in item or "from" in item)) for item in items
    )


def _items_of(history: Any) -> list[Any]:
    if isinstance(history, str) and history.lstrip().startswith("["):
        try:
            history = json.loads(history)
        except (ValueError, RecursionError):
            return [history]
    if isinstance(history, list):
        return history
    return [] if history is None or history == "" else [history]


def _is_exchange(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _text_of(content: Any) -> str | None:
    """A text, or its parts such as {"type": "text", "text": "…"} as one; None: it is not text alone."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [text for text in parts if isinstance(text, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def written(turns: Sequence[Turn]) -> str:
    """Turns as one text: a single one by itself, several as `user: … assistant: …`."""
    return turns[0].said if len(turns) == 1 else " ".join(f"{turn.role}: {turn.said}" for turn in turns)


def _turn(turn: Any) -> Turn | None:
    """None: it is no turn. Raises Defect if it is not text alone."""
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if isinstance(turn, dict) and isinstance(role := turn.get(role_key), str):
            content, name = _text_of(turn.get(content_key)), ROLES.get(role.lower(), role.lower())
            called = turn.get("tool_calls") or turn.get(_CALL)
            if role.lower() == _CALL:
                called, content = content, ""
            calls = _calls_of(called) if called else ""
            if calls and name != ASSISTANT:
                raise Defect("a tool call that is no reply's")
            if content is None and calls and turn.get(content_key) is None:
                content = ""
            if content is None:
                raise Defect("a turn that is not text alone")
            learned = name == ASSISTANT and turn.get("weight") != 0
            of_result = (str(turn.get(key) or "") if name == TOOL else "" for key in ("name", "tool_call_id"))
            return Turn(name, content, learned, _reasoning_of(turn, name), calls, *of_result)
    return None


def _reasoning_of(turn: dict[str, object], role: str) -> str:
    """What a reply thought, apart from its content. Raises Defect where it is not text alone, or is no reply's."""
    found = [turn[each] for each in REASONING if turn.get(each)]
    if not found:
        return ""
    texts = [_text_of(each) for each in found]
    if role != ASSISTANT or None in texts or len(set(texts)) > 1:
        raise Defect("reasoning that is not one text of a reply")
    return texts[0] or ""


def _calls_of(called: Any) -> str:
    """JSON: calls in OpenAI's form; `called`: one or several, as objects or as JSON. Raises Defect."""
    if isinstance(called, str):
        called = _loaded(called, NO_CALL) or []
    calls = [_call_of(one) for one in (called if isinstance(called, list) else [called])]
    return json.dumps(calls, ensure_ascii=False, default=str) if calls else ""


def _call_of(call: Any) -> dict[str, object]:
    if not isinstance(call, dict):
        raise Defect(NO_CALL)
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _loaded(arguments, NO_CALL)
    arguments = {} if arguments in (None, "") else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Defect(NO_CALL)
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def _loaded(text: str, otherwise: str) -> Any:
    """Raises Defect."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Defect(otherwise) from None
