"""From a row to two texts."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest

from jobs.errors import BadData, Rejected
from worker.training.rows.characters import Rewriter
from worker.training.rows.row import Defect
from worker.training.rows.text import RowReader, Texts, letters_and_digits, template
from worker.training.tasks.columns import PAIRS, choose_templates, recognize


def reader(input: str = "question", target: str = "answer", normalized: bool = True) -> RowReader:
    templates = template(input, "data.input"), template(target, "data.target")
    return RowReader(*templates, Rewriter() if normalized else None)


def row(**columns: Any) -> dict[str, Any]:
    return columns


def test_a_template_is_text_with_columns_in_braces() -> None:
    texts = reader("Q: {question} {{now}}", "answer").read(row(question="why?", answer=7))
    assert (texts.input, texts.target) == ("Q: why? {now}", "7")


def test_lists_become_one_text() -> None:
    columns = row(things=["1 egg", " ", "2 cups flour, sifted"], steps=["Mix.", "Bake! ", "Eat"])
    texts = reader("things", "steps").read(columns)
    assert (texts.input, texts.target) == ("1 egg; 2 cups flour, sifted", "Mix. Bake! Eat")


@pytest.mark.parametrize(
    "text", ['["Knead it.", "Bake it."]', "[serves 4]", "[1, 2]", "[]", '["Knead it.', "[" * 9999 + "]" * 9999]
)
def test_a_text_that_looks_like_a_list_stays_as_it_is(text: str) -> None:
    one = reader("a", "b")
    assert one.read({"a": text, "b": "x"}).input == text
    assert one.noticed == ({"a JSON array as the text of a": 1} if "Bake" in text else {})
    assert not one.rewritten


def test_every_rewriting_is_counted_with_an_example() -> None:
    one = reader("things", "steps")
    one.read({"things": ["1 egg", "½ cup milk"], "steps": "Mix."})
    one.read({"things": ["salt"], "steps": "Cook 1½ hours."})
    with pytest.raises(Defect):
        one.read({"things": ["½ onion"], "steps": ""})
    assert one.rewritten == {"list in things joined": 2, "characters rewritten": 2}
    assert one.examples == {
        "list in things joined": ['["1 egg", "½ cup milk"]', "1 egg; ½ cup milk"],
        "characters rewritten": ["1 egg; ½ cup milk", "1 egg; 1/2 cup milk"],
    }


def test_truth_values_are_texts_and_nan_is_missing() -> None:
    texts = reader().read(row(question=True, answer=[False, 1.5]))
    assert (texts.input, texts.target) == ("true", "false; 1.5")


@pytest.mark.parametrize("text", ["{a", "a}", "{}", "{a}}", "{a{b}}", "{{a}}"])
def test_a_bad_template_is_refused(text: str) -> None:
    with pytest.raises(Rejected) as caught:
        template(text, "data.input")
    assert (caught.value.detail_code, caught.value.param) == ("bad_template", "data.input")


@pytest.mark.parametrize("name", ["Time: now", "Hi!", "Q (a, b): what?", "A[0]", "a[]", f"a[{'9' * 5000}]", "é\n"])
def test_a_column_may_have_any_name_without_braces(name: str) -> None:
    by_itself = template(name, "data.input")
    for one in (by_itself, template(by_itself.source, "data.input"), template("{" + name + "}", "data.input")):
        assert one.fill({name: "x"}) == "x"


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
         {"role": "assistant", "content": "Hello"}, {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
         {"role": "assistant", "content": "Later"}, {"role": "user", "content": "unanswered"}]  # fmt: skip
SHARED = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
RECIPE = {"title": "Pie", "ingredients": ["apples", "flour"]}


@pytest.mark.parametrize(
    ("columns", "input", "target"),
    [
        ({"id": 1, **RECIPE, "directions": ["Mix.", "Bake."]},
         "Write the directions. Pie: apples; flour", "Mix. Bake."),
        ({**RECIPE, "Instructions": ["Mix."]}, "Write the directions. Pie: apples; flour", "Mix."),
        ({"instruction": "Add", "target": "b", "input": "a"}, "Add a", "b"),
        ({"target": "b", "input": "a"}, "a", "b"),
        ({"messages": TURNS}, "system: Be brief. user: Hi assistant: Hello user: Bye", "Later"),
        ({"conversations": SHARED, "id": "x"}, "2 + 2?", "4"),
        ({"question": "who", "context": "I did", "answers": {"text": ["I"], "answer_start": [0]}},
         "question: who context: I did", "I"),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, "Add 1, 2", "3"),
        ({"instruction": "Sing", "input": "", "output": "la"}, "Sing", "la"),
        ({"instruction": "Sum up", "context": "long", "response": "short", "category": "x"}, "Sum up long", "short"),
        ({"instruction": "Add", "input": "1, 2", "response": "3"}, "Add 1, 2", "3"),
        ({"instruction": "Sum up", "context": "long", "output": "short"}, "Sum up long", "short"),
        ({"question": "who", "context": "I did", "answer": "I"}, "question: who context: I did", "I"),
        ({"question": "who", "context": None, "answer": "I"}, "question: who", "I"),
        ({"question": "is it", "passage": "It is.", "answer": True}, "question: is it context: It is.", "true"),
        ({"Prompt": "a", "Completion": "b"}, "a", "b"),
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"instruction": "a", "output": "b"}, "a", "b"),
        ({"instruction": "a", "response": "b"}, "a", "b"),
        ({"question": "a", "answer": "b"}, "a", "b"),
        ({"source": "a", "target": "b"}, "a", "b"),
        ({"inputs": "a", "targets": "b"}, "a", "b"),
        ({"input_text": "a", "target_text": "b"}, "a", "b"),
        ({"input": "a", "output": "b"}, "a", "b"),
        ({"document": "a", "summary": "b"}, "a", "b"),
        ({"article": "a", "summary": "b"}, "a", "b"),
        ({"article": "a", "highlights": "b"}, "a", "b"),
        ({"dialogue": "a", "summary": "b"}, "a", "b"),
        ({"text": "a", "summary": "b"}, "a", "b"),
        ({"text": "a", "label": 3}, "a", "3"),
        ({"question": "a", "response": "b"}, "a", "b"),
    ],
)  # fmt: skip
def test_the_usual_formats_are_recognized(columns: dict[str, Any], input: str, target: str) -> None:
    texts = RowReader(*choose_templates(None, None, columns.keys(), "rows.jsonl", PAIRS), None).read(columns)
    assert (texts.input, texts.target) == (input, target)


def test_every_format_that_is_recognized_is_tried_above() -> None:
    tried = test_the_usual_formats_are_recognized.pytestmark[0].args[1]
    assert {recognize(columns.keys(), PAIRS) for columns, _, _ in tried} == set(PAIRS)


def test_columns_that_are_not_recognized_are_listed_with_what_to_write() -> None:
    with pytest.raises(BadData) as caught:
        choose_templates(None, None, ["ask", "tell"], "rows.jsonl", PAIRS)
    assert caught.value.detail_code == "no_usable_columns"
    assert "recognized in rows.jsonl; it has: ask, tell" in str(caught.value)
    assert (
        str(caught.value.hint).startswith("say which: data.input and data.target") and len(str(caught.value.hint)) < 150
    )


@pytest.mark.parametrize(
    ("columns", "example"),
    [
        (["subject", "body", "reply"], "Answer: {body}"),
        (["Frage?", "a.b", "frage"], "Answer: {frage}"),
        (["two words"], "Answer: {question}"),
    ],
)
def test_the_example_of_a_template_is_over_a_column_that_there_is(columns: list[str], example: str) -> None:
    with pytest.raises(BadData) as caught:
        choose_templates(None, None, columns, "rows.jsonl", PAIRS)
    assert f'a template such as "{example}"' in str(caught.value.hint)


def test_long_names_of_columns_are_cut_in_a_message() -> None:
    columns = ["a" * 100_000, "translation." + "b" * 100_000, "translation." + "c" * 100_000]
    for input in (None, "x"):
        with pytest.raises(BadData) as caught:
            choose_templates(input, input, columns, "rows.jsonl", PAIRS)
        assert len(str(caught.value)) + len(str(caught.value.hint)) < 2000


def test_a_translation_asks_which_way_and_takes_the_answer() -> None:
    columns = ["id", "translation", "translation.de", "translation.en"]
    with pytest.raises(BadData) as caught:
        choose_templates(None, None, columns, "rows.jsonl", PAIRS)
    assert caught.value.hint == (
        "say which way: data.input: {translation.de} and data.target: {translation.en}, or the reverse"
    )
    templates = choose_templates("{translation.de}", "{translation.en}", columns, "rows.jsonl", PAIRS)
    assert RowReader(*templates, None).read({"translation": {"de": "Brot", "en": "bread"}}).input == "Brot"


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{a.b}", "x"),
        ("{m[0].content} and {m[-1].content}", "Hi and Ho"),
        ("{a.c.d[1]}", "two"),
        ("{{{a.b}}}", "{x}"),
        ("{x.y}", "a column with a dot"),
        ("{Is it?}", "yes"),
        ("{a.b}. Note: {none?}", "x"),
        ("{a.b}. Note: {a.b?}", "x. Note: x"),
        ("{none?}: {a.b}", "x"),
        ("Note: {empty?}, {a.b}", ", x"),
        ("{a.b}{none?}: {a.b}", "x: x"),
        ("{a.b} {list?} end", "x end"),
        ("{a.b} {blanks?} end", "x end"),
        ("{a.b} {nan?} end", "x end"),
        ("{a|json}", '{"b": "x", "c": {"d": ["one", "two"]}}'),
        ("{a.c.d|json}: {m[0]|json}", '["one", "two"]: {"content": "Hi"}'),
        ("{gaps|json}", '{"a": null, "b": [1.5, null]}'),
        ("{a.b|json} {none|json?} {nan|json?} end", '"x" end'),
        ("{a|b|json}", "a column with bars"),
        ("{price} {count}", "12.50 7"),
        ("{price|json} {count|json} {sum|json}", "12.5 7 123456789012345678901234567890"),
        ("{day}, {hour}, {moment}, {midnight}", "2020-01-31, 10:30:00, 2020-01-31 10:30:00, 2020-01-31"),
        ("{day|json}", '"2020-01-31"'),
        ("{bytes|json}", '"café"'),
    ],
)
def test_a_template_takes_paths_and_leaves_out_what_is_optional(text: str, filled: str) -> None:
    columns = {
        "a": {"b": "x", "c": {"d": ["one", "two"]}}, "m": [{"content": "Hi"}, {"content": "Ho"}], "empty": " ",
        "x.y": "a column with a dot", "a|b|json": "a column with bars", "Is it?": "yes", "list": [],
        "blanks": ["", " "], "nan": float("nan"), "gaps": {"a": float("nan"), "b": [1.5, float("nan")]},
        "price": Decimal("12.50"), "count": Decimal(7), "sum": Decimal("123456789012345678901234567890"),
        "day": date(2020, 1, 31), "hour": time(10, 30), "moment": datetime(2020, 1, 31, 10, 30),
        "midnight": datetime(2020, 1, 31), "bytes": "café".encode(),
    }  # fmt: skip
    assert template(text, "data.input").fill(columns).strip() == filled


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a.c}", "missing a.c"), ("{m[7]}", "missing m[7]"), ("{m.prompt}", "missing m.prompt"),
        ("{a[0]}", "missing a[0]"), ("{none|json}", "missing none"),
        ("{endless|json}", "an infinite number in endless"),
        ("{m[0]}", "an object in m[0]"), ("{turns.completion}", "a chat without a reply"),
        ("{turns.prompt}", "a chat without a reply"), ("{none.prompt}", "missing none.prompt"),
        ("{bytes|json}", "bytes that are not UTF-8 in bytes"), ("{bytes}", "wrong type in bytes"),
        ("{long|json}", "a decimal with more digits than a float in long"), ("{span|json}", "wrong type in span"),
        ("{deep|json}", "data nested too deeply"), ("{keys|json}", "wrong type in keys"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_rejects_the_row(text: str, reason: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    columns = {
        "a": {"b": "x"}, "m": [{"content": "Hi"}], "turns": [{"role": "user", "content": "Hi"}],
        "endless": [float("nan"), {"a": -float("inf")}], "bytes": b"caf\xe9", "span": timedelta(1),
        "long": Decimal("0.123456789012345678901234567890"), "keys": {date(2020, 1, 31): 1},
        "deep": deep,
    }  # fmt: skip
    with pytest.raises(Defect, match=re.escape(reason)):
        template(text, "data.input").fill(columns)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


A_CALL, NO_TEXT = "a turn with a tool call, which only a chat template writes", "a turn that is not text alone"


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (CALL, A_CALL), (CALL | {"content": None}, A_CALL),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, A_CALL),
        ({"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]}, NO_TEXT),
        ({"role": "user", "content": 42}, NO_TEXT), ({"role": "user", "content": None}, NO_TEXT),
        ({"role": "user"}, NO_TEXT),
    ],
)  # fmt: skip
def test_a_chat_that_is_not_text_alone_is_rejected_and_not_learned_in_part(turn: dict[str, Any], reason: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, turn, {"role": "assistant", "content": "Hello", "tool_calls": None}]
    for field in ("prompt", "completion"):
        with pytest.raises(Defect, match=f"^{reason}$"):
            template(f"messages.{field}", "data.input").fill({"messages": turns})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_beside_a_reply_is_not_left_out_in_silence(key: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", key: "They greet me."}]
    with pytest.raises(Defect, match="its reasoning apart from its text"):
        template("messages.completion", "data.input").fill({"messages": turns})
    turns[1][key] = ""
    assert template("{messages.completion}", "data.input").fill({"messages": turns}) == "Hello"


def test_the_last_reply_that_has_a_weight_is_learned() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 1},
             {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Go!", "weight": 0}]  # fmt: skip
    assert template("{messages.prompt} > {messages.completion}", "data.input").fill({"messages": turns}) == "Hi > Hello"


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "bing", "bard", "Assistant", "model"])
def test_a_reply_is_one_under_any_of_its_names(role: str) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": role, "value": "Hello"}]
    assert template("{turns.completion}", "data.input").fill({"turns": turns}) == "Hello"


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(BadData) as caught:
        choose_templates("{prompt}", "{title} {answr}", ["prompt", "title", "answer"], "rows.jsonl", PAIRS)
    assert (caught.value.detail_code, caught.value.param) == ("unknown_column", "data.target")
    assert "'answr'; there are: answer, prompt, title" in str(caught.value)
    assert str(caught.value.hint).startswith("did you mean 'answer'?")
    with pytest.raises(BadData, match=re.escape("no row of rows.jsonl has a column 'a.c'")):
        choose_templates("a.c", "a.b", ["a", "a.b"], "rows.jsonl", PAIRS)


def test_normalizing_is_counted_and_can_be_switched_off() -> None:
    columns = row(question="½ and ½ of 1¾", answer="plain")
    on, off = reader(), reader(normalized=False)
    assert on.read(columns).input == "1/2 and 1/2 of 1 3/4"
    assert on.normalized == {"½": 2, "¾": 1}
    assert off.read(columns).input == "½ and ½ of 1¾"
    assert not off.normalized


def test_oddities_are_kept_and_counted_by_row() -> None:
    all_rows = reader()
    for question in ("a <b>bold</b> word", "x < 5, y > 3", "bread &amp; butter", "AT&T; so", "350\ufffdF", "a\nb\nc"):
        assert all_rows.read(row(question=question, answer="<br/> &#189;")).input == question
    assert all_rows.noticed == {
        "HTML tags": 6, "HTML entities": 6, "newlines": 1, "replacement characters (U+FFFD)": 1
    }  # fmt: skip
    none = reader()
    none.read(row(question="x < 5, y > 3 & AT&T", answer="plain"))
    assert not none.noticed


def test_equal_rows_have_equal_keys_whatever_their_spelling() -> None:
    keys = {reader().read(columns).key for columns in (row(question="½", answer="a"), row(answer="a", question="1/2"))}
    assert len(keys) == 1
    assert reader().read(row(question="1/2", answer="b")).key not in keys


@pytest.mark.parametrize(
    "other",
    ["crème  brûlée (180 °c)", "Creme Brulee 180C", "CRÈME BRÛLÉE: 180 °C!", "Cre\u0300me Bru\u0302le\u0301e 180 °C"],
)
def test_inputs_that_differ_in_nothing_but_letters_case_and_signs_are_split_alike(other: str) -> None:
    one = Texts("Crème Brûlée 180 °C", "a")
    assert Texts(other, "b").split_key == one.split_key
    assert Texts(other, "b").key != one.key
    assert Texts("Crème Brûlée 190 °C", "a").split_key != one.split_key


def test_a_text_of_signs_alone_is_not_nothing() -> None:
    assert letters_and_digits("?!") != letters_and_digits("!?")
