"""What *check* offers for rows that it does not recognize: a line to paste, which works."""

from __future__ import annotations

import json
import shlex
import subprocess
from itertools import pairwise
from typing import Any

import pytest

from jobs.errors import BadData
from longhaul.jobfile import apply_changes
from tests.support.workbooks import cells_of, xlsx
from tests.training.workplace import Workplace
from tests.training.workplace import of_rows as of_rows

TROUBLES = ("My kettle does not start", "My lamp leaks water", "The router arrived broken")


def refused(place: Workplace, name: str, model: str) -> str:
    with pytest.raises(BadData) as caught:
        place.check(place.job(name, model=model))
    return str(caught.value.hint)


def taken(place: Workplace, name: str, model: str, hint: str) -> tuple[str | None, str]:
    """The templates of the job with what the hint says to add, once it has passed *check*."""
    changes = [change for word, change in pairwise(shlex.split(hint)) if word == "--set"]
    given = apply_changes({"model": model, "data": {"train": name}}, changes)
    data = given.pop("data")
    run = place.job(data.pop("train"), data=data, **given)
    place.check(run)
    return run.plan().data.input, run.plan().data.target


@pytest.mark.parametrize("model", ["builtin:t5-tiny", "builtin:qwen-tiny"])
@pytest.mark.parametrize(
    ("row", "templates"),
    [
        # The columns stand in another order than that of the alphabet, and beside some that are no texts.
        ({"id": 7, "kind": "x", "Question text": "{}, number {}", "annotations": "reply {1}"},
         ("{Question text}", "{annotations}")),
        ({"a_reply": "reply {1} to it", "b": "{}, number {}"}, ("{b}", "{a_reply}")),
        ({"question": "{}, number {}", "answers": ["first {1}", "second {1}"]}, ("{question}", "{answers[0]}")),
        ({"ticket": {"body": "{}, number {}", "n": 1}, "notes": "note {1}"}, ("{ticket.body}", "{notes}")),
    ],
)  # fmt: skip
def test_columns_of_texts_are_offered(
    row: dict[str, Any], templates: tuple[str, str], model: str, workplace: Workplace
) -> None:
    def filled(value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {key: filled(one, number) for key, one in value.items()}
        if isinstance(value, list):
            return [filled(one, number) for one in value]
        return value.format(TROUBLES[number % 3], number) if isinstance(value, str) else value

    workplace.rows("rows.jsonl", [filled(row, number) for number in range(60)])
    hint = refused(workplace, "rows.jsonl", model)
    assert taken(workplace, "rows.jsonl", model, hint) == templates


def test_without_two_columns_of_texts_none_is_offered(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"notes": f"note {number}", "n": number} for number in range(60)])
    assert refused(workplace, "rows.jsonl", "builtin:t5-tiny").startswith("say which: data.input and data.target")


def test_a_field_of_an_object_is_offered_where_a_text_should_be(workplace: Workplace) -> None:
    rows = [
        {"instruction": f"{TROUBLES[number % 3]}, number {number}", "input": "",
         "output": {"n": number, "answer": f"reply {number}"}}
        for number in range(60)
    ]  # fmt: skip
    workplace.rows("rows.jsonl", rows)
    hint = refused(workplace, "rows.jsonl", "builtin:t5-tiny")
    whole = "or the whole object, as JSON: {output|json}"
    assert hint.startswith(f"`output` holds objects with answer, n; name what to learn, {whole}: --set ")
    assert taken(workplace, "rows.jsonl", "builtin:t5-tiny", hint) == ("{instruction} {input?}", "{output.answer}")
    hint = hint.replace("{output.answer}", "{output|json}")
    assert taken(workplace, "rows.jsonl", "builtin:t5-tiny", hint) == ("{instruction} {input?}", "{output|json}")


def test_objects_in_a_few_rows_change_no_template(workplace: Workplace) -> None:
    rows: list[dict[str, Any]] = [
        {"input": f"{TROUBLES[n % 3]}, number {n}", "output": f"reply {n}"} for n in range(60)
    ]
    rows[7]["output"] = rows[8]["output"] = {"answer": "reply"}
    workplace.rows("rows.jsonl", rows)
    hint = refused(workplace, "rows.jsonl", "builtin:t5-tiny")
    assert hint == "repair these lines, or set data.max_invalid_fraction to 0.034 to continue without them"


def test_objects_without_fields_to_name_are_offered_as_json(workplace: Workplace) -> None:
    rows = [{"input": f"{TROUBLES[n % 3]}, number {n}", "output": [{"answer": f"reply {n}"}]} for n in range(60)]
    workplace.rows("rows.jsonl", rows)
    hint = refused(workplace, "rows.jsonl", "builtin:t5-tiny")
    assert hint.startswith("`output` holds objects; take them as JSON: --set ")
    assert taken(workplace, "rows.jsonl", "builtin:t5-tiny", hint) == ("{input}", "{output|json}")


@pytest.mark.parametrize("model", ["builtin:t5-tiny", "builtin:qwen-tiny"])
def test_a_chat_as_json_is_a_text(workplace: Workplace, model: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    workplace.rows("rows.jsonl", [{"text": f"{TROUBLES[n % 3]}, number {n}", "messages": turns} for n in range(60)])
    run = workplace.job("rows.jsonl", model=model, data={"input": "{text}", "target": "{messages|json}"})
    workplace.check(run)
    assert run.preview().sources[0].rows[0].target.text == json.dumps(turns)


@pytest.mark.parametrize("separator", ["\t", ",", ";"])
def test_a_table_without_names_is_told_from_one_with_them(separator: str, workplace: Workplace) -> None:
    name = "rows.tsv" if separator == "\t" else "rows.csv"
    kinds = ("repair", "return", "question")
    lines = [f"{TROUBLES[n % 3]} since day {n}. Please help me soon.{separator}{kinds[n % 3]}" for n in range(60)]
    workplace.rows(name, list(lines))
    hint = refused(workplace, name, "builtin:roberta-tiny")
    assert "its first line looks like a row" in hint
    command = hint.split("`")[1]
    subprocess.run(["bash", "-c", command], cwd=workplace.data, check=True, timeout=60)
    assert (workplace.data / name).read_text().splitlines() == [f"column1{separator}column2", *lines]
    hint = refused(workplace, name, "builtin:roberta-tiny")
    assert taken(workplace, name, "builtin:roberta-tiny", hint) == ("{column1}", "{column2}")


def test_a_sheet_without_names_is_told_as_well(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[f"{TROUBLES[n % 3]} since day {n}. Please help me soon.", n % 3] for n in range(60)]
    (workplace.data / "rows.xlsx").write_bytes(xlsx({"One": cells_of(rows)}))
    with pytest.raises(BadData, match=r"recognized in rows.xlsx; it has: .*\(from sheet 'One'\)$") as caught:
        workplace.check(workplace.job("rows.xlsx", model="builtin:roberta-tiny"))
    assert "put names in a row above it" in str(caught.value.hint)
    (workplace.data / "rows.xlsx").write_bytes(xlsx({"One": cells_of([["text", "label"], *([["", 1]] * 9)])}))
    with pytest.raises(BadData, match=r"9 of 9 rows of rows.xlsx cannot be used .* \(from sheet 'One'\)$"):
        workplace.check(workplace.job("rows.xlsx", model="builtin:roberta-tiny"))
    (workplace.data / "rows.xlsx").write_bytes(xlsx({"One": cells_of([["text", "label"], *rows])}))
    run = workplace.job("rows.xlsx", model="builtin:roberta-tiny", data={"validation": 0.0})
    assert workplace.check(run)["plan"]["labels"] == 3
    (workplace.data / "rows.xlsx").write_bytes(xlsx({"One": cells_of([["text", "label"], *rows, *([["", 1]] * 60)])}))
    monkeypatch.setattr("worker.training.dataset.inspection.ROWS", len(rows))
    run = workplace.job("rows.xlsx", model="builtin:roberta-tiny", data={"validation": 0.0})
    workplace.check(run)
    with pytest.raises(BadData, match=r"60 of 120 rows of rows.xlsx cannot be used .* \(from sheet 'One'\)$"):
        workplace.prepare_only(run)
