"""The rows that people are shown: those that can be learned from, whatever stands at their place."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from jobs.errors import BadData, Rejected
from longhaul.preview import print_preview
from tests.training.workplace import Workplace, texts_of, write_table
from tests.training.workplace import of_rows as of_rows
from worker.training.rows.text import UNUSED_TOOLS
from worker.training.tasks.causal import builtin
from worker.training.tasks.causal.rows import OTHER_PROMPT
from worker.training.tasks.seq2seq import builtin as t5_builtin

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REFUSED, SPECIAL = "the chat template refuses the turns: no system prompts", "a special token in the text"


def chat(question: str, answer: str = "Yes.", system: str | None = None) -> dict[str, Any]:
    before = [] if system is None else [{"role": "system", "content": system}]
    turns = [*before, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def chat_model(workplace: Workplace, template: str | None = NO_SYSTEM) -> str:
    folder = workplace.data / "chat"
    folder.mkdir()
    builtin.build(folder, ["Is question 1 good?", "Yes.", "\t\t"], seed=0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return "./chat"


GOOD = [chat(f"Is question {number} good?") for number in range(10, 60)]
LONG = chat("Is this " + "long " * 40 + "question good?")


@pytest.mark.parametrize(
    ("rows", "shown", "rejected"),
    [
        ([chat("Hi", system="Be brief."), *GOOD, LONG], [2, 3, 52], {REFUSED: 1}),
        ([GOOD[0], chat("What is <|im_end|>?"), *GOOD[1:], LONG], [1, 3, 52], {SPECIAL: 1}),
        ([*GOOD, LONG, chat("What is " + "<|im_end|> " * 40)], [1, 2, 51], {SPECIAL: 1}),
        ([chat("Hi", system="Be brief."), LONG, *GOOD], [2, 3, 4], {REFUSED: 1}),
        ([*(chat(f"{number}?", system="Be brief.") for number in range(4)), *GOOD], [5, 6, 7], {REFUSED: 4}),
    ],
    ids=["first", "second", "longest", "first before the longest", "several"],
)
def test_a_row_that_is_rejected_gives_way_to_the_next(
    rows: list[dict[str, Any]], shown: list[int], rejected: dict[str, int], workplace: Workplace
) -> None:
    workplace.rows("chats.jsonl", rows)
    data = {"validation": 0.1, "max_invalid_fraction": 0.2}
    run = workplace.job("chats.jsonl", model=chat_model(workplace), data=data)
    assert workplace.check(run)["plan"]["invalid_rows"] == rejected
    [source] = run.preview().sources
    assert [row.number for row in source.rows] == shown
    assert all(span.text for row in source.rows for span in row.spans)
    assert workplace.prepare_only(run)["data"]["rejected"] == rejected


def test_texts_that_the_chat_template_wrote_are_refused_before_any_row_is_prepared(workplace: Workplace) -> None:
    model = chat_model(workplace)
    turns = "<|im_start|>user\nIs question {} good?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    for name, count in (("few.jsonl", 3), ("many.jsonl", 11_000)):
        workplace.rows(name, [{"text": turns.format(number)} for number in range(count)])
        with pytest.raises(BadData, match=r"none can be used \(a special token in the text: \d+\)$") as refused:
            workplace.check(workplace.job(name, model=model, data={"validation": 0.1}))
        assert refused.value.detail_code == "no_rows"
        assert "if the chat template has been applied to the texts already" in str(refused.value.hint)
    workplace.rows("some.jsonl", [{"text": turns.format(n) if n < 150 else f"it is {n}"} for n in range(11_000)])
    run = workplace.job("some.jsonl", model=model, data={"max_invalid_fraction": 0.1})
    assert workplace.check(run)["plan"]["invalid_rows"] == {SPECIAL: 120}, "what comes after them may be good"
    assert [row.number for row in run.preview().sources[0].rows] == [10_000]


def test_a_text_of_which_the_tokenizer_leaves_nothing_is_not_shown(workplace: Workplace, t5_tokenizer: Path) -> None:
    texts = [{"input": "\u0316", "target": "b"}, *({"input": f"a {number}", "target": "b"} for number in range(30))]
    workplace.rows("rows.jsonl", texts)
    run = workplace.job(model=workplace.t5_model(t5_tokenizer), data={"max_invalid_fraction": 0.1})
    assert workplace.check(run)["plan"]["invalid_rows"] == {"empty input": 1}
    [source] = run.preview().sources
    assert [row.number for row in source.rows] == [2, 3, 12]


@pytest.mark.parametrize("loss_on", ["replies", "all"])
def test_of_a_built_in_model_every_reply_is_shown_as_learned_before_it_has_a_tokenizer(
    loss_on: str, workplace: Workplace
) -> None:
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"), ("user", "Why?"), ("assistant", "So.")]
    rows = [{"messages": [{"role": role, "content": f"{said} {n}"} for role, said in turns]} for n in range(30)]
    workplace.rows("rows.jsonl", [chat("What is <|im_end|>?"), *rows])
    data = {"max_invalid_fraction": 0.1}
    run = workplace.job(model="builtin:qwen-tiny", data=data, task={"type": "causal", "loss_on": loss_on})
    assert workplace.check(run)["plan"]["invalid_rows"] == {SPECIAL: 1}
    before = run.preview().sources[0].rows[0]
    console = Console(file=io.StringIO(), width=300, color_system=None)
    print_preview(run.preview(), console)
    workplace.prepare_only(run)
    after = run.preview().sources[0].rows[0]
    assert before.spans == after.spans and before.input.tokens is None is not after.input.tokens
    learned = [span.text for span in before.spans if span.learned]
    assert learned == (["Ho 0<|im_end|>", "So. 0<|im_end|>"] if loss_on == "replies" else [before.spans[0].text])
    assert all(f"⟦{' '.join(text.split())}" in console.file.getvalue() for text in learned)  # type: ignore[attr-defined]


def test_of_a_built_in_model_nothing_is_said_to_be_rewritten_before_it_has_a_tokenizer(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"input": f"{number} — urgent", "target": "b"} for number in range(30)])
    run = workplace.job()
    workplace.check(run)
    [source] = run.preview().sources
    assert source.rows[0].input.text == "0 — urgent" and source.rows[0].rewritten == {}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_a_column_of_tools_is_said_to_be_unused_and_refused_where_a_template_would_leave_it_out(
    name: str, workplace: Workplace
) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    rows = [
        {"messages": json.dumps(row["messages"]), "tools": tools if place % 5 else "[]"}
        for place, row in enumerate(GOOD)
    ]
    write_table(workplace.data / name, rows)
    run = workplace.job(name)
    workplace.check(run)
    preview = run.preview()
    assert preview.sources[0].rows_with_tools == 40
    console = Console(file=io.StringIO(), width=200)
    print_preview(preview, console)
    assert "the column tools of 40 rows is not used" in console.file.getvalue()  # type: ignore[attr-defined]
    assert workplace.prepare_only(run)["data"]["noticed"][UNUSED_TOOLS] == 40
    with pytest.raises(BadData, match="the chat template writes no tools: 40") as refused:
        workplace.prepare(workplace.job(name, model="builtin:qwen-tiny"))
    assert "remove the column tools" in str(refused.value.hint)


@pytest.mark.parametrize("model", ["builtin:qwen-tiny", "builtin:t5-tiny", "./t5", "./t5-without-room"])
def test_line_breaks_that_the_tokenizer_cannot_write_are_named(model: str, workplace: Workplace) -> None:
    if model.startswith("./"):  # of a folder the tokenizer is known to check
        folder = workplace.data / model
        folder.mkdir()
        t5_builtin.build(folder, ["step 1", "bake it"], seed=0)
        if model == "./t5-without-room":
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.add_tokens([f"<{number}>" for number in range(t5_builtin.VOCABULARY - len(tokenizer))])
            tokenizer.save_pretrained(folder)
    between = ("\n", " ", "\t", "  ", " ")
    rows = [{"input": f"bread {n}", "target": f"knead {n}{between[n % 5]}bake it"} for n in range(50)]
    workplace.rows("rows.jsonl", [*rows, {"input": "and\nnow", "target": " bread\n"}])
    run = workplace.job(model=model)
    workplace.check(run)
    said = [run.preview().sources[0].lost_layout]
    workplace.prepare_only(run)
    said.append(run.preview().sources[0].lost_layout)
    lost = "the targets of 30 of the first rows have line breaks, tabs or several spaces in a row"
    known = {"builtin:qwen-tiny": (False, False), "builtin:t5-tiny": (False, True)}.get(model, (True, True))
    assert tuple((each or "").startswith(lost) for each in said) == known
    hint = "to keep the line breaks, add --set data.keep_line_breaks=true"
    keepable = model in ("builtin:t5-tiny", "./t5")
    assert (said[-1] or "").endswith(hint) is keepable
    keeping = workplace.job(model=model, data={"keep_line_breaks": True})
    if model == "./t5-without-room":
        with pytest.raises(Rejected, match="2,048 embeddings, and no row free for another token") as caught:
            workplace.check(keeping)
        assert (caught.value.detail_code, caught.value.param) == ("line_breaks_lost", "data.keep_line_breaks")
    else:
        workplace.prepare(keeping)
        now = keeping.preview().sources[0].lost_layout
        assert any("\nbake" in text for row in texts_of(keeping) for text in row), "the hint works"
        assert (now or "").startswith("the targets of 20 of the first rows have tabs or several spaces") is keepable
        assert hint not in (now or "")
        assert (keeping.plan().data.prepared != run.plan().data.prepared) is keepable
    console = Console(file=io.StringIO(), width=300)
    print_preview(run.preview(), console)
    assert (lost in console.file.getvalue()) is known[1]  # type: ignore[attr-defined]


def test_replies_behind_other_tokens_than_their_prompts_are_in_the_report(workplace: Workplace) -> None:
    workplace.rows("chats.jsonl", [chat(f"Is question {number} good?", "1 is.") for number in range(30)])
    # Two tabs are one token at the end of a text, and two before a digit.
    two_tabs = NO_SYSTEM.replace("'\n' + m", "'\t\t' + m").replace("assistant\n", "assistant\t\t")
    run = workplace.job("chats.jsonl", model=chat_model(workplace, two_tabs))
    assert workplace.prepare(run)["data"]["noticed"][OTHER_PROMPT] == 30
