"""Calls of functions in what a model wrote, read back into OpenAI's form.

Chat templates write calls in many ways: JSON in tags (Qwen, Hermes), JSON alone (Llama), a name before JSON (Mistral,
DeepSeek, gpt-oss), tags of their own for each argument (Qwen3-Coder, GLM). What is found here is a guess. It counts
only where the template, given these calls, writes the same reply again (`ChatFormat.called`).
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
"""Keys under which a call that is one JSON object has them."""
_BEFORE = 120
"""Characters before its arguments in which the name of a function stands, at most."""
_MOST_CALLS = 128
_MOST_CONTENTS = 8
_TAGGED = (
    (re.compile(r"<function=(?P<name>[^>\s]+)>(?P<tag>)"), "</function>",
     r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"),
    (re.compile(r"<tool_call>\s*(?P<name>[^\s<{]+)(?P<tag>)"), "</tool_call>",
     r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    (re.compile(r"<(?P<tag>[^\s<>]*)invoke name=\"(?P<name>[^\"]+)\">"), "</{tag}invoke>",
     r"<{tag}parameter name=\"(?P<key>[^\"]+)\"[^>]*>(?P<value>.*?)</{tag}parameter>"),
)  # fmt: skip
"""How a call begins and ends, and an argument of it; {tag}: what stands in the tags of the beginning."""


class _Call(NamedTuple):
    begin: int
    name: str
    arguments: Mapping[str, object]


def possible_calls(reply: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(content, JSON of the calls in OpenAI's form, with arguments as objects) that a reply may be made of."""
    functions = {each["function"]["name"]: _object(each["function"].get("parameters")) for each in tools}
    for calls in (_tagged(reply, functions), list(_json(reply, functions)), _python(reply, functions)):
        if 0 < len(calls) <= _MOST_CALLS:
            written = _written(calls)
            before = reply[: calls[0].begin]
            word = re.search(r"\w*\W*$", before[-_BEFORE:])  # such as DeepSeek's "function"
            assert word is not None, "it matches everywhere"
            marks = [found.start() for found in re.finditer(r"[<\[{\n`]", before)][-_MOST_CONTENTS:]
            for end in sorted({0, *marks, len(before) - len(word[0]), len(before)}, reverse=True):
                yield before[:end].strip(), written


def _object(value: object) -> Mapping[str, Any]:
    """A part of a schema, which a client may have written otherwise."""
    return value if isinstance(value, dict) else {}


def _written(calls: Sequence[_Call]) -> str:
    return json.dumps(
        [
            # An id is as long as Mistral's templates want it.
            {
                "id": uuid.uuid4().hex[:9],
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for each in calls
        ],
        ensure_ascii=False,
    )


def _tagged(reply: str, functions: Mapping[str, Mapping[str, Any]]) -> list[_Call]:
    for opening, closing, argument in _TAGGED:
        found: list[_Call] = []
        at = 0
        while (call := opening.search(reply, at)) is not None:
            end = reply.find(closing.replace("{tag}", call["tag"]), call.end())
            if end < 0:
                break
            at = end
            if call["name"] in functions:
                types = _object(functions[call["name"]].get("properties"))
                given = re.finditer(
                    argument.replace("{tag}", re.escape(call["tag"])), reply[call.end() : end], re.DOTALL
                )
                values = {each["key"]: _typed(each["value"], _object(types.get(each["key"]))) for each in given}
                found.append(_Call(call.start(), call["name"], values))
        if found:
            return found
    return []


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
        name = next((value[key] for key in _NAMES if key in value), None)
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


def _python(reply: str, functions: Mapping[str, Any]) -> list[_Call]:
    """Calls as Python writes them, in a list, such as LFM2's."""
    begin = next((found.start() for found in re.finditer(r"\[(?=\w+\()", reply)), None)
    if begin is None:
        return []
    try:
        tree = ast.parse(reply[begin : reply.rfind(")]") + 2], mode="eval").body
        calls = [each for each in tree.elts if isinstance(each, ast.Call)] if isinstance(tree, ast.List) else []
        return [
            _Call(begin, each.func.id, {str(one.arg): ast.literal_eval(one.value) for one in each.keywords})
            for each in calls
            if isinstance(each.func, ast.Name) and each.func.id in functions
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
