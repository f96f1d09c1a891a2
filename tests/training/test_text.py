"""From a row to two texts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from jobs.errors import BadData, Refused
from worker.training.text import Defect, RowReader, choose_templates, normalise, template


def reader(input: str = "question", target: str = "answer", normalised: bool = True) -> RowReader:
    return RowReader(template(input, "data.input"), template(target, "data.target"), normalised)


def why(line: str, input: str = "question", target: str = "answer") -> str:
    with pytest.raises(Defect) as caught:
        reader(input, target).read(line)
    return str(caught.value)


def row(**columns: Any) -> str:
    return json.dumps(columns)


def test_a_template_is_text_with_columns_in_braces() -> None:
    texts = reader("Q: {question} {{now}}", "answer").read(row(question="why?", answer=7))
    assert (texts.input, texts.target) == ("Q: why? {now}", "7")


def test_lists_become_one_text() -> None:
    line = row(things=["1 egg", " ", "2 cups flour, sifted"], steps=["Mix.", "Bake! ", "Eat"])
    texts = reader("things", "steps").read(line)
    assert (texts.input, texts.target) == ("1 egg; 2 cups flour, sifted", "Mix. Bake! Eat")


@pytest.mark.parametrize("text", ["{a", "a}", "{}", "{0:>5}", "{a!r}", "{{a}}"])
def test_a_bad_template_is_refused(text: str) -> None:
    with pytest.raises(Refused) as caught:
        template(text, "data.input")
    assert (caught.value.detail_code, caught.value.param) == ("bad_template", "data.input")


def test_the_usual_columns_are_recognised() -> None:
    recipe = choose_templates(None, None, ["id", "title", "ingredients", "directions"])
    assert [one.source for one in recipe] == ["Write the directions. {title}: {ingredients}", "{directions}"]
    assert [one.source for one in choose_templates(None, None, ["target", "input"])] == ["{input}", "{target}"]


def test_columns_that_are_not_recognised_are_listed_with_what_to_write() -> None:
    with pytest.raises(BadData) as caught:
        choose_templates(None, None, ["prompt", "completion"])
    assert caught.value.detail_code == "no_usable_columns"
    assert "completion, prompt" in str(caught.value)
    assert "data.input and data.target" in str(caught.value.hint)


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(BadData) as caught:
        choose_templates("{prompt}", "{title} {answr}", ["prompt", "title", "answer"])
    assert (caught.value.detail_code, caught.value.param) == ("unknown_column", "data.target")
    assert "'answr'; there are: answer, prompt, title" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "a", "answer"', "bad JSON"),
        ('{"question": NaN, "answer": 1}', "bad JSON"),
        ("[" * 100_000, "bad JSON"),
        ("[1]", "not a JSON object"),
        (row(question="a"), "missing answer"),
        (row(question=None, answer="a"), "missing question"),
        (row(question=" \n", answer="a"), "empty question"),
        (row(question="\u00ad", answer="a"), "empty question"),
        (row(question=[], answer="a"), "empty question"),
        (row(question={"x": 1}, answer="a"), "wrong type in question"),
        (row(question=True, answer="a"), "wrong type in question"),
        (row(question=["a", ["b"]], answer="a"), "wrong type in question"),
        (row(question="a\0b", answer="a"), "control character U+0000"),
        (row(question="a\x92b", answer="a"), "control character U+0092"),
        ('{"question": "\\ud83d", "answer": "a"}', "half a surrogate pair"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(line: str, reason: str) -> None:
    assert why(line) == reason


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("½ cup", "1/2 cup"),
        ("1½ cups, 2 ¼ cups, 1⅛", "1 1/2 cups, 2 1/4 cups, 1 1/8"),
        ("3⁄4 cup", "3/4 cup"),
        ("“it’s”…", '"it\'s"...'),
        ("5–6 min—then − wait — more", "5-6 min - then - wait - more"),
        ("a\u00a0b, soft\u00adly", "a b, softly"),
        ("crème brûlée 180 °C", "crème brûlée 180 °C"),
    ],
)
def test_characters_are_normalised(before: str, after: str) -> None:
    assert normalise(before, Counter()) == after


def test_normalising_is_counted_and_can_be_switched_off() -> None:
    line = row(question="½ and ½ of 1¾", answer="plain")
    on, off = reader(), reader(normalised=False)
    assert on.read(line).input == "1/2 and 1/2 of 1 3/4"
    assert on.normalised == {"½": 2, "¾": 1}
    assert off.read(line).input == "½ and ½ of 1¾"
    assert not off.normalised


def test_equal_rows_have_equal_keys_whatever_their_spelling() -> None:
    keys = {reader().read(line).key for line in (row(question="½", answer="a"), row(answer="a", question="1/2"))}
    assert len(keys) == 1
    assert reader().read(row(question="1/2", answer="b")).key not in keys
