"""A job with several sources of rows: each read in its own format, mixed by weight, reported by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.disk.rundir import RunDir
from jobs.errors import BadData
from jobs.preview import DataPreview
from tests.training.attempts import attempt, logged, same_tensors
from tests.training.workplace import Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training.dataset.data import PreparedDataset
from worker.training.steps.order import mixture_of

TWO: Any = [{"source": "rows.jsonl", "weight": 2}, {"source": "alpaca.json", "weight": 0.5}]


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    """40 pairs, and 21 rows of Alpaca of which one has no output."""
    workplace.rows("rows.jsonl", pairs(40))
    alpaca = [{"instruction": f"bake {n}", "input": "", "output": f"loaf {n}"} for n in range(20)]
    (workplace.data / "alpaca.json").write_text(json.dumps([*alpaca, {"instruction": "no", "input": "", "output": ""}]))
    return workplace


def job(place: Workplace, train: Any = TWO, **parts: Any) -> RunDir:
    data = {"validation": 0, "max_invalid_fraction": 0.1} | parts.pop("data", {})
    return place.job(train, data=data, **parts)


def test_each_source_is_recognized_mixed_and_reported_by_itself(place: Workplace) -> None:
    run = job(place, training={"epochs": 3, "batch_size": 16})
    checked = place.check(run)["plan"]
    assert checked["train"] == "rows.jsonl (weight 2), alpaca.json (weight 0.5)"
    assert (checked["rows_looked_at"], checked["rows_estimated"], checked["invalid_rows"]) == (
        61,
        60,
        {"empty output": 1},
    )
    shown = DataPreview.model_validate_json((run.path / "preview.json").read_bytes()).sources
    assert [(each.name, each.weight, len(each.rows)) for each in shown] == [
        ("rows.jsonl", 2, 3),
        ("alpaca.json", 0.5, 3),
    ]
    assert shown[0].input == "{input}" and "instruction" in str(shown[1].input)
    assert checked["read_as"] == "input and target, Alpaca"
    assert place.prepare_only(run)["rows_per_epoch"] == 90
    plan = run.plan()
    assert [(each.rows, each.rows_per_epoch) for each in plan.data.sources] == [(40, 80), (20, 10)]
    assert plan.data.rows == 90 and plan.steps == -(-90 * 3 // 16)
    report = json.loads((run.path / "dataset.json").read_text())
    assert [(each["name"], each["kept"]) for each in report["sources"]] == [("rows.jsonl", 40), ("alpaca.json", 20)]
    assert report["sources"][1]["rejected"]["empty output"]["rows"] == 1
    dataset = PreparedDataset.open(Path(str(plan.data.prepared)))
    assert dataset.rows_of_sources(2) == [40, 20]


def test_rows_held_out_come_from_all_sources_and_are_in_no_epoch(place: Workplace) -> None:
    run = job(place, data={"validation": 0.2})
    place.prepare(run)
    plan, dataset = run.plan(), PreparedDataset.open(Path(str(run.plan().data.prepared)))
    left = dataset.rows_of_sources(2)
    assert sum(left) == len(dataset.train) == 60 - len(dataset.validation) and 0 < len(dataset.validation) <= 24
    assert [each.rows for each in plan.data.sources] == left
    mixed = mixture_of(plan.data.sources, left, seed=0).epoch(0)
    assert np.bincount(mixed, minlength=len(dataset.train))[: left[0]].tolist() == [2] * left[0]


def test_validation_rows_of_their_own_follow_all_sources(place: Workplace) -> None:
    place.rows("held_out.jsonl", pairs(5, start=100))
    run = job(place, data={"validation": "held_out.jsonl"})
    place.prepare(run)
    dataset = PreparedDataset.open(Path(str(run.plan().data.prepared)))
    assert (len(dataset.train), len(dataset.validation), dataset.rows_of_sources(2)) == (60, 5, [40, 20])


def test_validation_rows_of_their_own_are_recognized_by_their_own_columns(place: Workplace) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": f"hello {n}"}]}
        for n in range(5)
    ]
    place.rows("held_out.jsonl", chats)
    for train in (TWO, "rows.jsonl"):
        run = job(place, train, data={"validation": "held_out.jsonl"})
        place.prepare(run)
        plan = run.plan().data
        assert (plan.validation_input, plan.validation_target) == ("{messages.prompt}", "{messages.completion}")
        assert len(PreparedDataset.open(Path(str(plan.prepared))).validation) == 5


def test_a_column_that_one_source_lacks_is_named_with_the_source(place: Workplace) -> None:
    named = {"input": "{input}", "target": "{target}"}
    with pytest.raises(BadData, match=r"no row of alpaca\.json has a column"):
        place.check(job(place, data=named))


def test_an_optional_column_need_be_in_one_source_alone(place: Workplace) -> None:
    without = [{"subject": f"s{n}", "reply": f"r{n}"} for n in range(3)]
    place.rows("notes.jsonl", [{"subject": "a", "note": "b", "reply": "c"}])
    place.rows("plain.jsonl", [{"subject": "d", "reply": "e"}])
    (place.data / "plain.csv").write_text("subject,reply\nf,g\n")
    pq.write_table(pa.Table.from_pylist(without), place.data / "plain.parquet")
    sources = ["notes.jsonl", "plain.jsonl", "plain.csv", "plain.parquet"]
    run = job(place, sources, data={"input": "{subject} ({note?})", "target": "reply"})
    assert place.prepare(run)["data"]["kept"] == 6
    shown = DataPreview.model_validate_json((run.path / "preview.json").read_bytes()).sources
    assert [each.rows[0].input.text for each in shown] == ["a (b)", "d)", "f)", "s0)"]
    with pytest.raises(BadData, match="has a column 'nota'"):
        place.check(job(place, sources, data={"input": "{subject} {nota?}", "target": "reply"}))


def test_weights_share_what_was_prepared_and_a_row_of_two_sources_is_kept_once(place: Workplace) -> None:
    first, second = job(place), job(place, ["rows.jsonl", "alpaca.json"])
    for run in (first, second):
        place.prepare(run)
    assert first.plan().data.prepared == second.plan().data.prepared
    assert second.plan().data.rows == 60
    place.rows("again.jsonl", [*pairs(3), *pairs(4, start=200)])
    third = job(place, ["rows.jsonl", "again.jsonl"])
    checked = place.check(third)["plan"]
    assert (checked["duplicates"], checked["rows_estimated"], checked["all_rows"]) == (3, 44, True)
    assert [each.duplicates for each in third.preview().sources] == [0, 3]
    assert place.prepare_only(third)["data"]["duplicates"] == 3
    assert [each.rows for each in third.plan().data.sources] == [40, 4]


def test_a_missing_source_is_named_by_its_place(place: Workplace) -> None:
    with pytest.raises(BadData) as refused:
        place.check(job(place, ["rows.jsonl", "gone.jsonl"]))
    assert refused.value.param == "data.train.1.source" and "gone.jsonl" in str(refused.value)


def test_a_stopped_run_of_several_sources_goes_on_bit_for_bit(place: Workplace) -> None:
    long = {"training": {"epochs": 3, "batch_size": 8}, "log": {"every_steps": 1}}
    whole, broken = job(place, **long), job(place, **long)
    for run in (whole, broken):
        place.prepare(run)
    assert attempt(whole) == 0
    assert attempt(broken, 1, stop_at=9) == 75
    assert attempt(broken, 2) == 0
    assert len(logged(whole)) == whole.plan().steps == -(-90 * 3 // 8)
    assert logged(broken) == logged(whole)
    assert same_tensors(broken.model / "model.safetensors", whole.model / "model.safetensors")
    assert (
        "rows.jsonl (weight 2), alpaca.json (weight 0.5): 60 rows to learn from"
        in (whole.model / "README.md").read_text()
    )
