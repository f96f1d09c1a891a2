"""Columns beside those that are learned from: read as what they are, or named; never silently taken for nothing."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from jobs.companions import NO_COMPANIONS, CompanionColumns
from jobs.errors import BadData
from jobs.spec import parse_spec
from longhaul.preview import print_preview
from tests.training.workplace import Workplace, write_table
from tests.training.workplace import of_rows as of_rows
from worker.training.check import read_by
from worker.training.dataset.inspection import survey
from worker.training.rows.chat import Turn
from worker.training.rows.companions import companions_of, unread_columns, values_of
from worker.training.rows.origin import find_head
from worker.training.rows.row import Defect, RowCounts
from worker.training.rows.text import RowReader, Texts, template
from worker.training.tasks.registry import task_of

ASKED = {"role": "user", "content": "How?"}
CHAT = [ASKED, {"role": "assistant", "content": "So."}]
SHARED = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]
EARLIER = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
ALPACA = {"instruction": "How?", "input": "", "output": "So."}
SYSTEM = Turn("system", "Be brief.", learned=False)
WHY, BECAUSE = Turn("user", "Why?", learned=False), Turn("assistant", "Because.", learned=True)
HOW, SO = Turn("user", "How?", learned=False), Turn("assistant", "So.", learned=True)


def reader(rows: list[dict[str, Any]], task: str = "causal", *, held_out: bool = False) -> RowReader:
    """What reads a file of such rows, as *check* decides it."""
    values = values_of(rows)
    of_task = task_of(parse_spec({"data": {"train": "rows.jsonl"}, "task": {"type": task}}), task)
    input, target = of_task.templates(None, None, values.keys(), "rows.jsonl")
    read = {column for one in (input, target) if one for column in one.columns}
    found = companions_of(values, read, recognized=True, labelled=of_task.has_labels, held_out=held_out)
    return RowReader(input, of_task.target_template(target.source, found), None)


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"system": "Be brief.", "messages": CHAT}, (SYSTEM, HOW, SO)),
        ({"system": [{"text": "Be "}, {"text": "brief."}], "messages": CHAT}, (SYSTEM, HOW, SO)),
        ({"system": "Be brief.", "messages": [{"role": "system", "content": "Be brief."}, *CHAT]}, (SYSTEM, HOW, SO)),
        ({"system": "Be brief.", "conversations": SHARED}, (SYSTEM, HOW, SO)),
        ({"history": EARLIER, "messages": CHAT}, (WHY, BECAUSE, HOW, SO)),
        ({"history": EARLIER, "messages": [{"role": "system", "content": "Be brief."}, *CHAT]},
         (SYSTEM, WHY, BECAUSE, HOW, SO)),
        ({"system_prompt": "Be brief.", **ALPACA}, (SYSTEM, HOW, SO)),
        ({"history": [["Why?", "Because."]], **ALPACA}, (WHY, BECAUSE, HOW, SO)),
        ({"history": json.dumps([["Why?", "Because."]]), **ALPACA}, (WHY, BECAUSE, HOW, SO)),
        ({"History": EARLIER, "System": "Be brief.", **ALPACA}, (SYSTEM, WHY, BECAUSE, HOW, SO)),
    ],
)  # fmt: skip
def test_a_system_prompt_and_a_history_beside_a_row_come_before_its_turns(
    row: dict[str, Any], turns: tuple[Turn, ...]
) -> None:
    texts = reader([row]).read(row)
    assert texts.turns == turns
    as_text = " ".join(f"{turn.role}: {turn.content}" for turn in turns[:-1])
    assert (texts.input, texts.target) == (as_text or "How?", "So.")
    asked = reader([row]).read_asked(row)
    assert [turn.content for turn in asked.turns] == [turn.content for turn in turns[:-1]]
    pairs = reader([row], "seq2seq")
    assert pairs.read(row) == Texts(texts.input, "So.")
    assert pairs.read_asked(row) == Texts(texts.input, "") == Texts(asked.input, "")


@pytest.mark.parametrize(
    ("first", "row", "defect"),
    [
        ({"system": "Be brief.", "messages": CHAT},
         {"system": "Be brief.", "messages": [{"role": "system", "content": "Be kind."}, *CHAT]},
         "a system prompt beside the chat, and another one in it"),
        ({"system": "Be brief.", **ALPACA}, {"system": {"a": 1}, **ALPACA}, "a system prompt that is not text"),
        ({"history": EARLIER, **ALPACA}, {"history": "none so far", **ALPACA},
         "a history that is no list of turns, nor of [question, answer]"),
        ({"history": EARLIER, **ALPACA}, {"history": [["Why?"]], **ALPACA},
         "a history that is no list of turns, nor of [question, answer]"),
    ],
)  # fmt: skip
def test_what_is_no_system_prompt_or_history_rejects_its_row(
    first: dict[str, Any], row: dict[str, Any], defect: str
) -> None:
    with pytest.raises(Defect, match=defect.replace("[", r"\[")):
        reader([first]).read(row)


def test_a_history_that_begins_after_the_first_rows_is_read_and_its_system_prompt_is_said_once() -> None:
    empty = {"history": [], "system": "", **ALPACA}
    reads = reader([empty])
    assert reads.read(empty) == Texts("How?", "So.")
    begun = {"history": [{"role": "system", "content": "Be brief."}, *EARLIER], "system": "Be brief.", **ALPACA}
    assert reads.read(begun).turns == (SYSTEM, WHY, BECAUSE, HOW, SO)
    with pytest.raises(Defect, match="a system prompt beside the chat, and another one in it"):
        reads.read(begun | {"system": "Be kind."})


def test_where_nothing_is_said_beside_a_row_it_is_read_as_ever() -> None:
    columns = {"system": "Be brief.", "history": EARLIER, **ALPACA}
    without = {"system": "", "history": [], **ALPACA}
    assert reader([columns]).read(without) == reader([ALPACA]).read(ALPACA) == Texts("How?", "So.")
    # Names of prepared datasets are made of this: those of earlier versions stay.
    assert template("input", "data.input").decides == "{input}"


TEXT, PAIR = {"text": "It is hot", "label": "red"}, {"prompt": "How?", "completion": "So."}
ODD = "a value of {} that says neither whether the row is used nor not: it is used"


@pytest.mark.parametrize(
    ("row", "column", "values", "left_out", "later"),
    [
        (TEXT, "answer", ["accept", "Reject", "ignore", None], ["reject", "ignore"], "later"),
        (PAIR, "label", [True, False, None], ["false"], "maybe"),
        (PAIR, "label", ["True", "False"], ["false"], 2),
        ({"messages": CHAT}, "kto_tag", [True, False], ["false"], "maybe"),
        (TEXT, "weight", [1, 0, 1.0, "0.0"], ["0", "0"], 0.5),
        (TEXT, "split", ["train", "test", "Validation"], ["test", "validation"], "unlabelled"),
    ],
)
def test_a_row_that_says_that_it_is_not_to_be_learned_is_left_out(
    row: dict[str, Any], column: str, values: list[Any], left_out: list[str], later: Any
) -> None:
    rows = [row | {column: value} for value in values]
    reads, found = reader(rows, "classification" if row is TEXT else "causal"), []
    for each in [*rows, row | {column: later}]:
        try:
            reads.read(each)
        except Defect as defect:
            found.append(str(defect))
    assert found == [f"left out: {column} is {value}" for value in left_out]
    assert reads.noticed == {ODD.format(column): 1}


def test_a_split_leaves_no_row_out_of_a_file_that_is_held_out() -> None:
    rows = [TEXT | {"split": "test", "answer": "accept"}]
    assert reader(rows, "classification", held_out=True).read(rows[0]) == Texts("It is hot", "red")


@pytest.mark.parametrize(
    ("column", "values", "meaning"),
    [
        ("is_selected", [0, 1], "verdict"),
        ("status", ["approved", "rejected", "in review"], "verdict"),
        ("accepted", [True, False], "verdict"),
        ("quality", ["good", "bad"], "verdict"),
        ("answer", ["accept", "later"], "verdict"),
        ("split", ["train", "unlabelled"], "split"),
        ("part", ["train", "test"], "split"),
        ("weight", [0.5, 1], "weight"),
        ("weight", list(range(50)), "weight"),
        ("system", ["Be brief."], "system"),
        ("history", [[["Why?", "Because."]]], "history"),
        ("id", list(range(50)), None),
        ("id", [0, 1], None),
        ("topic", ["billing", "good"], None),
        ("note", ["it was rejected because of the colour"], None),
        ("history", ["diabetes"], None),
        ("meta", [{"status": "rejected"}], None),
        ("accepted", [None, ""], None),
    ],
)
def test_a_column_that_nobody_reads_is_noticed_where_its_values_look_as_if_they_meant_something(
    column: str, values: list[Any], meaning: str | None
) -> None:
    found = unread_columns(values_of([{column: value} for value in values]), set(), labelled=False, held_out=False)
    assert [each.meaning for each in found] == ([meaning] if meaning else [])
    assert (
        unread_columns(values_of([{column: value} for value in values]), {column}, labelled=False, held_out=False) == ()
    )


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_job_says_what_columns_beside_its_texts_do_and_which_do_nothing(name: str, workplace: Workplace) -> None:
    rows = [
        {"text": f"It is {place} hot", "label": "red" if place % 2 else "blue", "checked": "yes" if place % 3 else "no",
         "answer": "accept" if place % 4 else "reject"}
        for place in range(60)
    ]  # fmt: skip
    write_table(workplace.data / name, rows)
    run = workplace.job(name, model="builtin:roberta-tiny")
    assert workplace.check(run)["plan"]["invalid_rows"] == {"left out: answer is reject": 15}
    [source] = run.preview().sources
    console = Console(file=io.StringIO(), width=300)
    print_preview(run.preview(), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the column answer leaves rows out where it is reject, ignore or false" in shown
    assert "left out: answer is reject: 15 of all rows" in shown
    assert "the column checked (no, yes) is not used: every row is used, whatever it says." in shown
    data = workplace.prepare_only(run)["data"]
    assert (data["kept"], data["rejected"]) == (45, {"left out: answer is reject": 15})
    assert run.plan().data.companions == source.companions == CompanionColumns(verdict="answer")


def test_validation_rows_of_their_own_are_read_by_their_own_columns(workplace: Workplace) -> None:
    chats = [{"messages": [ASKED | {"content": f"{place}?"}, CHAT[1]]} for place in range(20)]
    workplace.rows("rows.jsonl", chats)
    workplace.rows("held.jsonl", [{"system": "Be brief.", **chat} for chat in chats])
    run = workplace.job(model="builtin:qwen-tiny", data={"validation": "held.jsonl"})
    data = workplace.prepare(run)["data"]
    assert (data["train_rows"], data["validation_rows"], data["duplicates"]) == (20, 20, 0)
    assert run.plan().data.companions == NO_COMPANIONS
    assert run.plan().data.validation_companions == CompanionColumns(system="system")


def test_a_file_of_which_every_row_is_left_out_is_refused_with_the_reason(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"input": f"{place}", "target": "b", "answer": "reject"} for place in range(20)])
    with pytest.raises(BadData, match=r"no row of rows\.jsonl can be used \(left out: answer is reject: 20\)"):
        workplace.check(workplace.job())


@pytest.mark.parametrize(("column", "value"), [("split", "test"), ("weight", 0)])
def test_a_column_that_would_leave_every_row_out_is_not_read(column: str, value: Any, workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"input": f"{place}", "target": "b", column: value} for place in range(20)])
    run = workplace.job()
    assert workplace.check(run)["plan"]["rows_estimated"] == 20
    assert [each.name for each in run.preview().sources[0].unread] == [column]


def test_rows_that_are_left_out_do_not_count_as_invalid() -> None:
    counts = RowCounts(read=10)
    for number in range(9):
        counts.reject(number, "left out: weight is 0")
    counts.check_invalid(0.0, "rows.jsonl", 10)
    counts.reject(9, "empty input")
    assert (counts.invalid, counts.left_out) == (1, 9)
    with pytest.raises(BadData, match=r"1 of 10 rows .* Commonest: empty input: 1 \(line 9\)$"):
        counts.check_invalid(0.0, "rows.jsonl", 10)


def test_a_job_that_resumes_reads_its_rows_as_the_one_before_whatever_their_columns_mean_now(
    workplace: Workplace,
) -> None:
    workplace.rows("rows.jsonl", [TEXT | {"weight": 0}, TEXT | {"weight": 1}])
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    head = find_head("rows.jsonl", "data.train", "auto", workplace.settings)
    columns, task = {"text", "label", "weight"}, task_of(spec, "causal")
    now, _ = read_by(head, columns, columns, spec, task, None)
    as_before, unread = read_by(head, columns, columns, spec, task, NO_COMPANIONS)
    assert now[1].companions == CompanionColumns(weight="weight")
    assert as_before[1].companions == NO_COMPANIONS
    assert [each.name for each in unread] == ["weight"]


def test_an_evaluation_takes_the_rows_of_every_split(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [TEXT | {"split": "test"}, TEXT | {"split": "train"}])
    head = find_head("rows.jsonl", "data.train", "auto", workplace.settings)
    for kind, split in (("train", "split"), ("evaluate", None)):
        spec = parse_spec({"kind": kind, "data": {"train": "rows.jsonl"}})
        (_, target), unread = read_by(head, {*TEXT, "split"}, set(), spec, task_of(spec, "causal"), None)
        assert target.companions.split == split
        assert unread == ()


def test_of_parquet_only_narrow_columns_are_looked_at(workplace: Workplace) -> None:
    rows = [{"text": f"It is {place} hot " * 9, "n": place, "answer": "accept", "system": "Be brief, " * 9 + str(place)}
            for place in range(400)]  # fmt: skip
    write_table(workplace.data / "rows.parquet", rows)
    found = survey(find_head("rows.parquet", "data.train", "auto", workplace.settings), None)
    assert found.keys() == {"n", "answer", "system"}
