"""Stage *prepare*: every row kept whole, or rejected and accounted for."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from jobs.attempt import Finished, Heartbeat
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, DiskFull, Rejected, StageError
from tests.training.workplace import EXAMPLES, Workplace, dataset_of, pairs, rejected, texts_of, write_table
from tests.training.workplace import of_rows as of_rows
from worker.training import prepare
from worker.training.dataset import assembly, inspection
from worker.training.dataset.data import EARLIER_FORMAT
from worker.training.dataset.report import Lengths, bins, commonest, draw, figure_of
from worker.training.dataset.split import evaluation_rows
from worker.training.dataset.tokens import WordTokens
from worker.training.rows.row_filter import Seen
from worker.training.rows.sources import DataFile
from worker.training.store import full_disk_named, make_once
from worker.training.tasks.seq2seq import builtin


@pytest.fixture
def folder(workplace: Workplace) -> Path:
    """The model `./my-model`."""
    made = workplace.data / "my-model"
    made.mkdir()
    builtin.build(made, [text for row in pairs(20) for text in row.values()], seed=1)
    return made


def whole_targets(run: RunDir, part: str) -> list[str]:
    rows = getattr(dataset_of(run), part)
    return sorted(rows.whole_targets(range(len(rows))).values())


def all_texts(run: RunDir) -> set[tuple[str, str]]:
    """What is in a prepared dataset, both parts, decoded."""
    return {*texts_of(run), *texts_of(run, "validation")}


def test_recipes_are_prepared_whole(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    shutil.copy(EXAMPLES, workplace.data / "recipes.jsonl")
    run = workplace.job("recipes.jsonl", data={"validation": 0.1}, training={"epochs": 3, "batch_size": 16})
    result = workplace.prepare(run)
    data, plan = result["data"], run.plan()
    recipes = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    assert data["rows_read"] == data["kept"] == len(recipes)
    assert data["rejected"] == {}
    assert (data["duplicates"], data["truncated_inputs"], data["unknown_tokens"]) == (0, 0, 0)
    assert data["normalized"]["½"] == EXAMPLES.read_text().count("½") > 0
    assert data["train_rows"] + data["validation_rows"] == len(recipes)
    assert 0.04 < data["validation_rows"] / len(recipes) < 0.16
    assert result["steps"] == plan.steps == -(-data["train_rows"] * 3 // 16)
    assert plan.data.complete
    assert (plan.data.rows, plan.data.validation_rows) == (data["train_rows"], data["validation_rows"])
    assert plan.model.folder is not None
    assert (Path(plan.model.folder) / "model.safetensors").exists()
    dataset = dataset_of(run)
    lengths = (dataset.train.input_lengths, dataset.validation.input_lengths)
    assert sum(int(part.sum()) for part in lengths) == data["input_tokens"]
    directions = {target for _, target in all_texts(run)}
    assert any(recipes[0]["directions"][0] in target for target in directions)
    assert not any("½" in target for target in directions)
    beats = [line for line in run.attempt_lines("prepare") if isinstance(line, Heartbeat)]
    assert beats[0].phase == "prepare"


def chat_of(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    ("name", "make", "data"),
    [
        ("chat.json", chat_of, {}),
        ("chat.parquet", chat_of, {}),
        ("share.json", lambda q, a: {"id": q, "conversations": [{"from": "human", "value": q},
                                                                {"from": "gpt", "value": a}]}, {}),
        ("alpaca.csv", lambda q, a: {"Instruction": q, "Input": "", "Output": a}, {}),
        ("tickets.csv", lambda q, a: {"Question": q, "Answer": a}, {}),
        ("opus.parquet", lambda q, a: {"translation": {"en": q, "de": a}},
         {"input": "translation.en", "target": "{translation.de}"}),
        ("nested.json", lambda q, a: {"ticket": {"title": q, "tags": []}, "replies": [{"text": a}]},
         {"input": "{ticket.title}{ticket.tags?}", "target": "{replies[0].text}"}),
    ],
)  # fmt: skip
def test_the_usual_files_are_prepared_as_they_come(
    workplace: Workplace, name: str, make: Callable[[str, str], dict[str, Any]], data: dict[str, str]
) -> None:
    both = [(f"question {number}", f"answer {number}") for number in range(40)]
    write_table(workplace.data / name, [make(*texts) for texts in both])
    run = workplace.job(name, data=data)
    workplace.prepare(run)
    assert all_texts(run) == set(both)


def test_the_second_time_it_is_only_looked_up(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(300))
    first = workplace.job()
    report = workplace.prepare(first)
    made = dataset_of(first).folder.stat().st_mtime_ns
    second = workplace.job(training={"epochs": 9})
    assert workplace.prepare(second)["data"] == report["data"]
    assert dataset_of(second).folder.stat().st_mtime_ns == made
    other = workplace.job(data={"max_input_tokens": 8})
    assert workplace.prepare(other)["data"]["prepared"] != report["data"]["prepared"]


def test_a_job_whose_attempts_a_repair_has_cut_off_goes_on_with_its_own_rows_alone(workplace: Workplace) -> None:
    """Its checkpoints are bound to them, whatever the events know of these."""
    file = workplace.rows("rows.jsonl", pairs(200))
    rows, run = file.read_bytes(), workplace.job()
    workplace.prepare(run)
    plan = run.plan_file.read_bytes()
    append_line(run.attempt_file(1), Finished(at=1.0, reason="interrupted"))
    workplace.rows("rows.jsonl", pairs(200, start=500))
    for stage in (workplace.prepare_only, workplace.prepare):  # repaired to before job.prepared, and to job.submitted
        with pytest.raises(Rejected, match="not what this job has trained on so far") as caught:
            stage(run)
        assert caught.value.detail_code == "content_changed" and run.plan_file.read_bytes() == plan
    file.write_bytes(rows)
    workplace.prepare(run)
    assert run.plan_file.read_bytes() == plan


def test_a_damaged_dataset_and_the_remains_of_a_killed_one_are_replaced(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(30))
    run = workplace.job()
    workplace.prepare(run)
    folder = dataset_of(run).folder
    before = (folder / "input.tokens").read_bytes()
    (folder / "input.tokens").unlink()  # it is read-only
    (folder / "input.tokens").write_bytes(before[:-2])
    remains = folder.with_name(f"tmp-{folder.name}-0123abcd")
    remains.mkdir()
    (remains / "input.tokens").write_bytes(b"half")
    workplace.prepare(workplace.job())
    assert (folder / "input.tokens").read_bytes() == before
    assert not remains.exists()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_unusable_rows_are_rejected_with_line_and_reason(workplace: Workplace, name: str) -> None:
    rows = pairs(50)
    bad = ["{", b'{"input": "' + b"x" * (5 << 20) + b'", "target": "b"}', {"input": "a"}]
    workplace.rows(name, [*rows[:20], "", *bad, *rows[20:], rows[3], rows[4]])
    run = workplace.job(name, data={"max_invalid_fraction": 0.06, "validation": 0.2})
    data = workplace.prepare(run)["data"]
    assert (data["rows_read"], data["kept"], data["duplicates"]) == (55, 50, 2)
    assert data["rejected"] == {"bad JSON": 1, "over-long line": 1, "missing target": 1}
    assert [(entry["file"], entry["line"], entry["reason"]) for entry in rejected(run)] == [
        (name, 22, "bad JSON"), (name, 23, "over-long line"), (name, 24, "missing target"),
        (name, 55, "duplicate"), (name, 56, "duplicate"),
    ]  # fmt: skip
    assert all_texts(run) == {(row["input"], row["target"]) for row in rows}


def test_above_the_limit_the_job_fails_and_leaves_no_dataset(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "ROWS", 100)  # the bad rows lie behind those that check looks at
    workplace.rows("rows.jsonl", pairs(1_100) + ["{"] * 15 + ['{"input": "x"}'])
    run = workplace.job()
    with pytest.raises(BadData) as caught:
        workplace.prepare(run)
    assert caught.value.detail_code == "too_many_invalid_rows"
    assert "16 of 1,116 rows" in str(caught.value)
    assert "bad JSON: 15 (lines 1101, 1102, 1103, …); missing target: 1 (line 1116)" in str(caught.value)
    assert [path.name for path in workplace.settings.prepared.iterdir()] == [".locks"]
    entries = [json.loads(line) for line in (run.path / "rejected.jsonl").read_text().splitlines()]
    assert (len(entries), entries[-1]["line"], entries[-1]["reason"]) == (16, 1116, "missing target")
    assert not run.plan().data.complete


def test_a_file_without_a_usable_row_is_refused(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", ['{"input": "a", "target": ""}'] * 3)
    with pytest.raises(BadData) as caught:
        workplace.prepare(workplace.job(data={"max_invalid_fraction": 1.0}))
    assert caught.value.detail_code == "no_rows"


def test_long_texts_are_cut_and_counted(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [*pairs(20), {"input": "long " * 300, "target": "longer " * 300}])
    run = workplace.job(data={"max_input_tokens": 64, "max_target_tokens": 32, "validation": 0.0})
    data = workplace.prepare(run)["data"]
    assert (data["truncated_inputs"], data["truncated_targets"]) == (1, 1)
    rows = dataset_of(run).train
    assert (rows.input_lengths.max(), rows.target_lengths.max()) == (64, 32)
    assert rows.input(20)[-1] == rows.target(20)[-1] == 1


def test_targets_whose_tokens_lose_something_are_kept_where_they_are_held_out(workplace: Workplace) -> None:
    cut, unknown = {"input": "a", "target": "longer " * 300}, {"input": "b", "target": "<unk>"}
    workplace.rows("rows.jsonl", [*pairs(20), {"input": "c", "target": "learned " * 300}])
    workplace.rows("held_out.jsonl", [*pairs(20, 20), cut, cut, unknown, *pairs(3, 60)])
    limits = {"max_input_tokens": 64, "max_target_tokens": 32}
    run = workplace.job(data=limits | {"validation": "held_out.jsonl"})
    workplace.prepare(run)
    assert whole_targets(run, "validation") == ["<unk>", cut["target"].strip()]
    rows = dataset_of(run).validation
    assert rows.whole_targets([21]) == {21: "<unk>"} and rows.whole_targets([20, 22]) == {20: cut["target"].strip()}
    alone = workplace.job("held_out.jsonl", data=limits | {"validation": 0.0})
    workplace.prepare(alone)
    assert whole_targets(alone, "train") == whole_targets(run, "validation")


def test_of_the_targets_that_lose_something_those_of_evaluated_rows_are_kept(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_MOST_ROWS", 9)
    rows = [{"input": f"dish {number}", "target": f"{number} " + "longer " * 300} for number in range(200)]
    workplace.rows("rows.jsonl", rows)
    run = workplace.job(data={"max_target_tokens": 32, "validation": 0.1})
    workplace.prepare(run)
    held_out = dataset_of(run).validation
    evaluated = evaluation_rows(len(held_out), 9, "random").tolist()
    assert len(held_out) > 9 and held_out.whole_targets(range(len(held_out))).keys() == set(evaluated)
    texts = whole_targets(run, "validation")
    monkeypatch.setattr(assembly, "_MOST_BYTES", 0)
    workplace.rows("other.jsonl", rows[:150])
    other = workplace.job("other.jsonl", data={"max_target_tokens": 32, "validation": 0.1})
    workplace.prepare(other)
    assert len(texts) == 9 and whole_targets(other, "validation") == []


def test_special_tokens_in_a_text_are_text(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [*pairs(20), {"input": "the end </s> <pad> is near", "target": "<unk>"}])
    run = workplace.job(data={"validation": 0.0})
    workplace.prepare(run)
    row = dataset_of(run).train.input(20)
    assert row.tolist().index(1) == len(row) - 1
    assert 0 not in row
    assert dataset_of(run).train.target(20)[-1] == 1


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("model", ["builtin:t5-tiny", "./model"])
@pytest.mark.parametrize("stamped", [True, False], ids=["with new times", "with the same times"])
def test_rows_are_never_stored_under_the_name_of_others(
    workplace: Workplace, model_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: str, stamped: bool
) -> None:
    shutil.copytree(model_folder, workplace.data / "model")

    def write(start: int) -> None:
        if name.endswith("parquet"):
            write_table(workplace.data / name, pairs(60, start))
        else:
            workplace.rows(name, pairs(60, start))

    write(100)
    run = workplace.job(name, model=model)
    workplace.check(run)
    if not stamped:  # a file system that is slow to tell
        monkeypatch.setattr(DataFile, "state", lambda file: 1)
    ready_model = prepare.ready_model

    def slow(*given: Any, **named: Any) -> Path:
        if model != "builtin:t5-tiny":
            made = ready_model(*given, **named)
            write(500)
            return made
        write(500)
        return ready_model(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "ready_model", slow)
        with pytest.raises(BadData) as caught:
            workplace.prepare_only(run)
    assert (caught.value.detail_code, caught.value.param) == ("file_changed", "data.train")
    assert [folder.name for folder in workplace.settings.prepared.glob("*") if folder.name != ".locks"] == []
    write(100)
    again = workplace.job(name, model=model)
    workplace.prepare(again)
    if model == "builtin:t5-tiny" and stamped:
        assert ("question 100 about bread", "answer 100: knead and bake it") in all_texts(again)


def test_a_file_that_was_replaced_since_it_was_checked_is_refused(workplace: Workplace) -> None:
    files = {"rows.jsonl": pairs(9), "more.jsonl": pairs(9, 20), "other.jsonl": pairs(3, 40)}
    for name, rows in files.items():
        workplace.rows(name, rows)
    run = workplace.job(["rows.jsonl", "more.jsonl"], data={"validation": "other.jsonl"})
    workplace.check(run)
    for param, (name, rows) in zip(run.spec().data.names, files.items(), strict=True):
        for others in ([*rows, *pairs(1, 60)], rows[::-1]):
            workplace.rows(name, others)
            with pytest.raises(BadData, match=f"{name} has changed since it was checked") as caught:
                workplace.prepare_only(run)
            assert (caught.value.detail_code, caught.value.param) == ("file_changed", param)
        workplace.rows(name, rows)  # the same again, with other times
    assert workplace.prepare_only(run)["data"]["kept"] == 21


@pytest.mark.parametrize(
    ("added", "before", "behind"),
    [
        ("$A </s>", [], [1]),
        ("w0 $A </s>", [3], [1]),  # as CodeT5 and NLLB do
        ("w0 w1 $A </s> w2", [3, 4], [1, 5]),
        ("w0 $A", [3], [1]),  # end-of-sequence is there in any case
    ],
)
def test_texts_get_what_their_tokenizer_adds(
    workplace: Workplace, model_folder: Path, added: str, before: list[int], behind: list[int]
) -> None:
    model = workplace.data / "model"
    shutil.copytree(model_folder, model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    special = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "w0", "w1", "w2")]
    tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=special)
    tokenizer.save(str(model / "tokenizer.json"))
    rows = [{"input": "w10 " * n, "target": f"w{n % 50 + 5} w3 w0"} for n in range(1, 40)]
    workplace.rows("rows.jsonl", rows)
    run = workplace.job(model="./model", data={"validation": 0.0, "max_input_tokens": 16})
    workplace.prepare(run)
    train = dataset_of(run).train
    assert [train.input(n).tolist() for n in range(39)] == [
        [*before, *[13] * min(n, 16 - len(before) - len(behind)), *behind] for n in range(1, 40)
    ]
    assert [train.target(n).tolist() for n in range(39)] == [
        [*before, n % 50 + 8, 6, 3, *behind] for n in range(1, 40)
    ]  # fmt: skip
    report = json.loads((run.path / "dataset.json").read_text())
    assert report["truncated_inputs"] == 39 - (16 - len(before) - len(behind))
    assert report["lengths"]["input"]["before"]["max"] == 39 + len(before) + len(behind)


def test_the_shortcut_is_taken_only_where_it_gives_the_same(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.rows("rows.jsonl", pairs(60))
    run = workplace.job()
    workplace.prepare(run)
    expected = (dataset_of(run).folder / "input.tokens").read_bytes()
    monkeypatch.setattr(WordTokens, "tokens", lambda self, text: b"")
    other = workplace.job(data={"max_target_tokens": 64})
    workplace.prepare(other)
    assert dataset_of(other).folder != dataset_of(run).folder
    assert (dataset_of(other).folder / "input.tokens").read_bytes() == expected


# -- validation ------------------------------------------------------------------------------------------------------


def test_the_split_does_not_depend_on_order_or_later_rows(workplace: Workplace) -> None:
    def validation_texts(rows: list[Any]) -> set[str]:
        workplace.rows("rows.jsonl", rows)
        run = workplace.job(data={"validation": 0.3})
        workplace.prepare(run)
        return {text for text, _ in texts_of(run, "validation")}

    rows = pairs(60)
    held_out = validation_texts(rows)
    assert 8 <= len(held_out) <= 28
    assert validation_texts(rows[::-1]) == held_out
    assert validation_texts(rows + pairs(30, start=60)) >= held_out


def test_auto_is_decided_by_check_and_shares_the_dataset_of_the_same_fraction(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(700))
    auto = workplace.job(data={"validation": "auto"})
    workplace.check(auto)
    predicted = auto.plan().data
    assert predicted.validation_rows == 100
    data = workplace.prepare_only(auto)["data"]
    assert (data["train_rows"], data["validation_rows"]) == (600, 100)
    assert data["validation_asked"] == predicted.validation_fraction == auto.plan().data.validation_fraction
    said = workplace.job(data={"validation": predicted.validation_fraction})
    workplace.prepare(said)
    assert said.plan().data.prepared == auto.plan().data.prepared and said.plan().data.validation_fraction is None


def test_a_split_of_few_inputs_is_refused_before_anything_is_prepared(workplace: Workplace) -> None:
    rows = [{"input": f"question {n % 3}", "target": f"answer {n}"} for n in range(600)]
    workplace.rows("rows.jsonl", rows)
    with pytest.raises(BadData) as caught:
        workplace.check(workplace.job())
    assert caught.value.detail_code == "validation_split"
    run = workplace.job(data={"validation": 0.34})
    data = workplace.prepare(run)["data"]
    assert data["validation_rows"] in (200, 400)
    assert (data["validation_asked"], data["validation_share"]) == (0.34, round(data["validation_rows"] / 600, 6))


def test_a_split_of_few_inputs_in_many_rows_is_refused(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "ROWS", 100)  # check looks at the first rows only
    workplace.rows("rows.jsonl", [{"input": f"question {n % 3}", "target": f"answer {n}"} for n in range(600)])
    run = workplace.job()
    workplace.check(run)
    with pytest.raises(BadData) as caught:
        workplace.prepare_only(run)
    assert caught.value.detail_code == "validation_split"
    assert (run.path / "rejected.jsonl").read_bytes() == b""


def test_a_validation_file_shares_no_row_with_training(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(30))
    workplace.rows("other.jsonl", [*pairs(8, start=25), {"input": "", "target": "x"}])
    run = workplace.job(data={"validation": "other.jsonl", "max_invalid_fraction": 0.2})
    checked = workplace.check(run)["plan"]
    assert (checked["duplicates"], checked["all_rows"], run.plan().data.validation_rows) == (5, True, 3)
    assert run.preview().validation_noticed == (
        "other.jsonl: left out: equal to a training row, or to an earlier one: 5 of all rows",
    )
    data = workplace.prepare_only(run)["data"]
    assert (
        (data["rows_read"], data["rejected"])
        == (checked["rows_looked_at"], checked["invalid_rows"])
        == (39, {"empty input": 1})
    )
    assert (data["train_rows"], data["validation_rows"], data["duplicates"]) == (30, 3, 5)
    assert {entry["file"] for entry in rejected(run)} == {"other.jsonl"}
    workplace.rows("other.jsonl", pairs(8))
    with pytest.raises(BadData, match="all 8 are training rows") as caught:
        workplace.check(workplace.job(data={"validation": "other.jsonl"}))
    assert (caught.value.detail_code, caught.value.param) == ("no_rows", "data.validation")


def test_rows_that_differ_in_spelling_alone_are_on_one_side(workplace: Workplace) -> None:
    """No exact duplicates, so all are kept; but none is a way to look up in training what validation asks."""
    spellings = (
        "Bread number {}: knead, and bake!",
        "bread  NUMBER {} knead and bake",
        "Bréad “number” {}; knead and bake.",
    )
    rows = [
        {"input": spelling.format(n), "target": f"answer {k} to {n}"}
        for n in range(40)
        for k, spelling in enumerate(spellings)
    ]
    workplace.rows("rows.jsonl", rows)
    run = workplace.job(data={"validation": 0.3})
    data = workplace.prepare(run)["data"]
    assert (data["kept"], data["duplicates"], data["validation_inputs_in_training"]) == (120, 0, 0)
    held_out, learned = (
        {int(target.split()[-1]) for _, target in texts_of(run, part)} for part in ("validation", "train")
    )
    assert held_out and learned
    assert not held_out & learned
    assert data["validation_rows"] == 3 * len(held_out)


def test_inputs_of_a_validation_file_that_training_has_too_are_counted(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(30))
    workplace.rows(
        "other.jsonl", [{"input": pairs(1)[0]["input"].upper(), "target": "another answer"}, *pairs(2, start=30)]
    )
    data = workplace.prepare(workplace.job(data={"validation": "other.jsonl"}))["data"]
    assert (data["validation_rows"], data["duplicates"], data["validation_inputs_in_training"]) == (3, 0, 1)


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_there_is(workplace: Workplace) -> None:
    words = [{"input": " ".join(["bread"] * n), "target": f"bake {n}"} for n in range(1, 101)]
    workplace.rows("rows.jsonl", [*words, words[0], "{", "{", {"input": "x\ny", "target": "½"}])
    run = workplace.job(data={"max_input_tokens": 64, "max_invalid_fraction": 0.5})
    data = workplace.prepare(run)["data"]
    lengths = data["lengths"]["input"]
    assert lengths["limit"] == 64
    pieces = (lengths["before"]["max"] - 1) // 100  # of a word, in the tokenizer learned from these
    expected = {name: pieces * words + 1 for name, words in
                (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100))}  # fmt: skip
    assert lengths["before"] == expected
    assert lengths["after"] == {name: min(length, 64) for name, length in expected.items()}
    assert data["truncated_inputs"] == sum(pieces * words + 1 > 64 for words in range(1, 101)) > 0
    dataset = dataset_of(run)
    assert data["input_tokens"] == sum(int(part.input_lengths.sum()) for part in (dataset.train, dataset.validation))
    report = json.loads((run.path / "dataset.json").read_text())
    assert {key: report[key] for key in data if key != "prepared"} == {
        key: data[key] for key in data if key != "prepared"
    }
    (source,) = report["sources"]
    assert (source["name"], source["rows_read"], source["kept"], source["duplicates"]) == ("rows.jsonl", 104, 101, 1)
    assert source["rejected"] == {"bad JSON": {"rows": 2, "first": [102, 103]}}
    assert (source["normalized"], source["noticed"]) == ({"½": 1}, {"newlines": 1})
    for name in ("dataset.json", "dataset.png", "rejected.jsonl"):
        assert (run.path / name).read_bytes() == (dataset.folder / name).read_bytes()
    assert len(json.dumps(data)) < 4096


def test_the_histogram_shows_both_sides_and_where_they_are_cut() -> None:
    lengths = Lengths.of(np.array([3] * 200 + [90, 1000], np.int32), limit=64)
    edges, counts = bins(lengths)
    assert counts.sum() == 202
    assert (counts[np.searchsorted(edges, 3, side="right") - 1], counts[-1]) == (200, 2)
    assert 64 < edges[-1] < 90
    # Where most texts are longer than the limit, how much longer they are is to be seen.
    edges, counts = bins(Lengths.of(np.arange(36, 61, dtype=np.int32), limit=16))
    assert edges[-1] > 59 and counts.max() < 3
    picture = draw({"input": lengths, "target": Lengths.of(np.array([1], np.int32), limit=8)})
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (1000, 420)
    assert picture == draw({"input": lengths, "target": Lengths.of(np.array([1], np.int32), limit=8)})


def test_the_axes_of_the_histogram_are_marked_with_whole_tokens_and_rows() -> None:
    few = Lengths.of(np.array([1, 2], np.int32), limit=64)
    [axes] = figure_of({"input": few, "target": Lengths.of(np.array([1], np.int32), limit=8)}).axes
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert len(ticks) > 1 and all(float(tick).is_integer() for tick in ticks)


def test_a_list_too_long_for_a_record_says_how_much_is_left_out() -> None:
    counts = Counter({chr(number): number for number in range(100, 150)})
    short = commonest(counts, 20)
    assert len(short) == 21
    assert sum(short.values()) == counts.total()
    assert next(iter(short)) == chr(149)


def test_a_run_gets_the_beginning_of_a_very_long_list_of_rejections(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.training.prepare._MOST_COPIED", 1000)
    workplace.rows("rows.jsonl", [*pairs(30), *pairs(30)])
    run = workplace.job()
    workplace.prepare(run)
    whole = (dataset_of(run).folder / "rejected.jsonl").read_bytes()
    copy = (run.path / "rejected.jsonl").read_bytes()
    assert whole.startswith(copy) and copy.endswith(b"\n")
    assert 800 < len(copy) <= 1000 < len(whole)


def test_others_may_read_a_prepared_dataset_and_nobody_writes(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(10))
    run = workplace.job()
    before = os.umask(0o077)
    try:
        workplace.prepare(run)
    finally:
        os.umask(before)
    folder = dataset_of(run).folder
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o444}


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_model_folder_is_copied_into_the_store(workplace: Workplace, folder: Path) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    run = workplace.job(model="./my-model")
    workplace.prepare(run)
    assert Path(run.plan().model.folder or "").parent == workplace.settings.models
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(StageError) as caught:
        workplace.prepare(workplace.job(model="./my-model"))
    assert caught.value.detail_code == "tokenizer_unusable"


@pytest.mark.parametrize(
    ("limits", "small", "before"),
    [
        ({"max_input_tokens": 8}, "data.max_input_tokens", 20),
        ({"max_target_tokens": 8}, "data.max_target_tokens", 7),
        ({"max_input_tokens": 8, "max_target_tokens": 8}, "data.max_input_tokens and data.max_target_tokens", 20),
    ],
)
def test_limits_that_leave_no_token_for_the_text_are_refused(
    workplace: Workplace, folder: Path, limits: dict[str, int], small: str, before: int
) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = ("</s>", tokenizer.token_to_id("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> " * before + "$A </s>", special_tokens=[end])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(Rejected) as caught:
        workplace.prepare(workplace.job(model="./my-model", data=limits))
    assert (caught.value.detail_code, caught.value.param) == ("limit_too_small", small.split()[0])
    assert f"puts {before + 1} tokens around every text" in str(caught.value)
    assert f"set {small} to more than {before + 1};" in str(caught.value.hint)
    enough = dict.fromkeys(limits, before + 2)
    data = workplace.prepare(workplace.job(model="./my-model", data=enough))["data"]
    assert data["kept"] == 20


def test_a_tokenizer_with_more_tokens_than_the_model_has_embeddings_for_is_refused(
    workplace: Workplace, folder: Path
) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<{number}>" for number in range(3000 - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(Rejected, match="3,000 tokens, and the model has embeddings for 2,048") as caught:
        workplace.prepare(workplace.job(model="./my-model"))
    assert caught.value.detail_code == "tokenizer_unusable"


def test_without_normalizing_fractions_are_unknown_and_counted(workplace: Workplace, t5_tokenizer: Path) -> None:
    model = workplace.t5_model(t5_tokenizer)
    workplace.rows("rows.jsonl", [{"input": "1½ cups", "target": "½ <b>"}, *pairs(3)])
    off = workplace.prepare(workplace.job(model=model, data={"normalize": False}))["data"]
    on = workplace.prepare(workplace.job(model=model))["data"]
    assert (off["unknown_tokens"], on["unknown_tokens"]) == (3, 1)
    assert off["unknown_characters"] == {"½": 2, "<": 1}
    assert [(data["unknown_inputs"], data["unknown_targets"]) for data in (off, on)] == [(1, 1), (0, 1)]
    assert on["unknown_characters"] == {"<": 1}
    assert on["unknown_token_rate"] == pytest.approx(1 / (on["input_tokens"] + on["target_tokens"]), abs=1e-8)


# -- stores ----------------------------------------------------------------------------------------------------------


def test_two_that_make_the_same_folder_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []
    waiting = threading.Event()

    def make(folder: Path) -> None:
        made.append(folder)
        assert waiting.wait(60)
        (folder / "file").write_text("content")

    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(make_once(tmp_path / "it", make, Path.is_dir, waiting.set)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, True]
    assert len(made) == 1
    assert (tmp_path / "it" / "file").read_text() == "content"


def test_who_waits_for_another_says_so(tmp_path: Path) -> None:
    (tmp_path / ".locks").mkdir()
    waited: list[None] = []
    with open(tmp_path / ".locks" / "it.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def waiting() -> None:
            waited.append(None)
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert make_once(tmp_path / "it", lambda folder: None, Path.is_dir, waiting)
    assert len(waited) == 1


def test_what_was_begun_is_gone_on_with_unless_there_is_nothing_to_make(tmp_path: Path) -> None:
    errors: list[Exception] = [OSError("no more"), BadData("no rows")]
    found: list[set[str]] = []

    def make(folder: Path) -> None:
        found.append({file.name for file in folder.iterdir()})
        (folder / f"part-{len(found)}").touch()
        if errors:
            raise errors.pop(0)

    for expected in (OSError, BadData):
        with pytest.raises(expected):
            make_once(tmp_path / "it", make, Path.is_dir, lambda: None, resumable=True)
    assert make_once(tmp_path / "it", make, Path.is_dir, lambda: None, resumable=True)
    assert found == [set(), {"part-1"}, set()]
    assert {path.name for path in tmp_path.iterdir()} == {".locks", "it"}


def test_what_nobody_goes_on_with_is_swept_after_a_week(tmp_path: Path) -> None:
    (tmp_path / ".locks").mkdir()
    for name, days in (("old", 8), ("new", 6), ("held", 8)):
        (tmp_path / ".locks" / f"{name}.lock").touch()
        folder = tmp_path / f"partial-{name}"
        folder.mkdir()
        (folder / "file").touch()
        for path in (folder / "file", folder):
            os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    with open(tmp_path / ".locks" / "held.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_once(tmp_path / "it", lambda folder: None, Path.is_dir, lambda: None)
    assert {path.name for path in tmp_path.iterdir()} == {".locks", "it", "partial-new", "partial-held"}


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFull, match="no room is left"), full_disk_named(tmp_path):
        make_once(tmp_path / "it", make, Path.is_dir, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == [".locks"]


def test_keys_are_remembered_across_merges() -> None:
    seen = Seen()
    keys = np.arange(150_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for piece in np.split(keys, 300):
        assert seen.first_times(piece).all()
    assert not seen.first_times(keys[::1000]).any()
    last = np.uint64((1 << 64) - 1)
    assert seen.first_times(np.array([keys[5], last, last], np.uint64)).tolist() == [False, True, False]
    assert not seen.first_times(np.array([last])).any()
    assert seen.first_times(np.array([], np.uint64)).tolist() == []


def test_a_job_goes_on_with_the_rows_it_has_trained_on_whichever_version_prepared_them(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.rows("rows.jsonl", pairs(40))
    before, now = workplace.job(), workplace.job()
    with monkeypatch.context() as earlier:
        earlier.setattr("worker.training.dataset.writing.FORMAT", EARLIER_FORMAT)
        earlier.setattr(prepare, "check_preparable", lambda *_, **__: None)
        workplace.prepare(before)
    workplace.prepare(now)
    plans = [run.plan() for run in (before, now)]
    assert plans[0].data.prepared != plans[1].data.prepared
    monkeypatch.setattr(RunDir, "plan_is_final", lambda _: True)
    for run, plan in zip((before, now), plans, strict=True):
        assert workplace.prepare_only(run) and run.plan() == plan
    for plan in plans:  # damaged
        next(Path(str(plan.data.prepared)).glob("input.tokens")).write_bytes(b"")
    with pytest.raises(Rejected, match="an earlier version of Longhaul prepared them"):
        workplace.prepare_only(before)
    assert workplace.prepare_only(now) and now.plan() == plans[1], "these are made anew"
