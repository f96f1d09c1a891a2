"""Calls in what a model wrote, read back as its chat template writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.spec import parse_spec
from tests.training.tasks.causal.test_chats import CALLING, OPENS, WEATHER
from tests.training.tasks.causal.test_chats import words as words
from tests.training.tasks.causal.test_rows import CHATML, with_template
from tests.training.tasks.causal.test_rows import folder as folder
from worker.training.generation.writing import calls_in
from worker.training.rows.chat import ASSISTANT, Turn
from worker.training.rows.text import Texts
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.causal.tool_calls import possible_calls

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
TOOLS = json.dumps([WEATHER, CLOCK])


def calling(written: str, between: str = "") -> str:
    """ChatML whose replies write each call so; `between`: what stands before the first."""
    end = " + '<|im_end|>' + '\\n' }}"
    assert end in CHATML
    return "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML.replace(
        end,
        " }}{% if message.tool_calls %}{{ '" + between + "' }}{% for t in message.tool_calls %}"
        "{% set f = t.function %}" + written + "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}",
    )


FORMATS = {
    "qwen": calling(
        "{{ '\n<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson + '}' }}"
    ),
    "llama": calling("{{ {'name': f.name, 'parameters': f.arguments} | tojson }}"),
    "mistral": calling("{{ {'name': f.name, 'arguments': f.arguments, 'id': '-'} | tojson + ', ' }}", "<|end|>["),
    "mistral 3": calling("{{ '<|start|>' + f.name + '<|channel|>' + f.arguments | tojson }}"),
    "deepseek": calling("{{ 'function<|channel|>' + f.name + '\n```json\n' + f.arguments | tojson + '\n```<|end|>' }}"),
    "qwen coder": calling(
        "{{ '<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments.items() %}"
        "{{ '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}"
    ),
    "glm": calling(
        "{{ '\n<tool_call>' + f.name + '\n' }}{% for k, v in f.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n"
        "<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
    ),
    "minimax": calling(
        "{{ '<ns:invoke name=\"' + f.name + '\">' }}{% for k, v in f.arguments.items() %}"
        "{{ '<ns:parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</ns:parameter>' }}{% endfor %}"
        "{{ '</ns:invoke>' }}"
    ),
    "command": calling("{{ {'tool_call_id': '0', 'tool_name': f.name, 'parameters': f.arguments} | tojson }}"),
    "lfm": calling(
        "{{ ('[' if loop.first else ', ') + f.name + '(' }}{% for k, v in f.arguments.items() %}"
        "{{ ', ' if not loop.first }}{{ k + '=' + v | tojson }}{% endfor %}{{ ')' + (']' if loop.last else '') }}"
    ),
    "with ids": calling("{{ f.name + '<|channel|>' + t.id + '<|message|>' + f.arguments | tojson }}"),
    "channels": CALLING["no content"].template,
    "thinks": CALLING["json"].template,
    "begins to think": "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    + OPENS.replace("{{ c }}", "{{ c }}{% for t in m.tool_calls or [] %}{{ t.function | tojson }}{% endfor %}"),
}
CALLS: dict[str, list[dict[str, Any]]] = {
    "one": [{"name": "weather", "arguments": {"city": 'Łódź, "old town"', "days": 3}}],
    "text of digits": [{"name": "clock", "arguments": {"zone": "3", "days": 3}}],
    "nested": [{"name": "weather", "arguments": {"where": {"city": "Oslo", "name": "clock"}, "days": [1, 2]}}],
    "two": [{"name": "clock", "arguments": {"zone": "CET"}}, {"name": "weather", "arguments": {"city": "Oslo"}}],
}
ASKED = (Turn("user", "How is it?", False),)


def reply_of(chat: Any, content: str, called: list[dict[str, Any]]) -> str:
    """As the template writes it, without special tokens."""
    calls = [{"id": f"call0000{at}", "type": "function", "function": each} for at, each in enumerate(called)]
    turn = Turn(ASSISTANT, content, True, calls=json.dumps(calls))
    text, begin, _, end = chat._reply((*ASKED, turn), TOOLS)
    reply = str(text[begin:end])
    for token in chat.special:
        reply = reply.replace(token, "")
    return reply.strip()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("content", ["", "Let me look {once} at the clock."])
def test_calls_come_back_as_the_template_got_them(
    format: str, calls: str, content: str, words: Path, tmp_path: Path
) -> None:
    chat = with_template(words, tmp_path, FORMATS[format]).chat
    content = "" if format == "channels" else content  # it writes one of both
    found = chat.called(Texts("", "", turns=ASKED, tools=TOOLS), reply_of(chat, content, CALLS[calls]))
    assert found is not None and found.parts[1] == content
    made = json.loads(found.calls)
    assert [call["function"] for call in made] == CALLS[calls]
    assert len({call["id"] for call in made}) == len(made)


@pytest.mark.parametrize(
    "reply",
    [
        "It rains.", "", '{"name": "weather"}', '{"name": "other", "arguments": {}}', "weather", "[weather]({",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}\n</tool_call>', "<function=weather>",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}} and more', "{" * 100_000,
        # as another format writes it
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    ],
)  # fmt: skip
def test_what_the_template_does_not_write_stays_text(reply: str, words: Path, tmp_path: Path) -> None:
    chat = with_template(words, tmp_path, FORMATS["qwen"]).chat
    assert chat.called(Texts("", "", turns=ASKED, tools=TOOLS), reply) is None


@pytest.mark.parametrize("parameters", ["x", {"properties": {"city": "string"}}, {"properties": ["city"]}, None, 3])
def test_schemas_that_are_none_are_left_alone(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    reply = "<function=weather><parameter=city>Oslo</parameter></function>"
    [(content, calls), *_] = possible_calls(reply, tools)
    assert content == "" and json.loads(calls)[0]["function"]["arguments"] == {"city": "Oslo"}


def test_a_model_that_repeats_itself_costs_no_time() -> None:
    for reply in (
        "<tool_call>weather\n<arg_key>city" * 5_000,
        '<x:invoke name="weather">' * 5_000,
        "[weather(" * 5_000,
    ):
        assert not list(possible_calls(reply, json.loads(TOOLS)))


def test_a_reply_of_very_many_calls_is_none() -> None:
    assert not list(possible_calls('{"name": "clock", "arguments": {}}' * 129, json.loads(TOOLS)))


def test_an_answer_has_its_calls_in_openais_form(words: Path, tmp_path: Path) -> None:
    tokenizer = with_template(words, tmp_path, FORMATS["qwen"])
    data = parse_spec({"data": {"train": "rows.jsonl"}}).data
    prompt = Causal().asked(tokenizer, Texts("", "", turns=ASKED, tools=TOOLS), data)
    found = calls_in(prompt, reply_of(tokenizer.chat, "Wait.", CALLS["one"]))
    [call] = found["tool_calls"]
    assert found["content"] == "Wait." and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == CALLS["one"][0]["arguments"]
    assert calls_in(prompt, "Wait.") == {}
    assert calls_in(Causal().asked(tokenizer, Texts("", "", turns=ASKED), data), '{"name": "clock"}') == {}
