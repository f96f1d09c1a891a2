"""Which labels a classifier has: what in the rows stands for one of them, for several, or for none."""

from __future__ import annotations

import shlex
import shutil
from functools import partialmethod
from itertools import pairwise
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.errors import BadData
from longhaul.jobfile import apply_changes
from tests.training.tasks.classification.families import write_pretrained
from tests.training.workplace import Workplace, write_table
from tests.training.workplace import of_rows as of_rows
from worker.training.rows.row import LABEL_TWICE, NO_LABEL
from worker.training.tasks.classification import labels as labels_module
from worker.training.tasks.classification.task import Classification

LIMITS = {"validation": 0.25, "max_input_tokens": 16}


def write(place: Workplace, labels: list[Any], *, name: str = "rows.jsonl", each: int = 6) -> None:
    """Rows that have these labels in turn, each as often."""
    count = len(labels) * each
    place.rows(name, [{"text": f"number {n} in {name}", "label": labels[n % len(labels)]} for n in range(count)])


def job(
    place: Workplace, *, model: str = "builtin:roberta-tiny", train: Any = "rows.jsonl", data: Any = None, **task: Any
) -> RunDir:
    options = {"type": "classification", **task}
    return place.job(train, model=model, task=options, data=LIMITS | (data or {}))


def checked(run: RunDir) -> dict[str, int]:
    """The labels that *check* found, and how many rows have each."""
    return {label.name: label.rows for label in run.plan().data.labels}


def pasted(hint: str) -> list[str]:
    """What the line to paste in a hint sets."""
    words = shlex.split(hint)
    return [change for word, change in pairwise(words) if word == "--set"]


def with_changes(place: Workplace, changes: list[str], **parts: Any) -> RunDir:
    """The job with what was pasted behind the command that submits it."""
    given = apply_changes({"model": "builtin:roberta-tiny", **parts}, changes)
    data: Any = given.pop("data")
    return place.job(data.pop("train"), data=LIMITS | data, **given)


@pytest.mark.parametrize(
    ("labels", "classes", "left_out"),
    [
        ([-1, 0, 1, 2], ["0", "1", "2"], 6),
        ([-1, 0, 3, 7], ["0", "3", "7"], 6),
        (["-1", "0", "1", "good"], ["-1", "0", "1", "good"], 0),
        ([-1, 1], ["-1", "1"], 0),
        ([-1, 0], ["-1", "0"], 0),
        ([-2, -1, 0, 1], ["-2", "-1", "0", "1"], 0),
    ],
)
def test_minus_1_beside_numbered_labels_stands_for_none(
    labels: list[Any], classes: list[str], left_out: int, workplace: Workplace
) -> None:
    write(workplace, labels)
    run = job(workplace)
    result = workplace.check(run)["plan"]
    assert list(checked(run)) == classes and set(checked(run).values()) == {6}
    assert result["invalid_rows"] == ({NO_LABEL: left_out} if left_out else {})
    assert result["rows_estimated"] == 6 * len(classes)
    said = f"-1 is taken for no label, and {left_out} rows that have it are left out; to learn it, name all labels"
    assert [said in each for each in run.preview().labels_noticed] == [True] * bool(left_out)


def test_rows_without_a_label_are_left_out_and_counted_whatever_the_limit_of_unusable_ones(
    workplace: Workplace,
) -> None:
    write(workplace, [-1, -1, 0, -1, 1, 2])
    run = job(workplace, data={"max_invalid_fraction": 0.0})
    found = workplace.prepare(run)["data"]
    assert (found["kept"], found["rejected"]) == (18, {NO_LABEL: 18})
    assert found["labels"]["classes"] == {"0": 6, "1": 6, "2": 6}


def test_minus_1_that_may_be_a_class_is_asked_about_and_both_answers_work(workplace: Workplace) -> None:
    write(workplace, [-1, 0, 1])
    with pytest.raises(BadData) as caught:
        workplace.check(job(workplace))
    assert caught.value.detail_code == "doubtful_label"
    three, two = pasted(str(caught.value.hint))
    for change, left_out, names in ((three, {}, ["-1", "0", "1"]), (two, {NO_LABEL: 6}, ["0", "1"])):
        run = with_changes(workplace, [change], task="classification", data={"train": "rows.jsonl"})
        assert workplace.check(run)["plan"]["invalid_rows"] == left_out
        assert list(checked(run)) == names


def test_a_classifier_that_numbers_its_labels_takes_minus_1_for_none(workplace: Workplace) -> None:
    for labels in ([0, 1, 2], [0, 1]):
        write_pretrained(
            workplace.data / f"model-{len(labels)}", "roberta", tuple(f"LABEL_{label}" for label in labels)
        )
    write(workplace, [-1, 0, 1, 2])
    run = job(workplace, model="./model-3")
    assert workplace.check(run)["plan"]["invalid_rows"] == {NO_LABEL: 6} and list(checked(run)) == ["0", "1", "2"]
    write(workplace, [-1, 0, 1])
    with pytest.raises(BadData, match="may be a class of its own") as doubtful:
        workplace.check(job(workplace, model="./model-2"))
    assert "take the model that it was made from; --set 'task.labels=[0,1]' leaves out" in str(doubtful.value.hint)
    run = job(workplace, model="./model-2", labels=["0", "1"])
    assert workplace.check(run)["plan"]["invalid_rows"] == {NO_LABEL: 6} and checked(run) == {"0": 6, "1": 6}


def test_a_job_that_an_earlier_version_prepared_keeps_its_labels(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(workplace, [-1, 0, 1, 2])
    run = job(workplace)
    with monkeypatch.context() as earlier:
        earlier.setattr(labels_module, "classes_of", lambda found, several: set(found))
        workplace.prepare(run)
    before = run.plan().data
    assert [label.name for label in before.labels] == ["-1", "0", "1", "2"]
    monkeypatch.setattr(RunDir, "plan_is_final", lambda run: True)  # an attempt has trained with it
    workplace.prepare_only(run)
    assert run.plan().data == before


@pytest.mark.parametrize(
    ("written", "task", "classes", "kept"),
    [
        ([-1, 0, 1], {}, {"-1": 6, "0": 6, "1": 6}, 18),
        (["0", "0.0", "1"], {}, {"0": 6, "0.0": 6, "1": 6}, 18),
        (["0", "1", "1.0"], {"labels": ["0", "1"]}, {"0": 6, "1": 6}, 12),
        (["a", "b", "a#b"], {"multi_label": True}, {"a": 6, "a#b": 6, "b": 6}, 18),
        (["['a']", "b"], {}, {"['a']": 6, "b": 6}, 12),
    ],
)
def test_rows_of_an_earlier_version_keep_the_labels_that_are_written_there(
    written: list[Any], task: Any, classes: dict[str, int], kept: int, workplace: Workplace
) -> None:
    write(workplace, written)
    before = job(workplace, data={"max_invalid_fraction": 0.5}, **task)
    with pytest.MonkeyPatch.context() as earlier:  # what it knew of labels, and wrote into its plan
        earlier.setattr(Classification, "as_written", True)
        earlier.setattr(Classification, "__init__", partialmethod(Classification.__init__, as_written=True))
        workplace.check(before)
    assert not before.plan().data.labels_read
    found = workplace.prepare_only(before)["data"]
    assert (found["kept"], found["labels"]["classes"]) == (kept, classes)
    plan = before.plan()
    shutil.rmtree(workplace.settings.prepared)
    workplace.prepare_only(before)
    assert before.plan() == plan, "the same rows by the same name"
    now = job(workplace, data={"max_invalid_fraction": 0.5}, **task)
    if written == [-1, 0, 1]:
        with pytest.raises(BadData, match="may be a class of its own"):
            workplace.check(now)
        return
    workplace.check(now)
    assert now.plan().data.labels_read and workplace.prepare_only(now)
    assert now.plan().data.prepared != plan.data.prepared, "other rows have another name"


def test_labels_that_are_equal_as_numbers_are_one_and_it_is_said(workplace: Workplace) -> None:
    (workplace.data / "whole.csv").write_text("text,label\n" + "".join(f"row {n},{n % 3}\n" for n in range(12)))
    gap = "".join(f"text {n},{['0.0', '', '2.0'][n % 3]}\n" for n in range(12))  # as pandas writes a column with gaps
    (workplace.data / "gap.csv").write_text("text,label\n" + gap)
    run = job(workplace, train=["whole.csv", "gap.csv"], data={"max_invalid_fraction": 0.5})
    workplace.check(run)
    assert checked(run) == {"0": 8, "1": 4, "2": 8} and run.preview().labels_alike == ()
    said = ("0.0 is read as 0: they are the same number", "2.0 is read as 2: they are the same number")
    assert run.preview().labels_noticed == said
    assert workplace.prepare_only(run)["data"]["labels"]["labels_noticed"] == list(said)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([1.0, 2.0], ["1.0", "2.0"]),  # all are written so
        (["01", "1"], ["01", "1"]),  # a code is no number
        (["3.1", "3.10"], ["3.1", "3.10"]),  # nor is a version
        ([1, "1.00", 2], ["1", "2"]),
        ([-1.0, 0.0, 1.0, 2.0], ["0.0", "1.0", "2.0"]),
    ],
)
def test_other_numbers_stay_as_they_are_written(labels: list[Any], classes: list[str], workplace: Workplace) -> None:
    write(workplace, labels)
    run = job(workplace)
    workplace.check(run)
    assert list(checked(run)) == classes


def test_a_named_label_is_meant_by_every_number_that_equals_it(workplace: Workplace) -> None:
    write(workplace, [0.0, 1.0, -1.0])
    run = job(workplace, labels=["0", "1"])
    assert workplace.check(run)["plan"]["invalid_rows"] == {NO_LABEL: 6} and checked(run) == {"0": 6, "1": 6}


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["a", "b", "a#b", "c#a"], "#"),
        (["a; b", "b; c", "a; c", "a;b;c"], ";"),
        (["a", "b", "c", "b|c", ""], "|"),
        (["a;", "b;", "a;b;", "b;c;", "c;a;"], ";"),
        (["1", "2", "1,2,3", "3"], ","),
    ],
)
def test_several_labels_in_a_text_are_noticed_and_with_multi_label_read(
    texts: list[str], separator: str, workplace: Workplace
) -> None:
    write(workplace, [text for text in texts if text])
    one = job(workplace)
    workplace.check(one)
    [noticed] = one.preview().labels_noticed
    assert f"several in one, divided by {separator} (" in noticed
    write(workplace, texts)
    several = with_changes(workplace, pasted(noticed), data={"train": "rows.jsonl"})
    workplace.check(several)
    parts = [part.strip() for text in texts for part in text.split(separator) if part]
    assert checked(several) == {part: 6 * parts.count(part) for part in sorted(set(parts))}
    assert several.preview().labels_noticed[0].startswith(f"texts that {separator} divides are read as several labels:")


@pytest.mark.parametrize(
    "texts",
    [
        ["animal|cat", "animal|dog", "plant|rose"],  # a path
        ["Portland, OR", "Salem, OR", "Portland, ME"],
        ["1", "1,5", "2", "2,5", "5"],  # a decimal comma
        ["C#", "C"],
        ["red,small", "red,large", "blue,small", "blue,large"],  # as many labels as before
    ],
)
def test_what_looks_divided_and_is_one_label_stays_one(texts: list[str], workplace: Workplace) -> None:
    write(workplace, texts)
    run = job(workplace)
    workplace.check(run)
    assert (list(checked(run)), run.preview().labels_noticed) == (sorted(texts), ())


LISTS = ["['red', 'blue']", "[\"red\", 'o\\'hare']", "['red' 'blue']", "[1, 2]", "[]", '["blue"]']


@pytest.mark.parametrize("csv_lists", [False, True])
def test_lists_as_python_or_numpy_writes_them_are_read_with_multi_label(csv_lists: bool, workplace: Workplace) -> None:
    quoted = ['"' + text.replace('"', '""') + '"' for text in LISTS]
    rows = [f"text {n},{quoted[n % len(quoted)]}\n" for n in range(24)]
    (workplace.data / "lists.csv").write_text("text,labels\n" + "".join(rows))
    with pytest.raises(BadData, match="a list that is not one label: 16") as caught:
        workplace.check(job(workplace, train="lists.csv", data={"csv_lists": csv_lists}))
    data = {"train": "lists.csv", "csv_lists": csv_lists}
    run = with_changes(workplace, pasted(str(caught.value.hint)), data=data)
    workplace.check(run)
    assert checked(run) == {"1": 4, "2": 4, "blue": 12, "o'hare": 4, "red": 12}
    assert run.preview().labels_noticed == ()


@pytest.mark.parametrize(("labels", "are_vectors"), [([[0, 1], [1, 0]], True), ([[0, 1], [1], [0]], False)])
def test_lists_of_which_each_has_0_and_1_are_refused_as_vectors(
    labels: list[Any], are_vectors: bool, workplace: Workplace
) -> None:
    write(workplace, labels)
    run = job(workplace, multi_label=True)
    if not are_vectors:
        assert workplace.check(run) and list(checked(run)) == ["0", "1"]
        return
    with pytest.raises(BadData, match="every row has the labels 0 and 1") as caught:
        workplace.check(run)
    assert "a vector of 0 and 1 is no list of labels" in str(caught.value.hint)


def test_a_label_twice_is_called_that_though_no_other_row_has_it(workplace: Workplace) -> None:
    write(workplace, [["a"], ["b"], ["c", "c"]])
    run = job(workplace, data={"max_invalid_fraction": 0.5}, multi_label=True)
    assert workplace.check(run)["plan"]["invalid_rows"] == {LABEL_TWICE: 6}


def test_text_in_brackets_that_is_no_list_is_one_label(workplace: Workplace) -> None:
    write(workplace, ["[other]", "['a' b]", "[" + "[" * 300 + "]", "['a'"])
    run = job(workplace, multi_label=True)
    workplace.check(run)
    assert len(checked(run)) == 4


def annotated(count: int = 60) -> list[dict[str, Any]]:
    """As Label Studio exports them: a text, a label under any name, and columns of its own."""
    return [
        {"annotator": 1, "id": n, "sentiment": ["good", "bad", "mixed"][n % 3], "text": f"a note on kettle {n}",
         "updated": f"2026-05-01T10:{n % 60:02}"}
        for n in range(count)
    ]  # fmt: skip


OFFERED = "--set data.input=text --set data.target=sentiment"


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("builtin:roberta-tiny", OFFERED),
        ("builtin:t5-tiny", f"{OFFERED} --set task.type=classification --set model=builtin:roberta-tiny"),
    ],
)
def test_a_column_that_looks_like_labels_is_offered_and_the_line_works(
    model: str, line: str, workplace: Workplace
) -> None:
    write_table(workplace.data / "rows.csv", annotated())
    with pytest.raises(BadData) as caught:
        workplace.check(workplace.job("rows.csv", model=model))
    assert caught.value.hint == f"looks like 3 labels: classify `text` by `sentiment`? Add {line}"
    run = with_changes(workplace, pasted(caught.value.hint), model=model, data={"train": "rows.csv"})
    assert workplace.check(run)["plan"]["task"] == "classification"
    assert checked(run) == {"bad": 20, "good": 20, "mixed": 20}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (("ticket", "reply", "category"), "ticket"), (("reply", "ticket", "category"), "ticket"),
        (("reply", "notes", "category"), "notes"), (("zeta", "alpha", "category"), "zeta"),
        (("category", "reply"), "reply"),
    ],
)  # fmt: skip
def test_what_is_classified_is_an_input_and_not_the_longest_answer(
    columns: tuple[str, ...], text: str, workplace: Workplace
) -> None:
    long = {"reply": "We are sorry. ", "alpha": "It is long, too. "}
    rows = [
        {name: ("bug", "bill")[n % 2] if name == "category" else f"{long.get(name, '')}it is {n}" for name in columns}
        for n in range(40)
    ]
    workplace.rows("rows.jsonl", rows)
    with pytest.raises(BadData) as caught:
        workplace.check(job(workplace))
    assert f"classify `{text}` by `category`?" in str(caught.value.hint)


def test_lists_of_labels_are_offered_as_several(workplace: Workplace) -> None:
    rows = [{"my text": f"a note on kettle {n}", "tags": [["a"], ["a", "b"], ["c"]][n % 3]} for n in range(60)]
    workplace.rows("rows.jsonl", rows)
    with pytest.raises(BadData) as caught:
        workplace.check(job(workplace))
    run = with_changes(workplace, pasted(str(caught.value.hint)), data={"train": "rows.jsonl"})
    workplace.check(run)
    assert run.spec().task.multi_label and checked(run) == {"a": 40, "b": 20, "c": 20}


@pytest.mark.parametrize("rows", [annotated(6), [{**row, "sentiment": f"{n}"} for n, row in enumerate(annotated())]])
def test_columns_of_which_none_looks_like_labels_are_not_offered(rows: list[Any], workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", rows)
    with pytest.raises(BadData) as caught:
        workplace.check(job(workplace))
    assert "looks like" not in str(caught.value.hint)


def test_targets_that_look_like_labels_are_noticed_and_the_line_makes_a_classifier(workplace: Workplace) -> None:
    rows = [{"instruction": "Sort it.", "input": f"ticket {n}", "output": f"kind {n % 7}"} for n in range(70)]
    workplace.rows("rows.jsonl", rows)
    run = workplace.job(model="builtin:t5-tiny")
    workplace.check(run)
    [noticed] = run.preview().labels_noticed
    assert noticed.startswith("the targets look like 7 labels; a classifier learns them, with --set ")
    run = with_changes(workplace, pasted(noticed), model="builtin:t5-tiny", data={"train": "rows.jsonl"})
    workplace.check(run)
    assert checked(run) == {f"kind {n}": 10 for n in range(7)}
    turns = (("user", "input"), ("assistant", "output"))
    chats = [{"messages": [{"role": role, "content": row[key]} for role, key in turns]} for row in rows]
    workplace.rows("rows.jsonl", chats)
    run = workplace.job(model="builtin:qwen-tiny")
    workplace.check(run)
    run = with_changes(workplace, pasted(run.preview().labels_noticed[0]), data={"train": "rows.jsonl"})
    workplace.check(run)
    assert checked(run) == {f"kind {n}": 10 for n in range(7)}
    workplace.rows("rows.jsonl", rows[:60])
    run = workplace.job(model="builtin:t5-tiny")
    workplace.check(run)
    assert run.preview().labels_noticed == ()
