"""The turns of a chat, as OpenAI or ShareGPT write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from worker.training.rows.row import Defect

ASSISTANT = "assistant"
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), ASSISTANT)
"""Other names of roles."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that some templates write before its text: without them another reply would be learned."""
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

    def saying(self, content: str) -> Turn:
        """The same turn with another content."""
        return replace(self, content=content)


def chat_field(turns: list[Any], name: str) -> str | None:
    """A field of a chat's turns: `completion` is the last reply, `prompt` all turns before it; None: there is none.

    Raises Defect as `turns_of`.
    """
    found = turns_of(turns) if name in CHAT_FIELDS else None
    if found is None:
        return None
    return found[-1].content if name == "completion" else written(found[:-1])


def without_json(value: Any) -> Any:
    """The turns of a chat that is written as JSON, as tables hold it; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_chat = found and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in found)
    return found if is_chat else value


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


def asked_turns(value: Any) -> tuple[Turn, ...] | None:
    """The turns that the next reply follows: all, or those before a reply at the end. None: it is no chat.

    Raises Defect if a turn is not text alone, or nothing was asked.
    """
    turns = [_turn(turn) for turn in value] if isinstance(value, list) else [None]
    if None in turns:
        return None
    found = [turn for turn in turns if turn is not None]
    if found[-1].role == ASSISTANT:
        found.pop()
    if not found:
        raise Defect("a chat in which nothing is asked")
    return tuple(replace(turn, learned=False) for turn in found)


def written(turns: Sequence[Turn]) -> str:
    """Turns as one text: a single one by itself, several as `user: … assistant: …`."""
    return turns[0].content if len(turns) == 1 else " ".join(f"{turn.role}: {turn.content}" for turn in turns)


def _turn(turn: Any) -> Turn | None:
    """None: it is no turn. Raises Defect if it is not text alone."""
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if isinstance(turn, dict) and isinstance(role := turn.get(role_key), str):
            content = turn.get(content_key)
            if isinstance(content, list):  # of parts, such as {"type": "text", "text": "…"}
                parts = [part.get("text") if isinstance(part, dict) else part for part in content]
                texts = [text for text in parts if isinstance(text, str)]
                content = "".join(texts) if len(texts) == len(parts) else None
            if turn.get("tool_calls") or turn.get("function_call"):
                raise Defect("a turn with a tool call, which cannot be learned")
            if not isinstance(content, str):
                raise Defect("a turn that is not text alone")
            if any(turn.get(each) for each in _REASONING):
                raise Defect("a turn with its reasoning apart from its text")
            name = ROLES.get(role.lower(), role.lower())
            return Turn(name, content, learned=name == ASSISTANT and turn.get("weight") != 0)
    return None
