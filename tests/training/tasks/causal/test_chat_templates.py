"""Chat templates that the job gives, in place of the tokenizer's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoTokenizer

from jobs.errors import Rejected, StageError
from jobs.spec import CHAT_TEMPLATE_CHARACTERS, NamedChatTemplate, parse_spec
from tests.training.attempts import attempt, logged, same_tensors
from tests.training.tasks.causal.test_chats import DROPS, Learned, chat_of, runs
from tests.training.tasks.causal.test_rows import LIMITS, texts_of, with_template
from tests.training.tasks.causal.test_rows import folder as folder
from tests.training.workplace import Workplace
from worker.training.tasks.causal.chat_templates import NAMED
from worker.training.tasks.causal.rows import CausalEncoder, CausalTokenizer, tried
from worker.training.tasks.registry import task_for

ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama-3": "<|eot_id|>"}
"""Of a reply; of the others, the tokenizer's own end token."""
TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "</s>"]
OWN = (
    "{% for m in messages %}{{ m.role | upper + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def base(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's tokenizer: the tokens of every format, and no template."""
    path = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.eos_token = "</s>"
    tokenizer.save_pretrained(path)
    with_template(path, path, None)
    return path


@pytest.mark.parametrize(("name", "replies", "system"), [*product(NAMED, (1, 2, 5), (False, True))])
def test_each_reply_is_learned_behind_what_a_server_asks_with(
    name: NamedChatTemplate, replies: int, system: bool, base: Path
) -> None:
    said = chat_of(replies, system=system, thinks=None)
    tokenizer = CausalTokenizer.read(base, NAMED[name])
    rows = CausalEncoder(tokenizer, LIMITS | {"input": 2000}, everything=False).encode([texts_of({"messages": said})])
    assert not rows.defects and rows.examples == [1]
    stock: Any = AutoTokenizer.from_pretrained(base)
    places = [place for place, turn in enumerate(said) if turn["role"] == "assistant"]
    asked = [
        stock.apply_chat_template(said[:at], chat_template=NAMED[name], tokenize=False, add_generation_prompt=True)
        for at in places
    ]
    space = " " if name in ("mistral", "vicuna") else ""
    replied = [f"{space}{said[at]['content']}{ENDS.get(name, '</s>')}" for at in places]
    assert runs(tokenizer, rows) == [[Learned(*both) for both in zip(asked, replied, strict=True)]]
    assert all(turn["content"] in asked[-1] for turn in said[:-1])


def test_every_name_has_a_template() -> None:
    assert set(NAMED) == set(get_args(NamedChatTemplate))


def test_a_file_is_read_once_and_the_delivered_model_has_it(workplace: Workplace) -> None:
    rows = [{"messages": chat_of(1 + number, system=False, thinks=None)} for number in range(24)]
    workplace.rows("chats.jsonl", rows)
    file = workplace.data / "own.jinja"
    file.write_text(OWN)
    settings: dict[str, Any] = {
        "model": "builtin:qwen-tiny",
        "data": {"validation": 0.0, "chat_template": "own.jinja"},
        "training": {"epochs": 1, "batch_size": 4},
        "checkpoint": {"every_steps": 2},
        "evaluation": {"every_steps": 100, "samples": 0},
    }
    whole, stopped = (workplace.job("chats.jsonl", **settings) for _ in range(2))
    for run in (whole, stopped):
        workplace.check(run)
        assert run.plan().data.chat_template == OWN
        [shown] = run.preview().sources
        assert "".join(span.text for span in shown.rows[0].spans).startswith("USER: How heavy is kettle 0?<|im_end|>")
    file.unlink()
    for run in (whole, stopped):
        workplace.prepare_only(run)
    assert attempt(whole) == 0 and attempt(stopped, stop_at=3) == 75 and attempt(stopped, 2) == 0
    assert logged(whole) == logged(stopped)
    assert same_tensors(whole.model / "model.safetensors", stopped.model / "model.safetensors")
    delivered: Any = AutoTokenizer.from_pretrained(whole.model)
    asked = delivered.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    assert asked == "USER: How heavy is kettle 0?<|im_end|>ASSISTANT: "


def test_check_shows_a_row_whose_template_writes_earlier_replies_otherwise(workplace: Workplace) -> None:
    workplace.rows("chats.jsonl", [{"messages": chat_of(2, system=False, thinks="content")}] * 8)
    run = workplace.job("chats.jsonl", model="builtin:qwen-tiny", data={"validation": 0.0, "chat_template": DROPS})
    workplace.check(run)
    [shown] = run.preview().sources
    assert "<think>" in "".join(span.text for span in shown.rows[0].spans if span.learned)


def test_another_template_is_another_preparation(workplace: Workplace) -> None:
    workplace.rows("chats.jsonl", [{"messages": chat_of(1, system=False, thinks=None)}] * 8)
    folders = set()
    for given in (None, "chatml", OWN):
        run = workplace.job("chats.jsonl", model="builtin:qwen-tiny", data={"validation": 0.0, "chat_template": given})
        workplace.check(run)
        workplace.prepare_only(run)
        folders.add(run.plan().data.prepared)
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "file_missing"),
        (b"no template", "chat_template"),
        (b"{{ \xff }}", "chat_template"),
        (b"{" + b" " * CHAT_TEMPLATE_CHARACTERS, "chat_template"),
    ],
)
def test_a_file_that_is_no_template_is_named(workplace: Workplace, content: bytes | None, code: str) -> None:
    workplace.rows("chats.jsonl", [{"messages": chat_of(1, system=False, thinks=None)}] * 8)
    if content is not None:
        (workplace.data / "own.jinja").write_bytes(content)
    run = workplace.job("chats.jsonl", model="builtin:qwen-tiny", data={"chat_template": "own.jinja"})
    with pytest.raises(StageError, match="chat_template: ") as refused:
        workplace.check(run)
    assert refused.value.detail_code == code


def test_a_template_whose_end_is_no_special_token_is_refused(folder: Path) -> None:
    tokenizer = CausalTokenizer.read(folder, NAMED["gemma"])
    with pytest.raises(Rejected, match="does not end a reply with an end token") as refused:
        tried(tokenizer, [texts_of({"messages": chat_of(1, system=False, thinks=None)})], LIMITS, everything=False)
    assert str(refused.value.hint).startswith("set data.chat_template to alpaca, mistral or vicuna, which end replies")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"data": {"train": "x.jsonl", "chat_template": "chat-ml"}}, "give one of alpaca, chatml, gemma"),
        ({"data": {"train": "x.jsonl", "chat_template": "chatml"}, "task": "seq2seq"}, "writes chats: leave it out"),
    ],
)
def test_what_is_no_template_and_what_has_no_chats_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_spec(parts)


def test_a_model_that_writes_no_chats_is_refused_once_it_is_known() -> None:
    spec = parse_spec({"data": {"train": "x.jsonl", "chat_template": "chatml"}})
    with pytest.raises(Rejected, match="chats are learned by causal models alone"):
        task_for(spec, {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "t5")
