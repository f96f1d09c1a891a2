"""Which labels a classifier has: what in the rows stands for one of them, for several, or for none."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.errors import BadData
from longhaul.jobfile import value_of
from tests.training.tasks.classification.families import write_pretrained
from tests.training.workplace import Workplace
from tests.training.workplace import of_rows as of_rows
from worker.training.rows.row import NO_LABEL
from worker.training.tasks.classification import labels as labels_module

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


def pasted(hint: str) -> list[dict[str, Any]]:
    """What the lines to paste in a hint set, by key."""
    found = re.findall(r"--set (?:'([^']+)'|(\S+))", hint)
    return [{key: value_of(text)} for key, _, text in (("".join(each)).partition("=") for each in found)]


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
    three, two = (each["task.labels"] for each in pasted(str(caught.value.hint)))
    for named, left_out in ((three, {}), (two, {NO_LABEL: 6})):
        run = job(workplace, labels=named)
        assert workplace.check(run)["plan"]["invalid_rows"] == left_out
        assert list(checked(run)) == list(map(str, named))


def test_a_classifier_that_numbers_its_labels_takes_minus_1_for_none(workplace: Workplace) -> None:
    write_pretrained(workplace.data / "model", "roberta", ("LABEL_0", "LABEL_1"))
    write(workplace, [-1, 0, 1])
    run = job(workplace, model="./model")
    assert workplace.check(run)["plan"]["invalid_rows"] == {NO_LABEL: 6} and checked(run) == {"0": 6, "1": 6}


def test_a_job_that_an_earlier_version_prepared_keeps_its_labels(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(workplace, [-1, 0, 1, 2])
    run = job(workplace)
    with monkeypatch.context() as earlier:
        earlier.setattr(labels_module, "classes_of", set)
        workplace.prepare(run)
    before = run.plan().data
    assert [label.name for label in before.labels] == ["-1", "0", "1", "2"]
    monkeypatch.setattr(RunDir, "plan_is_final", lambda run: True)  # an attempt has trained with it
    workplace.prepare_only(run)
    assert run.plan().data == before
