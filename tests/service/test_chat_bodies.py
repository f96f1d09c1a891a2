"""What clients of OpenAI's API send: what changes no reply is taken, what would change one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.errors import UserError
from service.generation.asking import body_of
from service.generation.openai import chat_body, generate_body

CHAT: dict[str, Any] = {"model": "ft:chef", "messages": [{"role": "user", "content": "What is in it?"}]}


@pytest.mark.parametrize(
    "more",
    [
        {"user": "a", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "a"},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}, "prompt_cache_key": "a"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": [{"type": "function", "function": {"name": "weather"}}], "tool_choice": "none"},
        {"tools": None, "stop": None, "functions": None, "reasoning_effort": None, "stream": None},
    ],
)
def test_what_changes_no_reply_is_taken(more: dict[str, Any]) -> None:
    assert generate_body(chat_body(CHAT | more), None) == generate_body(chat_body(CHAT), None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2), ("logprobs", True), ("frequency_penalty", 0.5),
        ("logit_bias", {"1": 5}), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
    ],
)  # fmt: skip
def test_what_would_change_a_reply_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{key}: is not supported: leave it out") as refused:
        chat_body(CHAT | {key: value})
    assert refused.value.param == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reasoning_effort", "low"), ("max_tokens", 0), ("max_completion_tokens", 0), ("temperature", 3),
        ("top_p", 0), ("seed", -1), ("stop", list("abcde")), ("stop", ""), ("stop", 3),
    ],
)  # fmt: skip
def test_an_error_names_the_key_that_the_client_sent(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{key}: ") as refused:
        generate_body(chat_body(CHAT | {"max_tokens": 4} | {key: value}), None)
    assert refused.value.param == key


@pytest.mark.parametrize(("given", "taken"), [("x", ["x"]), (["x", "\n"], ["x", "\n"]), ([], []), (None, [])])
def test_texts_to_stop_at_are_one_or_several(given: object, taken: list[str]) -> None:
    assert generate_body(chat_body(CHAT | {"stop": given}), None).stop == taken


def test_an_image_is_refused_in_one_sentence() -> None:
    turn = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}
    with pytest.raises(UserError, match=r"^messages\.0\.content: must be a string, or an array of parts of type text"):
        chat_body(CHAT | {"messages": [turn]})


def test_tools_calls_and_results_are_passed_on() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "rain", "tool_call_id": "call00000", "name": "weather"},
    ]
    sent = generate_body(chat_body(CHAT | {"messages": turns, "tools": tools}), None)
    assert sent.tools == tools and sent.messages is not None
    assert [each.model_dump(exclude_none=True) for each in sent.messages] == [
        *turns[:1], {"content": ""} | {key: value for key, value in turns[1].items() if value is not None}, turns[2],
    ]  # fmt: skip
    with pytest.raises(UserError, match="tools go with messages"):
        body_of({"input": "a", "tools": tools})


def test_a_reply_goes_back_as_the_client_had_it() -> None:
    reply = {"role": "assistant", "content": "Bread.", "refusal": None, "tool_calls": None, "audio": None}
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "soup?"}]
    turns = [
        {"role": "developer", "content": "Be short."},
        *CHAT["messages"],
        reply,
        {"role": "user", "content": parts},
    ]
    sent = generate_body(chat_body(CHAT | {"messages": turns, "max_completion_tokens": 5, "max_tokens": 9}), None)
    assert sent.messages is not None
    assert [(each.role, each.content) for each in sent.messages] == [
        ("system", "Be short."), ("user", "What is in it?"), ("assistant", "Bread."), ("user", "And soup?"),
    ]  # fmt: skip
    assert sent.max_new_tokens == 5
