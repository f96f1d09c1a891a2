"""Chats of many templates: each reply is learned behind what a server asks with, as its template writes it there."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from functools import partialmethod
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected, UserError
from jobs.events import Event, JobPrepared
from jobs.spec import Learn
from longhaul.preview import print_preview
from service.answers.conversion import sentence
from tests.training.attempts import attempt, trained
from tests.training.generation.test_generation import ask, outputs
from tests.training.tasks.causal.test_rows import CHATML, LIMITS, LLAMA, encoded, texts_of, with_template
from tests.training.tasks.causal.test_rows import folder as folder
from tests.training.workplace import Workplace, dataset_of
from tests.training.workplace import of_rows as of_rows
from worker.training.dataset.data import EARLIER_FORMAT
from worker.training.rows.chat import NO_CALL, NO_FUNCTIONS, REASONING
from worker.training.rows.row import Defect
from worker.training.rows.text import UNUSED_TOOLS, RowReader, Texts, template
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.chat import ChatFormat
from worker.training.tasks.causal.rows import REPLIES_CUT, CausalEncoder, CausalTokenizer, tried
from worker.training.tasks.causal.task import Causal

_THOUGHT = (
    "{% set r = m.reasoning_content or '' %}{% set c = m['content'] or '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].strip() %}{% endif %}"
)
"""Of a turn m: what it thought, r, and what it says, c."""
_BEGIN = "{{ '<|im_start|>' + m['role'] + '\n' }}"
_END = "{{ '<|im_end|>\n' }}"
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# Only what answers the last question has thought, or says that nothing was.
DROPS = (
    _LAST_USER + "{% for m in messages %}" + _THOUGHT + _BEGIN + "{% if m['role'] == 'assistant' and "
    "loop.index0 > ns.last and (r or loop.last) %}{{ '<think>\n' + r + '\n</think>\n\n' }}{% endif %}{{ c }}"
    + _END
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same, and the prompt begins to think.
OPENS = DROPS.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
# The prompt begins to think, and no reply in the chat has thought.
NEVER = (
    "{% for m in messages %}" + _THOUGHT + _BEGIN + "{{ c }}" + _END + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Earlier replies have an empty place for it, the prompt begins one.
EMPTIED = (
    "{% for m in messages %}" + _THOUGHT + _BEGIN + "{% if m['role'] == 'assistant' %}<think>"
    "{% if loop.last %}{{ r }}{% endif %}</think>{% endif %}{{ c }}" + _END + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The prompt says that nothing is thought; no reply repeats it.
CLOSED = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\n\n</think>\n\n' }}{% endif %}")
# A reply ends where the next turn begins.
UNENDED = (
    "{{ bos_token }}{% for m in messages %}" + _THOUGHT + "{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{{ '\n<think>' + (r if loop.last else '') + '</think>' }}{% endif %}"
    "{{ '\n' + c | trim }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Channels; earlier replies end with another token, and have not thought.
CHANNELS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% if m.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
SPECIAL = ("<|start|>", "<|head|>", "<|eot|>", "<s>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")


class TemplateWay(NamedTuple):
    """What is peculiar to a template."""

    template: str
    written: str
    """A reply with what it thought, {r}, and what it says, {c}, as the model writes it."""
    not_thought: str
    """The same of one that has not thought."""
    changes: tuple[bool, bool] = (True, True)
    """Whether replies that have thought, and others, are written otherwise once there are later turns."""


WAYS = {
    "chatml": TemplateWay(CHATML, "<think>\n{r}\n</think>\n\n{c}<|im_end|>", "{c}<|im_end|>", (False, False)),
    "trims": TemplateWay(LLAMA, "<think>\n{r}\n</think>\n\n{c}<|eot|>", "{c}<|eot|>", (False, False)),
    "drops": TemplateWay(DROPS, "<think>\n{r}\n</think>\n\n{c}<|im_end|>", "<think>\n\n</think>\n\n{c}<|im_end|>"),
    "opens": TemplateWay(OPENS, "{r}\n</think>\n\n{c}<|im_end|>", "\n</think>\n\n{c}<|im_end|>"),
    "never": TemplateWay(NEVER, "{r}\n</think>\n\n{c}<|im_end|>", "\n</think>\n\n{c}<|im_end|>"),
    "emptied": TemplateWay(EMPTIED, "{r}\n</think>\n\n{c}<|im_end|>", "\n</think>\n\n{c}<|im_end|>"),
    "closed": TemplateWay(CLOSED, "", "{c}<|im_end|>"),
    "unended": TemplateWay(
        UNENDED, "\n<think>{r}</think>\n{c}<|user|>", "\n<think></think>\n{c}<|user|>", (True, False)
    ),
    "channels": TemplateWay(
        CHANNELS,
        "<|channel|>analysis<|message|>{r}<|end|><|start|>assistant<|channel|>final<|message|>{c}<|return|>",
        "<|channel|>final<|message|>{c}<|return|>",
    ),
}


@pytest.fixture(scope="module")
def words(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *ROLES]})
    tokenizer.save_pretrained(path)
    return path


def chat_of(replies: int, *, system: bool, thinks: str | None) -> list[dict[str, Any]]:
    """`thinks`: the key that holds the reasoning; "content": the text does."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
    for number in range(replies):
        reply = {"role": "assistant", "content": f"It weighs {number} kg."}
        if thinks == "content":
            reply["content"] = f"<think>\nOf kettle {number}: light.\n</think>\n\n{reply['content']}"
        elif thinks:
            reply[thinks] = f"Of kettle {number}: light."
        said += [{"role": "user", "content": f"How heavy is kettle {number}?"}, reply]
    return said


class Learned(NamedTuple):
    """A run of learned tokens, and all that stands before it."""

    before: str
    text: str


def runs(tokenizer: CausalTokenizer, rows: Any) -> list[list[Learned]]:
    """Of each example."""
    found, at = [], {"input": 0, "target": 0}
    fast = tokenizer.open()
    for both in zip(rows.sides["input"].lengths.tolist(), rows.sides["target"].lengths.tolist(), strict=True):
        one = {}
        for side, length in zip(("input", "target"), both, strict=True):
            one[side] = rows.sides[side].tokens[at[side] : at[side] + length].astype(np.int64)
            at[side] += length
        starts = np.flatnonzero(np.diff(one["target"], prepend=-2) != 1)
        found.append(
            [
                Learned(*(fast.decode(part.tolist(), skip_special_tokens=False) for part in (
                    one["input"][: run[0]], one["input"][run[0] : run[-1] + 1],
                )))
                for run in np.split(one["target"], starts[1:])
            ]
        )  # fmt: skip
    return found


CASES = (
    [
        (name, replies, system, thinks)
        for name, replies, system, thinks in product(WAYS, (1, 2, 5), (False, True), (None, "content"))
        if thinks is None or (WAYS[name].written and name != "channels")
    ]
    + [
        (name, replies, False, key)
        for name, replies, key in product(("drops", "opens", "never", "unended"), (1, 2), REASONING)
        if key == "reasoning_content" or (name, replies) == ("drops", 2)
    ]
    + [("channels", replies, True, "thinking") for replies in (1, 2, 5)]
)
"""Of the keys, `stock` knows the one of the template alone, which is handed all of them."""


@pytest.mark.parametrize(("name", "replies", "system", "thinks"), CASES)
def test_each_reply_is_learned_behind_what_a_server_asks_with(
    name: str, replies: int, system: bool, thinks: str | None, words: Path, tmp_path: Path
) -> None:
    way, said = WAYS[name], chat_of(replies, system=system, thinks=thinks)
    tokenizer = with_template(words, tmp_path, way.template)
    rows = CausalEncoder(tokenizer, {"input": 2000, "target": 2000}, everything=False).encode(
        [texts_of({"messages": said})]
    )
    assert not rows.defects
    found = runs(tokenizer, rows)
    assert rows.examples == [len(found)] == [replies if way.changes[thinks is None] else 1]
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    places = [place for place, turn in enumerate(said) if turn["role"] == "assistant"]
    asked = [stock.apply_chat_template(said[:at], tokenize=False, add_generation_prompt=True) for at in places]
    form = way.written if thinks else way.not_thought
    texts = [form.format(r=f"Of kettle {n}: light.", c=f"It weighs {n} kg.") for n in range(replies)]
    assert [run for example in found for run in example] == [Learned(*both) for both in zip(asked, texts, strict=True)]


_MARKED = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
# Templates, and what is learned of "<think>Hm.</think>Yo." and of "Yo.".
PROMPTS = {
    "closes what the prompt begins": (
        _MARKED + "{% if m.role == 'assistant' %}{{ '</think>' + m.content.split('</think>')[-1] }}{% else %}"
        "{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}" + _ASK + "<think>' }}{% endif %}",
        ("Hm.\n</think>\n\nYo.<|im_end|>", "</think>Yo.<|im_end|>"),
    ),
    "begins twice": (
        _MARKED + "{{ ('<think>\n' if m.role == 'assistant' and loop.last else '') + m.content + '<|im_end|>' }}"
        "{% endfor %}" + _ASK + "<think>\n' }}{% endif %}",
        ("Hm.</think>Yo.<|im_end|>", "\n</think>\n\nYo.<|im_end|>"),
    ),
    "thinks nothing between tokens": (
        _MARKED + "{{ m.content.split('</think>')[-1] + '<|im_end|>' }}{% endfor %}"
        + _ASK + "<|channel|>thought\n<|end|>' }}{% endif %}",
        ("the chat template leaves out the reasoning", "Yo.<|im_end|>"),
    ),
    "ends in two tokens": (
        "{% for m in messages %}{{ '<|start|>' + m.role + m.content + '<|end|>' + m.role + '<|return|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        ("<think>Hm.</think>Yo.<|end|>assistant<|return|>", "Yo.<|end|>assistant<|return|>"),
    ),
    "says the system with the last question": (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}{{ '[' + (messages[0].content if "
        "loop.last and messages[0].role == 'system' else '') + m.content + ']' }}{% else %}"
        "{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}",
        ("<think>Hm.</think>Yo.<|im_end|>", "Yo.<|im_end|>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("thinks", [True, False])
def test_a_reply_stands_behind_its_prompt_however_the_template_writes_what_is_before_it(
    name: str, thinks: bool, words: Path, tmp_path: Path
) -> None:
    template, learned = PROMPTS[name]
    tokenizer = with_template(words, tmp_path, template)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    reply = {"role": "assistant", "content": "<think>Hm.</think>Yo." if thinks else "Yo."}
    rows = encoded(tokenizer, texts_of({"messages": [*asked, reply]}), input=2000)
    if rows.defects:
        assert thinks and rows.defects[0].startswith(learned[0])
        return
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    prompt = stock.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert "Be brief." in prompt and runs(tokenizer, rows) == [[Learned(prompt, learned[not thinks])]]


def test_replies_share_an_example_up_to_the_next_question(words: Path, tmp_path: Path) -> None:
    tokenizer = with_template(words, tmp_path, OPENS)
    first, second = chat_of(2, system=False, thinks="content")[1::2]
    said = [{"role": "user", "content": "How heavy?"}, first, second, {"role": "user", "content": "Sure?"}, second]
    rows = encoded(tokenizer, texts_of({"messages": said}), input=2000)
    assert [len(example) for example in runs(tokenizer, rows)] == [2, 1]


def test_examples_beyond_the_limit_are_left_out_and_counted_and_the_preview_shows_the_others(
    words: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(words, tmp_path, DROPS)
    texts = texts_of({"messages": chat_of(5, system=False, thinks="content")})
    whole = encoded(tokenizer, texts, input=2000)
    limit = int(whole.sides["target"].tokens[whole.sides["target"].lengths[:3].sum()])
    rows = encoded(tokenizer, texts, texts_of({"prompt": "a", "completion": "b"}, "prompt", "completion"), input=limit)
    assert rows.examples == [3, 1] and rows.noticed[REPLIES_CUT] == 1
    shown = CausalEncoder(tokenizer, LIMITS | {"input": limit}, everything=False).preview(1, texts, {})
    assert len(shown.earlier_examples) == 2 and shown.input.tokens == rows.sides["input"].lengths[:3].sum()
    assert shown.target.cut_characters, "of the third, whose reasoning the fourth has no more"
    learned = [span.text for spans in (*shown.earlier_examples, shown.spans) for span in spans if span.learned]
    assert learned == [run.text for example in runs(tokenizer, rows)[:3] for run in example]


def test_where_everything_is_learned_an_example_begins_behind_what_the_one_before_has(
    words: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(words, tmp_path, DROPS)
    rows = encoded(tokenizer, texts_of({"messages": chat_of(2, system=True, thinks="content")}), everything=True)
    [first], [second] = runs(tokenizer, rows)
    assert second.before.endswith("<|im_start|>assistant\n") and second.text.startswith("It weighs 0 kg.")
    assert first.text.endswith("</think>\n\nIt weighs 0 kg.<|im_end|>\n")


@pytest.mark.parametrize("thinks", ["content", "reasoning"])
def test_reasoning_that_a_template_leaves_out_is_refused_by_name(thinks: str, words: Path, tmp_path: Path) -> None:
    tokenizer = with_template(words, tmp_path, DROPS.replace("r or loop.last", "not r"))
    texts = texts_of({"messages": chat_of(1, system=False, thinks=thinks)})
    assert encoded(tokenizer, texts).defects == {0: "the chat template leaves out the reasoning of a reply"}
    with pytest.raises(Rejected, match="leaves out the reasoning") as caught:
        tried(tokenizer, [texts], LIMITS, everything=False)
    assert "whose chat template writes reasoning" in str(caught.value.hint)


PARTS = {
    "chatml": ("<think>\nOf kettle 0: light.\n</think>\n\n", "It weighs 0 kg.<|im_end|>", "content"),
    "drops": ("<think>\nOf kettle 0: light.\n</think>\n\n", "It weighs 0 kg.<|im_end|>", "reasoning"),
    "never": ("Of kettle 0: light.\n</think>\n\n", "It weighs 0 kg.<|im_end|>", "thinking"),
    "unended": ("\n<think>Of kettle 0: light.</think>\n", "It weighs 0 kg.<|user|>", "content"),
    "channels": (
        "<|channel|>analysis<|message|>Of kettle 0: light.<|end|><|start|>assistant<|channel|>final<|message|>",
        "It weighs 0 kg.<|return|>", "thinking",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("learn", ["answer", "reasoning"])
def test_the_reasoning_or_the_answer_alone_is_learned(learn: Any, name: str, words: Path, tmp_path: Path) -> None:
    reasoning, answer, thinks = PARTS[name]
    tokenizer = with_template(words, tmp_path, WAYS[name].template)
    plain, texts = (texts_of({"messages": chat_of(1, system=True, thinks=each)}) for each in (None, thinks))
    [[whole]] = runs(tokenizer, encoded(tokenizer, texts))
    encoder = CausalEncoder(tokenizer, LIMITS, everything=False, learn=learn)
    rows = encoder.encode([texts, plain])
    [run], *others = runs(tokenizer, rows)
    assert run == ((whole.before, reasoning) if learn == "reasoning" else (whole.before + reasoning, answer))
    assert [one.text for one in encoder.preview(1, texts, {}).spans if one.learned] == [run.text]
    if learn == "reasoning":
        assert rows.defects == {1: "a chat without reasoning, of which alone is learned (data.learn)"} and not others
    else:
        assert [[one.text for one in each] for each in others] == [[answer]]


def test_an_answer_keeps_its_indent_and_may_be_cut_behind_its_first_token(words: Path, tmp_path: Path) -> None:
    tokenizer = with_template(words, tmp_path, CHATML)
    turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "    return x and all of it"}]
    texts = texts_of({"messages": turns})
    [[run]] = runs(tokenizer, CausalEncoder(tokenizer, LIMITS, everything=False, learn="answer").encode([texts]))
    assert run.text == "    return x and all of it<|im_end|>"
    for limit in range(8, 40):
        rows = CausalEncoder(tokenizer, LIMITS | {"input": limit}, everything=False, learn="answer").encode([texts])
        assert bool(rows.defects) != bool(len(rows.sides["input"].lengths))


def test_parts_of_a_reply_without_a_template_are_learned_too() -> None:
    chat = ChatFormat(None, {}, ("</s>",), ("</s>",))
    texts = Texts("two and two", "<think>It is even.</think>four")
    learned = {}
    for learn in get_args(Learn):
        [one] = chat.render(texts, everything=False, learn=learn)
        learned[learn] = "".join(one.text[span.begin : span.end] for span in one.spans)
    assert learned == {
        "all": "<think>It is even.</think>four</s>", "answer": "four</s>", "reasoning": "<think>It is even.</think>",
    }  # fmt: skip
    with pytest.raises(Defect, match="a chat without reasoning"):
        chat.render(Texts("two and two", "four"), everything=False, learn="reasoning")


def test_examples_that_part_inside_of_a_token_are_learned_whole(words: Path, tmp_path: Path) -> None:
    tokenizer = with_template(words, tmp_path, DROPS)
    chat = [
        {"role": "user", "content": "two?"}, {"role": "assistant", "content": "<think>even</think><thing>"},
        {"role": "user", "content": "more?"}, {"role": "assistant", "content": "<think>odd</think>three"},
    ]  # fmt: skip
    rows = encoded(tokenizer, texts_of({"messages": chat}), everything=True)
    assert not rows.defects and len(runs(tokenizer, rows)) == 2


@pytest.mark.parametrize("task", ["seq2seq", {"type": "causal", "loss_on": "all"}])
def test_parts_of_replies_are_for_chats_of_causal_models(task: Any, workplace: Workplace) -> None:
    with pytest.raises(UserError, match="takes parts of the replies of chats"):
        workplace.job(data={"learn": "answer"}, task=task)


def test_a_model_of_another_task_learns_no_part_of_replies(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"input": f"a {n}", "target": "b"} for n in range(30)])
    with pytest.raises(Rejected, match="causal models alone learn"):
        workplace.check(workplace.job(data={"learn": "answer"}))


def model_of(workplace: Workplace, template: str) -> str:
    """A built-in model with another template."""
    folder = workplace.data / "model"
    folder.mkdir()
    builtin.build(folder, ["How heavy is kettle 1? It weighs 1 kg. Of kettle 1: light."], seed=0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return "./model"


def job_of(workplace: Workplace, **data: Any) -> RunDir:
    def chat(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Number {number}?"}, *chat_of(3, system=False, thinks="content")[1:]]

    rows: list[dict[str, Any]] = [{"messages": chat(number)} for number in range(40)]
    workplace.rows("chats.jsonl", [*rows, rows[7]])
    return workplace.job("chats.jsonl", model="./model", data={"validation": 0.2} | data)


def test_rows_in_and_examples_out_are_counted_estimated_and_shown(workplace: Workplace) -> None:
    model_of(workplace, DROPS)
    run = job_of(workplace)
    workplace.check(run)
    planned = run.plan().data
    console = Console(file=(shown := io.StringIO()), width=2000, color_system=None)
    print_preview(run.preview(), console)
    assert shown.getvalue().count("⟦<think> Of kettle 0: light. </think>  It weighs 0 kg.<|im_end|>⟧") == 3
    found = workplace.prepare_only(run)
    data, dataset = found["data"], dataset_of(run)
    assert (data["rows_read"], data["duplicates"], data["kept"], data["examples"]) == (41, 1, 40, 120)
    counts = (len(dataset.train), len(dataset.validation))
    assert (data["train_rows"], data["validation_rows"]) == counts == (planned.rows, planned.validation_rows)
    assert sum(counts) == 120 and all(count % 3 == 0 for count in counts), "a chat is on one side"
    assert run.plan().data.rows == counts[0] and data["validation_inputs_in_training"] == 0
    said = sentence(Event(number=1, at=0.0, job="a", fact=JobPrepared(**found)))
    assert f"{counts[0]} training examples, {counts[1]} validation examples, made of 40 rows (the chat template" in said


def test_the_rows_of_an_earlier_version_are_read_and_not_prepared_again(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(workplace, builtin.CHAT_TEMPLATE)
    before = job_of(workplace)
    with pytest.MonkeyPatch.context() as earlier:  # what it wrote into its plan
        earlier.setattr(Causal, "__init__", partialmethod(Causal.__init__, by_reply=False))
        earlier.setattr(Causal, "reading_as", lambda self, _: self)
        earlier.setattr("worker.training.prepare.check_preparable", lambda *_, **__: None)
        earlier.setattr("worker.training.dataset.writing.FORMAT", EARLIER_FORMAT)
        workplace.prepare(before)
    monkeypatch.setattr(RunDir, "plan_is_final", lambda _: True)
    plan = before.plan()
    assert not plan.data.by_reply and workplace.prepare_only(before) and before.plan() == plan
    now = job_of(workplace)
    monkeypatch.undo()
    assert workplace.prepare(now) and now.plan().data.prepared != plan.data.prepared, "other rows have another name"
    shutil.rmtree(workplace.settings.prepared)
    monkeypatch.setattr(RunDir, "plan_is_final", lambda _: True)
    with pytest.raises(Rejected, match="an earlier version of Longhaul prepared them") as caught:
        workplace.prepare_only(before)
    assert caught.value.detail_code == "content_changed"


# -- tools -------------------------------------------------------------------------------------------------------------

_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{% for t in m.tool_calls or [] %}{{ '<tool_call>\n' + {'name': t.function.name, 'arguments': "
    "t.function.arguments} | tojson + '\n</tool_call>' }}{% endfor %}"
)
# Calls as JSON; what earlier questions made the model think is gone.
JSON_CALLS = _TOOLS + DROPS.replace("{{ c }}", "{{ c }}" + _CALLS)
# Arguments are text to it.
TEXT_CALLS = _TOOLS + CHATML.replace("{% for message", "{% for m").replace("message[", "m[").replace(
    "m['content'] + '<|im_end|>'",
    "m['content'] }}{% for t in m.tool_calls or [] %}"
    "{{ '[' + t.function.name + '](' + t.function.arguments + ')' }}{% endfor %}{{ '<|im_end|>'",
)
# A reply that calls has no content, and ends otherwise.
NO_CONTENT = (
    "{% for t in tools or [] %}{{ '<s>' + t.function.name }}{% endfor %}{% for m in messages %}"
    "{{ '<|start|>' + m.role }}{% if m.content is none %}{% for t in m.tool_calls %}"
    "{{ ' to=' + t.function.name + '<|message|>' + t.function.arguments | tojson + '<|end|>' if not loop.last "
    "else ' to=' + t.function.name + '<|message|>' + t.function.arguments | tojson + '<|call|>' }}{% endfor %}"
    "{% else %}{{ '<|message|>' + m.content + ('<|return|>' if m.role == 'assistant' else '<|end|>') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Parameters one by one; a call ends where its result begins.
XML_CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + UNENDED.replace("{{ '\n' + c | trim }}", (
        "{{ '\n' + c | trim }}{% for t in m.tool_calls or [] %}{{ '<call>' + t.function.name }}"
        "{% for key, value in t.function.arguments.items() %}{{ '<' + key + '>' + value | string }}{% endfor %}"
        "{{ '</call>' }}{% endfor %}"
    ))
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}
ARGUMENTS = {"city": 'Łódź, "old town"', "days": 3}
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)


class CallingTemplate(NamedTuple):
    """What is peculiar to it."""

    template: str
    call: str
    """As it is learned, without reasoning."""
    answer: str
    own: tuple[bool, Any] = (True, "")
    """Whether it takes arguments as objects, and the content that it wants of a reply that only calls."""
    thinks: bool = False


EMPTY = "<think>\n\n</think>\n\n"
CALLING = {
    "json": CallingTemplate(
        JSON_CALLS, '<tool_call>\n{"name": "weather", "arguments": ' + AS_JSON + "}\n</tool_call><|im_end|>",
        "It rains.<|im_end|>", thinks=True,
    ),
    "text": CallingTemplate(TEXT_CALLS, f"[weather]({AS_JSON})<|im_end|>", "It rains.<|im_end|>", (False, "")),
    "no content": CallingTemplate(
        NO_CONTENT, f" to=weather<|message|>{AS_JSON}<|call|>", "<|message|>It rains.<|return|>", (True, None)
    ),
    "xml": CallingTemplate(
        XML_CALLS, '\n<think></think>\n<call>weather<city>Łódź, "old town"<days>3</call><|tool|>',
        "\n<think></think>\nIt rains.<|user|>",
    ),
}  # fmt: skip


def calling_chat(rounds: int, *, system: bool, thinks: bool, as_objects: bool, empty: Any) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
    thought = {"reasoning_content": "I should look."} if thinks else {}
    for number in range(rounds):
        function = {"name": "weather", "arguments": ARGUMENTS if as_objects else AS_JSON}
        call = {"id": f"call0000{number}", "type": "function", "function": function}
        said += [
            {"role": "user", "content": f"How is day {number}?"},
            {"role": "assistant", "content": empty, "tool_calls": [call], **thought},
            {"role": "tool", "content": f'{{"rain": {number}}}'},
            {"role": "assistant", "content": "It rains."},
        ]
    return said


CALLS = [
    (name, rounds, system, thinks)
    for name, rounds, system, thinks in product(CALLING, (1, 2, 5), (False, True), (False, True))
    if CALLING[name].thinks or not thinks
]


@pytest.mark.parametrize(("name", "rounds", "system", "thinks"), CALLS)
def test_calls_are_learned_and_results_are_not_behind_what_a_server_asks_with(
    name: str, rounds: int, system: bool, thinks: bool, words: Path, tmp_path: Path
) -> None:
    way = CALLING[name]
    tokenizer = with_template(words, tmp_path, way.template)
    as_objects, empty = way.own
    said = calling_chat(rounds, system=system, thinks=thinks, as_objects=as_objects, empty=empty)
    # The row has the other form, and tools as JSON without OpenAI's wrapper.
    row = calling_chat(
        rounds, system=system, thinks=thinks, as_objects=not as_objects, empty=None if empty == "" else ""
    )
    texts = texts_of({"messages": row, "tools": json.dumps([WEATHER["function"]])})
    rows = CausalEncoder(tokenizer, {"input": 4000, "target": 4000}, everything=False).encode([texts])
    assert not rows.defects
    found = [run for example in runs(tokenizer, rows) for run in example]
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    before = [said[:at] for at, turn in enumerate(said) if turn["role"] == "assistant"]
    if empty is None:  # which `apply_chat_template` leaves out
        asked: Any = render_jinja_template(before, [WEATHER], chat_template=way.template, add_generation_prompt=True)[0]
    else:
        asked = [
            stock.apply_chat_template(chat, tools=[WEATHER], tokenize=False, add_generation_prompt=True)
            for chat in before
        ]
    thought, none = "<think>\nI should look.\n</think>\n\n" if thinks else EMPTY, EMPTY
    if not way.thinks:
        thought = none = ""
    assert found == [
        Learned(*both) for both in zip(asked, (thought + way.call, none + way.answer) * rounds, strict=True)
    ]
    assert tokenizer.chat.prompt(replace(texts, turns=texts.turns[:-1]))[0] == asked[-1]


def test_sharegpts_names_of_calls_and_results_are_openais(words: Path, tmp_path: Path) -> None:
    said = [
        {"from": "human", "value": "How is it?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": ARGUMENTS})},
        {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "It rains."},
    ]  # fmt: skip
    ours = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": AS_JSON}}]},
        {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "It rains."},
    ]  # fmt: skip
    tools = json.dumps([WEATHER])
    one = texts_of({"conversations": said, "tools": tools}, target="conversations")
    assert one == texts_of({"messages": ours, "tools": tools})
    tokenizer = with_template(words, tmp_path, JSON_CALLS)
    [[call], [answer]] = runs(tokenizer, encoded(tokenizer, one, input=2000))
    assert "<tool_call>" in call.text and "rain" in answer.before and "It rains." in answer.text


@pytest.mark.parametrize(
    ("template", "row", "said", "hint"),
    [
        (CHATML, {"tools": [WEATHER]}, "the chat template writes no tools", "remove the column tools"),
        (_TOOLS + CHATML, {"tools": [WEATHER]}, "leaves out a tool call of a reply", "whose chat template writes"),
        (TEXT_CALLS.replace("messages %}", "messages if m['role'] != 'tool' %}"), {"tools": [WEATHER]},
         "leaves out turns of the role 'tool'", "put a chat template"),
    ],
)  # fmt: skip
def test_a_template_that_leaves_out_tools_is_refused_by_name(
    template: str, row: Any, said: str, hint: str, words: Path, tmp_path: Path
) -> None:
    chat = calling_chat(1, system=False, thinks=False, as_objects=True, empty="")
    tokenizer, texts = with_template(words, tmp_path, template), texts_of({"messages": chat, **row})
    with pytest.raises(Rejected, match=said) as caught:
        tried(tokenizer, [texts], LIMITS, everything=False)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("turn", "tools", "reason"),
    [
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, None, NO_CALL),
        ({"role": "assistant", "function_call": {"arguments": {}}}, None, NO_CALL),
        ({"role": "function_call", "content": "weather"}, None, NO_CALL),
        ({"role": "user", "content": "", "tool_calls": [{"name": "f"}]}, None, "a tool call that is no reply's"),
        ({"role": "user", "content": "Hi"}, "weather", NO_FUNCTIONS),
        ({"role": "user", "content": "Hi"}, [{"type": "function"}], NO_FUNCTIONS),
        ({"role": "user", "content": "Hi", "thinking": "Hm."}, None, "reasoning that is not one text of a reply"),
    ],
)
def test_what_is_no_call_and_no_tool_is_named(turn: Any, tools: Any, reason: str) -> None:
    with pytest.raises(Defect, match=reason):
        texts_of({"messages": [turn, {"role": "assistant", "content": "It rains."}], "tools": tools})


def test_a_job_learns_to_think_and_to_call(workplace: Workplace) -> None:
    model_of(workplace, JSON_CALLS)
    rows = []
    for number in range(24):
        chat = calling_chat(2, system=True, thinks=True, as_objects=bool(number % 2), empty="")
        chat[1]["content"] += f" Of month {number}?"
        rows.append({"messages": chat, "tools": [WEATHER] if number % 3 else json.dumps([WEATHER])})
    workplace.rows("calls.jsonl", rows)
    run = workplace.job(
        "calls.jsonl", model="./model", data={"validation": 0.2}, training={"epochs": 1, "batch_size": 16},
        evaluation={"every_steps": 4, "samples": 1, "sample_tokens": 8}, memory={"micro_batch": 4},
    )  # fmt: skip
    data = workplace.prepare(run)["data"]
    assert (data["rows_read"], data["kept"], data["examples"]) == (24, 24, 48) and data["rejected"] == {}
    assert UNUSED_TOOLS not in data["noticed"]
    dataset, tokenizer = dataset_of(run), AutoTokenizer.from_pretrained(workplace.data / "model")
    learned = [tokenizer.decode(dataset.train.input(n)[dataset.train.target(n)]) for n in range(len(dataset.train))]
    called = "<think>\nI should look.\n</think>\n\n" + CALLING["json"].call
    assert set(learned) == {called + EMPTY + "It rains.<|im_end|>"}
    assert attempt(run) == 0 and trained(run).step == run.plan().steps
    asked = calling_chat(1, system=True, thinks=True, as_objects=False, empty="")[:-1]
    heard = ask(run, messages=asked, tools=[WEATHER], max_new_tokens=2)
    told = calling_chat(1, system=True, thinks=True, as_objects=True, empty="")[:-1]
    stock: Any = AutoTokenizer.from_pretrained(run.model)
    expected = stock.apply_chat_template(told, tools=[WEATHER], tokenize=False, add_generation_prompt=True)
    assert [output.input for output in outputs(heard)] == [expected]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_prompt_and_a_completion_of_turns_are_one_chat(as_json: bool, words: Path, tmp_path: Path) -> None:
    said = calling_chat(2, system=True, thinks=True, as_objects=True, empty="")
    both = {"prompt": said[:-1], "completion": said[-1:]}
    row = {key: json.dumps(turns) for key, turns in both.items()} if as_json else both
    tokenizer = with_template(words, tmp_path, JSON_CALLS)
    texts = texts_of(row | {"tools": [WEATHER]}, "prompt", "completion")
    rows = CausalEncoder(tokenizer, {"input": 4000, "target": 4000}, everything=False).encode([texts])
    stock: Any = AutoTokenizer.from_pretrained(tmp_path)
    asked = stock.apply_chat_template(said[:-1], tools=[WEATHER], tokenize=False, add_generation_prompt=True)
    assert runs(tokenizer, rows) == [[Learned(asked, EMPTY + "It rains.<|im_end|>")]]
    reader = RowReader(template("prompt", ""), replace(template("completion", ""), in_turns=True), None)
    assert tokenizer.chat.prompt(reader.read_asked(row | {"tools": [WEATHER]}))[0] == asked


def test_rows_of_openorca_are_recognized_with_their_system_prompt(workplace: Workplace) -> None:
    model_of(workplace, builtin.CHAT_TEMPLATE)
    rows = [
        {"id": f"cot.{n}", "system_prompt": "" if n % 2 else "Be brief.", "question": f"Why {n}?", "response": "So."}
        for n in range(30)
    ]
    workplace.rows("orca.jsonl", rows)
    run = workplace.job("orca.jsonl", model="./model", data={"validation": 0.2})
    assert workplace.prepare(run)["data"]["kept"] == 30
    [source] = run.preview().sources
    assert (source.read_as, source.companions.system) == ("OpenOrca", "system_prompt")
    texts = ["".join(span.text for span in row.spans) for row in source.rows[:2]]
    assert ["Be brief." in text for text in texts] == [True, False]


def test_an_answer_that_a_call_repeats_is_learned_from_its_beginning(words: Path, tmp_path: Path) -> None:
    tokenizer = with_template(words, tmp_path, JSON_CALLS)
    said = calling_chat(1, system=False, thinks=True, as_objects=True, empty="In Rome")[:2]
    said[1]["tool_calls"][0]["function"]["arguments"] = {"city": "In Rome"}
    texts = texts_of({"messages": said, "tools": [WEATHER]})
    rows = CausalEncoder(tokenizer, {"input": 4000, "target": 4000}, everything=False, learn="answer").encode([texts])
    [[run]] = runs(tokenizer, rows)
    assert run.before.endswith("</think>\n\n") and run.text.startswith("In Rome<tool_call>")
