"""Calls of functions in what a model wrote, read back into OpenAI's form.

Chat templates write calls in many ways: JSON in tags (Qwen, Hermes), JSON alone (Llama), a name before JSON (Mistral,
DeepSeek, gpt-oss), tags of their own for each argument (Qwen3-Coder, GLM). What is found here is a guess. It counts
only where the template, given these calls, writes the same reply again (`ChatFormat.called`).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_ARGUMENTS = ("arguments", "parameters")
"""Keys under which a call that is one JSON object has them."""
_BEFORE = 120
"""Characters before its arguments in which the name of a function stands, at most."""
_MOST_CALLS = 128
_MOST_CONTENTS = 8
_TAGGED = (
    re.compile(r"<function=(?P<name>[^>\s]+)>(?P<given>.*?)</function>", re.DOTALL),
    re.compile(r"<tool_call>\s*(?P<name>[^\s<{]+)(?P<given>[^{]*?(?:<arg_key>.*?)?)</tool_call>", re.DOTALL),
)
_GIVEN = (
    re.compile(r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
    re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
)


class _Call(NamedTuple):
    begin: int
    name: str
    arguments: Mapping[str, object]


def possible_calls(reply: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(content, JSON of the calls in OpenAI's form, with arguments as objects) that a reply may be made of."""
    functions = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
    calls = _tagged(reply, functions) or list(_json(reply, functions))
    if not 0 < len(calls) <= _MOST_CALLS:
        return
    ids = [uuid.uuid4().hex[:9] for _ in calls]  # as long as Mistral's templates want them
    written = json.dumps(
        [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in zip(ids, calls, strict=True)
        ],
        ensure_ascii=False,
    )
    before = reply[: calls[0].begin]
    word = re.search(r"\w*\W*$", before)  # such as DeepSeek's "function"
    assert word is not None, "it matches everywhere"
    marks = [found.start() for found in re.finditer(r"[<\[{\n`]", before)][-_MOST_CONTENTS:]
    for end in sorted({0, *marks, word.start(), len(before)}, reverse=True):
        yield before[:end].strip(), written


def _tagged(reply: str, functions: Mapping[str, Mapping[str, Any]]) -> list[_Call]:
    found: list[_Call] = []
    for tagged, given in zip(_TAGGED, _GIVEN, strict=True):
        for call in tagged.finditer(reply):
            if (parameters := functions.get(call["name"])) is not None:
                types = parameters.get("properties") or {}
                arguments = {
                    each["key"]: _typed(each["value"], types.get(each["key"]) or {})
                    for each in given.finditer(call["given"])
                }
                found.append(_Call(call.start(), call["name"], arguments))
    return found


def _typed(text: str, type: Mapping[str, Any]) -> object:
    """A value without quotes, as the function's schema wants it."""
    if type.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(reply: str, functions: Mapping[str, Any]) -> Iterator[_Call]:
    decode, at, ended = json.JSONDecoder(strict=False).raw_decode, reply.find("{"), 0
    while at >= 0:
        try:
            value, end = decode(reply, at)
        except (ValueError, RecursionError):
            at = reply.find("{", at + 1)
            continue
        name = value.get("name")
        arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
        if isinstance(name, str) and name in functions and isinstance(arguments, dict):
            yield _Call(at, name, arguments)
        else:
            said = reply[max(ended, at - _BEFORE) : at]
            named = [(place, len(name), name) for name in functions if (place := said.rfind(name)) >= 0]
            if named:
                place, _, name = max(named)
                yield _Call(at - len(said) + place, name, value)
        at, ended = reply.find("{", end), end
