"""Chats as tokens: those of transformers, and of them exactly the replies are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from jobs.companions import NO_COMPANIONS
from jobs.errors import Rejected
from worker.training.dataset.encoding import EncodedRows
from worker.training.rows.row import Defect
from worker.training.rows.text import RowReader, Texts, template
from worker.training.tasks.causal import builtin, chat
from worker.training.tasks.causal.batches import prompt_length
from worker.training.tasks.causal.rows import INDENTED, CausalEncoder, CausalTokenizer, tried
from worker.training.tasks.causal.task import Causal

LIMITS = {"input": 256, "target": 256}
CHATML = builtin.CHAT_TEMPLATE
# The ways of well-known models, in short.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|head|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<|start|>' + role + '\n' + m['content'] | trim + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
GOOD = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA}
_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
BROKEN = {
    "no end token": ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
                     "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", "does not end a reply"),
    "a prompt of its own": ("{% for m in messages %}" + _TURN + "{% endfor %}"
                            "{% if add_generation_prompt %}{{ 'Now answer:' }}{% endif %}", "changes earlier turns"),
    "newest first": ("{% for m in messages | reverse %}" + _TURN + "{% endfor %}" + _ASK, "changes earlier turns"),
    "leaves replies out": ("{% for m in messages if m['role'] != 'assistant' %}" + _TURN + "{% endfor %}" + _ASK,
                           "changes earlier turns"),
    "ends twice": ("{% for m in messages %}{{ '<|im_start|>' + m.role }}{{ '<|im_end|>' + m.content + '<|im_end|>' }}"
                   "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}",
                   "writes an end token within a reply"),
    "shouts": ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | upper + '<|im_end|>\n' }}"
               "{% endfor %}" + _ASK, "does not repeat a reply"),
    "cuts": ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'][:3] + '<|im_end|>\n' }}"
             "{% endfor %}" + _ASK, "does not repeat a reply"),
    "wants tools": ("{{ raise_exception('tools are missing') }}", "refuses the turns"),
    "divides": ("{{ 1 / 0 }}", "refuses the turns: division by zero"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the turns: maximum recursion"),
    "is too large": ("{{ 'a' * 10 ** 30 }}", "refuses the turns: cannot fit"),
    "reads": ("{{ cycler.__init__.__globals__ }}", "refuses the turns: access to attribute '__init__'"),
    "half a character": ("{{ '\\ud83d' }}", "refuses the turns: 'utf-8' codec"),
    "is endless": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                   "computes for more than 0.2 s for one row"),
    "takes memory": ("{{ 'x' * 2 ** 30 }}", "needs more than 512 MiB of memory for one row"),
    "writes too much": ("{{ 'x' * 40000 }}{% for m in messages %}" + _TURN + "{% endfor %}" + _ASK,
                       "writes far more than the turns hold"),
    "is no template": ("{% for m in messages %}", "refuses the turns"),
    "another name": ("{% for m in messages %}{{ m['text'] }}{% endfor %}", "does not end a reply"),
}  # fmt: skip
PAIR = {"prompt": "two plus two", "completion": "four"}
ROW = {
    "messages": [
        {"role": "user", "content": "Where is my kettle?"},
        {"role": "assistant", "content": "It is on its way."},
        {"role": "user", "content": "When does it come?"},
        {"role": "assistant", "content": "On Monday, ½ past two.\nGood bye!"},
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = builtin.learn_tokenizer(["Where is my kettle? It is on its way. On Monday. When does it come?"] * 3)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|head|>", "<|eot|>", "<s>"]})
    tokenizer.bos_token = "<s>"
    tokenizer.save_pretrained(path)
    return path


def with_template(folder: Path, tmp_path: Path, text: str | None, **generation: Any) -> CausalTokenizer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = text
    tokenizer.save_pretrained(tmp_path)
    return CausalTokenizer.read(tmp_path)


def texts_of(row: dict[str, Any], input: str | None = None, target: str = "messages") -> Texts:
    own = Causal().target_template(target, NO_COMPANIONS)
    return RowReader(None if input is None else template(input, "data.input"), own, None).read(row)


def encoded(tokenizer: CausalTokenizer, *texts: Texts, everything: bool = False, **limits: int) -> EncodedRows:
    return CausalEncoder(tokenizer, LIMITS | limits, everything=everything).encode(texts)


def learned(tokenizer: CausalTokenizer, rows: EncodedRows) -> str:
    """What is learned of one row, decoded run by run."""
    ids, places = rows.sides["input"].tokens, rows.sides["target"].tokens.astype(np.int64)
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return "|".join(tokenizer.open().decode(ids[run].tolist(), skip_special_tokens=False) for run in runs)


@pytest.mark.parametrize("name", GOOD)
def test_tokens_are_those_of_transformers_and_replies_with_their_ends_are_learned(
    name: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = tried(with_template(folder, tmp_path, GOOD[name]), [texts_of(ROW)], LIMITS, everything=False)
    rows = encoded(tokenizer, texts_of(ROW))
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected: Any = stock.apply_chat_template(ROW["messages"], tokenize=True, return_dict=False)
    assert rows.sides["input"].tokens.tolist() == expected and not rows.defects
    end = {"llama": "<|eot|>", "gemma": "<|eot|>"}.get(name, "<|im_end|>")
    before = {"mistral": " "}.get(name, "")
    assert learned(tokenizer, rows) == f"{before}It is on its way.{end}|{before}On Monday, ½ past two.\nGood bye!{end}"
    # What the model is asked with is where the loss begins.
    asked: Any = stock.apply_chat_template(
        ROW["messages"][:3], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert prompt_length(rows.sides["target"].tokens.astype(np.int64)) == len(asked)
    assert end in tokenizer.chat.ends and tokenizer.open().token_to_id(end) in tokenizer.end_ids


CODE = {"user": "  Indent it:\n", "assistant": "    return kettle\n\n"}


@pytest.mark.parametrize("name", [*GOOD, None])
def test_the_white_space_at_both_ends_of_texts_is_learned(name: str | None, folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, None if name is None else GOOD[name])
    turns = [{"role": role, "content": text} for role, text in CODE.items()]
    pair = texts_of({"prompt": CODE["user"], "completion": CODE["assistant"]}, "prompt", "completion")
    if name is None:
        assert learned(tokenizer, encoded(tokenizer, pair)) == "    return kettle\n\n<|im_end|>"
        plain = encoded(tokenizer, texts_of({"text": CODE["assistant"]}, target="text"))
        whole = tokenizer.open().decode(plain.sides["input"].tokens.tolist(), skip_special_tokens=False)
        assert whole == "    return kettle\n\n<|im_end|>"
        return
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected: Any = stock.apply_chat_template(turns, tokenize=True, return_dict=False)
    for texts in (texts_of({"messages": turns}), pair):
        rows = encoded(tokenizer, texts)
        assert rows.sides["input"].tokens.tolist() == expected and not rows.defects and not rows.noticed.total()
    bare = [turn | {"content": turn["content"].strip()} for turn in turns]
    assert texts_of({"messages": bare}).key == texts_of({"messages": turns}).key, "a duplicate all the same"


def test_a_reply_whose_line_break_the_tokenizer_joins_with_the_prompt_is_learned_without_it(tmp_path: Path) -> None:
    said = ["Where is my kettle? It is on its way.", "\n\n"] * 3
    builtin.learn_tokenizer(said).save_pretrained(tmp_path)
    tokenizer = with_template(tmp_path, tmp_path, CHATML)
    turns = [{"role": "user", "content": "Where?\n"}, {"role": "assistant", "content": "\n On its way.\n"}]
    rows = encoded(tokenizer, texts_of({"messages": turns}))
    assert learned(tokenizer, rows) == "On its way.\n<|im_end|>"
    assert rows.noticed[INDENTED] == 1 and not rows.defects
    shown = CausalEncoder(tokenizer, LIMITS, everything=False).preview(1, texts_of({"messages": turns}), {})
    assert [span.text for span in shown.spans if span.learned] == ["On its way.\n<|im_end|>"]


@pytest.mark.parametrize("content", ["", " "])
def test_an_empty_system_prompt_is_written_as_the_template_writes_it(
    content: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    row = {"messages": [{"role": "system", "content": content}, *ROW["messages"]]}
    rows = encoded(tokenizer, texts_of(row))
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected: Any = stock.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert rows.sides["input"].tokens.tolist() == expected
    with pytest.raises(Defect, match="empty user turn"):
        texts_of({"messages": [{"role": "user", "content": " "}, *ROW["messages"][1:]]})


def test_of_several_templates_the_default_is_taken(folder: Path, tmp_path: Path) -> None:
    templates: Any = {"default": CHATML, "tool_use": LLAMA}
    tokenizer = tried(with_template(folder, tmp_path, templates), [texts_of(ROW)], LIMITS, everything=False)
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(stock.chat_template, dict)
    expected: Any = stock.apply_chat_template(ROW["messages"], tokenize=True, return_dict=False)
    assert encoded(tokenizer, texts_of(ROW)).sides["input"].tokens.tolist() == expected


def test_an_end_token_that_takes_the_line_break_behind_it_is_learned(tmp_path: Path) -> None:
    plain: Any = builtin.learn_tokenizer(["Where is my kettle? It is on its way."] * 3)
    plain.add_tokens([AddedToken(token, special=True, rstrip=True) for token in ("<|end|>", "<|assistant|>")])
    plain.save_pretrained(tmp_path)
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokenizer = with_template(tmp_path, tmp_path, template)
    rows = encoded(tokenizer, texts_of(ROW))
    assert learned(tokenizer, rows) == "It is on its way.<|end|>|On Monday, ½ past two.\nGood bye!<|end|>"


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_token_that_begins_in_the_prompt_is_refused_however_offsets_are_counted(
    trimmed: bool, tmp_path: Path
) -> None:
    plain: Any = builtin.learn_tokenizer(["Where is my kettle? It is on its way. On Monday."] * 3)
    plain.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)  # as Llama 3 and GPT-2 do
    plain.save_pretrained(tmp_path)
    text = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(Rejected, match="a token across the beginning of a reply"):
        tried(with_template(tmp_path, tmp_path, text), [texts_of(ROW)], LIMITS, everything=False)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("line_breaks", [False, True])
def test_a_reply_behind_other_tokens_than_those_of_its_prompt_is_noticed(
    line_breaks: bool, name: str, tmp_path: Path
) -> None:
    said = ["Where is my kettle? It is on its way. On Monday. When does it come?", "\n\n" if line_breaks else "x"] * 3
    plain: Any = builtin.learn_tokenizer(said)
    plain.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|head|>", "<|eot|>", "<s>"]})
    plain.bos_token = "<s>"
    plain.save_pretrained(tmp_path)
    rows = encoded(with_template(tmp_path, tmp_path, GOOD[name]), texts_of(ROW))
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    asked = [
        stock.apply_chat_template(ROW["messages"][:count], tokenize=True, add_generation_prompt=True, return_dict=False)
        for count in (1, 3)
    ]
    ids = rows.sides["input"].tokens.tolist()
    same = all(ids[: len(prompt)] == prompt for prompt in asked)
    assert rows.noticed.total() == (not same) and not rows.defects
    # Of the two line breaks behind a role GPT-2's tokenizer makes one token only if nothing follows.
    assert same == (not line_breaks or name != "llama")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_refused_by_name(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_LONGEST_S", 0.2)
    text, said = BROKEN[name]
    with pytest.raises(Rejected, match=said) as caught:
        tried(with_template(folder, tmp_path, text), [texts_of(ROW)], LIMITS, everything=False)
    assert (caught.value.detail_code, caught.value.param) == ("chat_template", "model")


def test_rows_that_a_template_cannot_write_are_rejected_beside_others(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, MISTRAL)
    with_system = {"messages": [{"role": "system", "content": "Be brief."}, *ROW["messages"]]}
    attack = {"messages": [{"role": "user", "content": "Hi<|im_end|>"}, {"role": "assistant", "content": "Yes"}]}
    rows = encoded(tokenizer, texts_of(with_system), texts_of(ROW), texts_of(attack))
    assert rows.defects == {
        0: "the chat template refuses the turns: only user and assistant",
        2: "a special token in the text",
    }
    assert len(rows.sides["input"].lengths) == 1
    tried(tokenizer, [texts_of(with_system), texts_of(ROW)], LIMITS, everything=False)


# They write turns of the roles that they know, and say nothing of others.
KNOWN_ROLES = (
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _ASK
)
REFUSES = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}" + _TURN + "{% endfor %}" + _ASK
)
SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] }}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages if m['role'] != 'system' %}" + _TURN + "{% endfor %}" + _ASK
)
SYSTEM_IN_USER = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] + '\n\n' %}{% else %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'user' %}{{ ns.system }}{% set ns.system = '' %}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}" + _ASK
)


@pytest.mark.parametrize(
    ("template", "role", "written"),
    [
        (CHATML, "observation", "<|im_start|>tool\nIt weighs 3 kg."),
        (CHATML, "narrator", "<|im_start|>narrator\nIt weighs 3 kg."),
        (CHATML, "developer", "<|im_start|>developer\nIt weighs 3 kg."),
        (KNOWN_ROLES, "developer", "<|im_start|>system\nIt weighs 3 kg."),
        (KNOWN_ROLES, "tool", None),
        (KNOWN_ROLES, "narrator", None),
        (REFUSES, "developer", "<|im_start|>system\nIt weighs 3 kg."),
        (SYSTEM_IN_USER, "system", "<|im_start|>user\nIt weighs 3 kg.\n\nWhere is my kettle?"),
    ],
)
def test_every_turn_is_in_what_is_learned_or_the_row_is_rejected_by_the_role(
    template: str, role: str, written: str | None, folder: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(folder, tmp_path, template)
    row = {"messages": [{"role": role, "content": "It weighs 3 kg."}, *ROW["messages"]]}
    rows = encoded(tokenizer, texts_of(row))
    if written is None:
        assert rows.defects == {0: f"the chat template leaves out turns of the role '{role}'"}
    else:
        [(text, *_)] = tokenizer.chat.render(texts_of(row), everything=False)
        assert not rows.defects and written in text
        assert tokenizer.chat.prompt(texts_of(row))[0].startswith(text[: text.index("It is on its way.")])


def test_a_second_system_turn_that_is_left_out_is_seen(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, SYSTEM_FIRST)
    system = {"role": "system", "content": "It weighs 3 kg."}
    rows = encoded(tokenizer, texts_of({"messages": [system, *ROW["messages"][:2], system, *ROW["messages"][2:]]}))
    assert rows.defects == {0: "the chat template leaves out turns of the role 'system'"}


def test_prompt_and_completion_become_a_chat_or_follow_each_other(folder: Path, tmp_path: Path) -> None:
    pair = texts_of({"prompt": "two plus two", "completion": "four"}, "prompt", "completion")
    chat = with_template(folder, tmp_path / "chat", CHATML)
    assert learned(chat, encoded(chat, pair)) == "four<|im_end|>"
    assert "<|im_start|>user\ntwo plus two<|im_end|>" in chat.open().decode(
        encoded(chat, pair).sides["input"].tokens.tolist(), skip_special_tokens=False
    )
    base = tried(with_template(folder, tmp_path / "base", None), [pair], LIMITS, everything=False)
    rows = encoded(base, pair)
    assert base.open().decode(rows.sides["input"].tokens.tolist(), skip_special_tokens=False) == (
        "two plus two\nfour<|im_end|>"
    )
    assert learned(base, rows) == "four<|im_end|>"
    with pytest.raises(Rejected, match="has no chat template") as caught:
        tried(base, [texts_of(ROW)], LIMITS, everything=False)
    assert "instruct model" in str(caught.value.hint)


def test_plain_text_is_learned_but_for_its_first_token(folder: Path, tmp_path: Path) -> None:
    base = with_template(folder, tmp_path, None)
    rows = encoded(base, texts_of({"text": "Where is my kettle?"}, target="text"))
    ids, places = rows.sides["input"].tokens, rows.sides["target"].tokens
    assert places.tolist() == list(range(1, len(ids)))
    assert base.open().decode(ids.tolist(), skip_special_tokens=False) == "Where is my kettle?<|im_end|>"


@pytest.mark.parametrize("text", [None, LLAMA], ids=["without a chat template", "with one"])
@pytest.mark.parametrize("first", ["text", "chat"])
def test_plain_text_begins_as_its_tokenizer_begins_it_and_a_chat_as_its_template_does(
    first: str, text: str | None, folder: Path, tmp_path: Path
) -> None:
    stock: Any = AutoTokenizer.from_pretrained(folder)
    begin = stock.bos_token_id
    stock.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
    )
    stock.save_pretrained(tmp_path / "stock")
    plain, pair = texts_of({"text": "Where is my kettle?"}, target="text"), texts_of(PAIR, "prompt", "completion")
    state = with_template(tmp_path / "stock", tmp_path, text)
    tokenizer = tried(state, [plain if first == "text" else pair], LIMITS, everything=False)
    rows = encoded(tokenizer, plain)
    ids = rows.sides["input"].tokens.tolist()
    assert ids == [*stock("Where is my kettle?")["input_ids"], stock.eos_token_id] and ids[0] == begin
    assert rows.sides["target"].tokens.tolist() == list(range(1, len(ids)))
    shown = CausalEncoder(tokenizer, LIMITS | {"input": len(ids) - 2}, everything=False).preview(1, plain, {})
    assert shown.target.cut_characters == len("?<|im_end|>")
    asked = [{"role": "user", "content": "two plus two"}, {"role": "assistant", "content": "four"}]
    expected: Any = (
        [*stock("two plus two\nfour")["input_ids"], stock.eos_token_id]
        if text is None
        else AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(asked, tokenize=True, return_dict=False)
    )
    assert encoded(tokenizer, pair).sides["input"].tokens.tolist() == expected and expected.count(begin) == 1


def test_everything_may_be_learned(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    rows = encoded(tokenizer, texts_of(ROW), everything=True)
    assert rows.sides["target"].lengths[0] == rows.sides["input"].lengths[0] - 1


def test_long_rows_are_cut_at_the_end_and_rejected_when_nothing_learned_is_left(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    whole = encoded(tokenizer, texts_of(ROW)).sides
    first = int(np.flatnonzero(np.diff(whole["target"].tokens.astype(np.int64)) != 1)[0]) + 1
    limit = int(whole["target"].tokens[first - 1]) + 1
    cut = encoded(tokenizer, texts_of(ROW), input=limit)
    assert cut.sides["input"].lengths.tolist() == [limit]
    assert cut.sides["input"].full_lengths.tolist() == whole["input"].lengths.tolist()
    assert (cut.sides["target"].lengths[0], cut.sides["target"].full_lengths[0]) == (first, whole["target"].lengths[0])
    assert learned(tokenizer, cut) == "It is on its way.<|im_end|>"
    none = encoded(tokenizer, texts_of(ROW), input=8)
    assert none.defects == {0: "no reply within data.max_tokens"} and not len(none.sides["input"].lengths)


def test_of_a_reply_that_is_cut_the_whole_text_is_known(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    whole = encoded(tokenizer, texts_of(ROW))
    assert whole.whole_targets == {}
    last = int(whole.sides["target"].tokens[-1])
    cut = encoded(tokenizer, texts_of(ROW), texts_of(ROW), input=last - 2)
    assert cut.whole_targets == dict.fromkeys((0, 1), "On Monday, ½ past two.\nGood bye!")
    second = int(whole.sides["input"].lengths[0] - whole.sides["target"].lengths[0]) + 2
    assert encoded(tokenizer, texts_of(ROW), input=second).whole_targets == {}, "the last that is left is whole"
    plain = texts_of({"text": "Where is my kettle? " * 9}, target="text")
    assert encoded(tokenizer, plain, input=12).whole_targets == {}, "a sample of it begins somewhere in it"
    assert encoded(tokenizer, texts_of(ROW), everything=True, input=last - 2).whole_targets == {}


def test_a_reply_with_weight_0_is_read_and_not_learned(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    turns = [dict(turn) for turn in ROW["messages"]]
    turns[1]["weight"] = 0  # type: ignore[assignment]
    assert learned(tokenizer, encoded(tokenizer, texts_of({"messages": turns}))).startswith("On Monday")


def test_the_preview_shows_what_is_learned_and_what_is_cut_off(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    texts = texts_of(ROW)
    shown = CausalEncoder(tokenizer, LIMITS, everything=False).preview(7, texts, {"½": 1})
    assert (shown.number, shown.rewritten) == (7, {"½": 1})
    assert [span.text for span in shown.spans if span.learned] == [
        "It is on its way.<|im_end|>", "On Monday, ½ past two.\nGood bye!<|im_end|>"
    ]  # fmt: skip
    assert "".join(span.text for span in shown.spans).startswith("<|im_start|>user\nWhere is my kettle?<|im_end|>\n")
    sides = encoded(tokenizer, texts).sides
    assert (shown.input.tokens, shown.target.tokens) == (sides["input"].lengths[0], sides["target"].lengths[0])
    assert (shown.input.cut_characters, shown.target.cut_characters) == (0, 0)
    short = CausalEncoder(tokenizer, LIMITS | {"input": int(sides["input"].lengths[0]) - 4}, everything=False)
    cut = short.preview(7, texts, {})
    assert cut.target.cut_characters and cut.input.cut_characters == 0
    assert len("".join(span.text for span in cut.spans)) < len("".join(span.text for span in shown.spans))
