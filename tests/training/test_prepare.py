"""Stage *prepare*: every row kept whole, or set aside and accounted for."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from jobs.errors import BadData, DiskFull, StageError
from jobs.events import Heartbeat
from jobs.rundir import RunDir
from tests.training.workplace import EXAMPLES, SHARED_DATA, Workplace, pairs
from worker.training import builtin
from worker.training.data import PreparedDataset
from worker.training.prepare import split
from worker.training.sieve import Seen
from worker.training.store import full_disk_named, make_once


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def dataset_of(run: RunDir) -> PreparedDataset:
    folder = run.plan().data.prepared
    assert folder is not None
    return PreparedDataset.open(Path(folder))


def rejected(run: RunDir) -> list[dict[str, Any]]:
    lines = (dataset_of(run).folder / "rejected.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def texts(run: RunDir) -> set[tuple[str, str]]:
    """What is in a prepared dataset, both parts, decoded."""
    tokenizer = AutoTokenizer.from_pretrained(run.plan().model.folder)
    dataset = dataset_of(run)
    return {
        (
            str(tokenizer.decode(part.input(n), skip_special_tokens=True)),
            str(tokenizer.decode(part.target(n), skip_special_tokens=True)),
        )
        for part in (dataset.train, dataset.validation)
        for n in range(len(part))
    }


def test_recipes_are_prepared_whole(workplace: Workplace) -> None:
    shutil.copy(EXAMPLES, workplace.data / "recipes.jsonl")
    run = workplace.job("recipes.jsonl", data={"validation": 0.1}, schedule={"epochs": 3, "batch_size": 16})
    result = workplace.prepare(run)
    data, plan = result["data"], run.plan()
    recipes = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    assert data["rows_read"] == data["kept"] == len(recipes)
    assert data["set_aside"] == {}
    assert (data["duplicates"], data["truncated_inputs"], data["unknown_tokens"]) == (0, 0, 0)
    assert data["normalised"]["½"] == EXAMPLES.read_text().count("½") > 0
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
    directions = {target for _, target in texts(run)}
    assert any(recipes[0]["directions"][0] in target for target in directions)
    assert not any("½" in target for target in directions)
    beats = [line for line in run.attempt_lines("prepare") if isinstance(line, Heartbeat)]
    assert beats[0].phase == "prepare"


def test_the_second_time_it_is_only_looked_up(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(300))
    first = workplace.job()
    report = workplace.prepare(first)
    made = dataset_of(first).folder.stat().st_mtime_ns
    second = workplace.job(schedule={"epochs": 9})
    start = time.perf_counter()
    assert workplace.prepare(second)["data"] == report["data"]
    assert time.perf_counter() - start < 1
    assert dataset_of(second).folder.stat().st_mtime_ns == made
    other = workplace.job(data={"max_input_tokens": 8})
    assert workplace.prepare(other)["data"]["prepared"] != report["data"]["prepared"]


def test_a_damaged_dataset_and_the_remains_of_a_killed_one_are_replaced(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(30))
    run = workplace.job()
    workplace.prepare(run)
    folder = dataset_of(run).folder
    before = (folder / "input.tokens").read_bytes()
    (folder / "input.tokens").write_bytes(before[:-2])
    remains = folder.with_name(f"tmp-{folder.name}-0123abcd")
    remains.mkdir()
    (remains / "input.tokens").write_bytes(b"half")
    workplace.prepare(workplace.job())
    assert (folder / "input.tokens").read_bytes() == before
    assert not remains.exists()


BAD: list[tuple[Any, str]] = [
    ('{"input": "a", "target"', "bad JSON"),
    ('["a", "b"]', "not a JSON object"),
    ({"input": "a"}, "missing target"),
    ({"input": "", "target": "b"}, "empty input"),
    ({"input": "a", "target": {"b": 1}}, "wrong type in target"),
    ({"input": "a\0b", "target": "b"}, "control character U+0000"),
    (b'{"input": "\xff", "target": "b"}', "not UTF-8"),
    (b'{"input": "' + b"x" * (5 << 20) + b'", "target": "b"}', "over-long line"),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_unusable_rows_are_set_aside_with_line_and_reason(workplace: Workplace, name: str) -> None:
    rows = pairs(50)
    workplace.rows(name, rows[:20] + [""] + [row for row, _ in BAD] + rows[20:] + [rows[3], rows[4]])
    run = workplace.job(name, data={"max_invalid_fraction": 0.14, "validation": 0.2})
    data = workplace.prepare(run)["data"]
    assert (data["rows_read"], data["kept"], data["duplicates"]) == (60, 50, 2)
    assert data["set_aside"] == {reason: 1 for _, reason in BAD}
    entries = [(entry["file"], entry["line"], entry["reason"]) for entry in rejected(run)]
    expected = [(name, 22 + n, reason) for n, (_, reason) in enumerate(BAD)]
    assert entries == [*expected, (name, 60, "duplicate"), (name, 61, "duplicate")]
    assert texts(run) == {(row["input"], row["target"]) for row in rows}


def test_above_the_limit_the_job_fails_and_leaves_no_dataset(workplace: Workplace) -> None:
    # The bad rows lie behind those that check looks at.
    workplace.rows("rows.jsonl", pairs(10_100) + ["{"] * 150 + ['{"input": "x"}'])
    run = workplace.job()
    with pytest.raises(BadData) as caught:
        workplace.prepare(run)
    assert caught.value.detail_code == "too_many_invalid_rows"
    assert "151 of 10251 rows" in str(caught.value)
    assert "bad JSON: 150 (lines 10101, 10102, 10103, …); missing target: 1 (line 10251)" in str(caught.value)
    assert [path.name for path in workplace.settings.prepared.iterdir()] == [".locks"]
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


def test_special_tokens_in_a_text_are_text(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [*pairs(20), {"input": "the end </s> <pad> is near", "target": "<unk>"}])
    run = workplace.job(data={"validation": 0.0})
    workplace.prepare(run)
    row = dataset_of(run).train.input(20)
    assert row.tolist().index(1) == len(row) - 1
    assert 0 not in row
    assert dataset_of(run).train.target(20)[-1] == 1


# -- validation ------------------------------------------------------------------------------------------------------


def test_the_split_does_not_depend_on_order_or_later_rows(workplace: Workplace) -> None:
    def validation_texts(rows: list[Any]) -> set[str]:
        workplace.rows("rows.jsonl", rows)
        run = workplace.job(data={"validation": 0.3})
        workplace.prepare(run)
        part, tokenizer = dataset_of(run).validation, AutoTokenizer.from_pretrained(run.plan().model.folder)
        return {str(tokenizer.decode(part.input(n), skip_special_tokens=True)) for n in range(len(part))}

    rows = pairs(60)
    held_out = validation_texts(rows)
    assert 8 <= len(held_out) <= 28
    assert validation_texts(rows[::-1]) == held_out
    assert validation_texts(rows + pairs(30, start=60)) >= held_out


@pytest.mark.parametrize(
    ("rows", "fraction", "least", "most"),
    [(2, 0.001, 1, 1), (2, 0.999, 1, 1), (1, 0.5, 0, 1), (50, 0.0, 0, 0), (50, 0.999999999999999, 49, 49)],
)
def test_a_fraction_is_at_least_one_row_and_never_all(rows: int, fraction: float, least: int, most: int) -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 64, rows, np.uint64, endpoint=False)
    parts = split(keys, [rows], fraction)
    assert least <= len(parts["validation"]) <= most
    assert sorted([*parts["train"], *parts["validation"]]) == list(range(rows))


def test_a_validation_file_shares_no_row_with_training(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(30))
    workplace.rows("other.jsonl", pairs(8, start=25))
    run = workplace.job(data={"validation": "other.jsonl"})
    data = workplace.prepare(run)["data"]
    assert (data["train_rows"], data["validation_rows"], data["duplicates"]) == (30, 3, 5)
    assert {entry["file"] for entry in rejected(run)} == {"other.jsonl"}
    workplace.rows("other.jsonl", pairs(8))
    with pytest.raises(BadData) as caught:
        workplace.prepare(workplace.job(data={"validation": "other.jsonl"}))
    assert (caught.value.detail_code, caught.value.param) == ("no_rows", "data.validation")


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_model_folder_is_copied_into_the_store(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    folder = workplace.data / "my-model"
    folder.mkdir()
    builtin.build(folder, [text for row in pairs(20) for text in row.values()], seed=1)
    run = workplace.job(model="./my-model")
    workplace.prepare(run)
    assert Path(run.plan().model.folder or "").parent == workplace.settings.models
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(StageError) as caught:
        workplace.prepare(workplace.job(model="./my-model"))
    assert caught.value.detail_code == "tokenizer_unusable"


def odd_model(workplace: Workplace) -> str:
    """A model folder with T5's own tokenizer; skips where the shared data is not at hand."""
    tokenizer = SHARED_DATA / "t5_tokenizer_fast"
    if not tokenizer.exists():
        pytest.skip(f"no {tokenizer}: shared data is not part of the repository")
    folder = workplace.data / "t5"
    folder.mkdir()
    builtin.build(folder, ["some text"], seed=0)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    return "./t5"


def test_odd_recipes_are_kept_whole_repaired_or_set_aside(workplace: Workplace) -> None:
    model = odd_model(workplace)
    shutil.copy(SHARED_DATA / "recipes_odd.jsonl.gz", workplace.data)
    content = gzip.decompress((workplace.data / "recipes_odd.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in content.split("\n")[:-1]]
    run = workplace.job("recipes_odd.jsonl.gz", model=model, data={"max_invalid_fraction": 0.5})
    data = workplace.prepare(run)["data"]
    assert data["rows_read"] == len(rows) == 517
    assert data["kept"] + sum(data["set_aside"].values()) + data["duplicates"] == 517
    reasons: Counter[str] = Counter()
    for entry in rejected(run):
        defects = rows[entry["line"] - 1]["odd"]
        reasons[entry["reason"]] += 1
        if entry["reason"] == "empty ingredients":
            assert "no_ing" in defects or "blank_ing_item" in defects
        elif entry["reason"] == "empty directions":
            assert "no_dir" in defects
        elif entry["reason"].startswith("control character"):
            assert {"control", "mojibake"} & set(defects)
        else:
            assert entry["reason"] == "duplicate"
            assert "exact_duplicate" in defects
    assert reasons["empty ingredients"] >= 80
    assert reasons["duplicate"] == data["duplicates"] > 40
    assert data["normalised"]["½"] > 0
    no_fraction_is_unknown(run)


def no_fraction_is_unknown(run: RunDir) -> None:
    """`½` and ⁄ give unknown tokens in T5's vocabulary; none may be left."""
    tokenizer = AutoTokenizer.from_pretrained(run.plan().model.folder)
    dataset = dataset_of(run)
    for part in (dataset.train, dataset.validation):
        for n in range(len(part)):
            assert "1<unk>2" not in f"{tokenizer.decode(part.input(n))} {tokenizer.decode(part.target(n))}"


def test_without_normalising_fractions_are_unknown_and_counted(workplace: Workplace) -> None:
    model = odd_model(workplace)
    workplace.rows("rows.jsonl", [{"input": "1½ cups", "target": "½"}, *pairs(3)])
    off = workplace.prepare(workplace.job(model=model, data={"normalise": False}))["data"]
    on = workplace.prepare(workplace.job(model=model))["data"]
    assert (off["unknown_tokens"], on["unknown_tokens"]) == (2, 0)


# -- stores ----------------------------------------------------------------------------------------------------------


def test_two_that_make_the_same_folder_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.3)
        (folder / "file").write_text("content")

    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(make_once(tmp_path / "it", make, Path.is_dir, lambda: None)))
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


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFull, match="no room is left"), full_disk_named(tmp_path):
        make_once(tmp_path / "it", make, Path.is_dir, lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == [".locks"]


def test_keys_are_remembered_across_merges() -> None:
    seen = Seen()
    keys = [(n * 0x9E3779B97F4A7C15) % (1 << 64) for n in range(150_000)]
    assert all(seen.first_time(key) for key in keys)
    assert not any(seen.first_time(key) for key in keys[::1000])
    assert seen.first_time((1 << 64) - 1)
    assert not seen.first_time((1 << 64) - 1)
