"""Data sets on a hub of our own: their first rows looked at by check, all of them fetched by prepare."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data_names import HubData, hub_data
from jobs.errors import DiskFull, Rejected, StageError
from tests.training.hub_server import COMMIT, Hub, at, running_hub
from tests.training.workplace import Workplace, dataset_of, pairs, rejected
from worker.training import store
from worker.training.dataset import inspection
from worker.training.hub_calls import HubRequest
from worker.training.rows import hub_data as hub_data_module
from worker.training.rows import origin
from worker.training.rows.hub_data import Listing, files_of_split

NAME = "cooks/recipes"


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path, offline=False, planned=False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch) as server:
        server.repositories[f"datasets/{NAME}"] = tmp_path / "hub"
        yield server


def put(hub: Hub, path: str, content: bytes) -> None:
    """A file of the data set."""
    file = hub.repositories[f"datasets/{NAME}"] / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def put_three_files(hub: Hub) -> None:
    """60 rows to train on in two files, 20 to validate."""
    put(hub, "README.md", b"# recipes")
    put(hub, "dataset_infos.json", b"{}")
    put(hub, "data/train-00000-of-00002.parquet", parquet(pairs(40)))
    put(hub, "data/train-00001-of-00002.parquet", parquet([*pairs(20, start=40), {"input": "no target", "target": ""}]))
    put(hub, "data/validation-00000-of-00001.parquet", parquet(pairs(20, start=60)))


def refusal(workplace: Workplace, train: str = NAME, **parts: Any) -> StageError:
    with pytest.raises(StageError) as caught:
        workplace.check(workplace.job(train, **parts))
    assert caught.value.hint
    return caught.value


# -- the stages ------------------------------------------------------------------------------------------------------


def test_a_data_set_is_checked_and_prepared_at_one_commit(workplace: Workplace, hub: Hub) -> None:
    put_three_files(hub)
    run = workplace.job(NAME, data={"validation": f"{NAME}:validation", "max_invalid_fraction": 0.1})
    result = workplace.check(run)["plan"]
    assert (result["rows_looked_at"], result["invalid_rows"]) == (81, {"empty target": 1})
    assert result["train"] == f"{NAME} (commit {COMMIT})"
    plan = run.plan().data
    assert (plan.train, plan.train_revision) == (NAME, COMMIT)
    assert (plan.validation, plan.validation_revision) == (f"{NAME}:validation", COMMIT)
    assert hub.fetched == []
    hub.asked.clear()
    data = workplace.prepare_only(run)["data"]
    assert (data["train_rows"], data["validation_rows"]) == (60, 20)
    assert sorted(hub.fetched) == [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/validation-00000-of-00001.parquet",
    ]
    assert all(COMMIT in path for path in hub.asked)
    plan = run.plan().data
    assert (plan.train_revision, plan.validation_revision, plan.complete) == (COMMIT, COMMIT, True)
    assert len(dataset_of(run).train) == 60
    (entry,) = rejected(run)
    assert entry["file"] == f"{NAME}/data/train-00001-of-00002.parquet"
    assert (entry["line"], entry["reason"]) == (21, "empty target")


def test_what_was_fetched_needs_no_hub(workplace: Workplace, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, "train.jsonl", lines(pairs(30)))
    put(hub, "test.jsonl", lines(pairs(30, start=30)))
    first = workplace.job(NAME)
    workplace.prepare(first)
    at(monkeypatch, "http://127.0.0.1:9")
    for offline in (False, True):
        workplace.settings = dataclasses.replace(workplace.settings, offline=offline)
        for name in (NAME, f"{NAME}@{COMMIT}", f"{NAME}:train"):
            run = workplace.job(name)
            workplace.prepare(run)
            assert run.plan().data.train_revision == COMMIT
            assert run.plan().data.prepared == first.plan().data.prepared
        for name in ("cooks/other", f"{NAME}:test", f"{NAME}@elsewhere"):
            assert refusal(workplace, name).detail_code == "hub_unreachable"


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.jsonl.gz", "train.parquet"])
def test_check_reads_no_more_than_the_first_rows(
    workplace: Workplace, hub: Hub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "ROWS", 4_000)
    monkeypatch.setattr(hub_data_module, "_PIECE", 1 << 18)
    rows = [{"input": f"{n} " + "x" * 150, "target": f"{n * n}" + "y" * 150} for n in range(24_000)]
    contents = {
        "train.jsonl": lambda: lines(rows),
        "train.jsonl.gz": lambda: gzip.compress(lines(rows), 0),
        "train.csv": lambda: b"input,target\n" + b"".join(f"{r['input']},{r['target']}\n".encode() for r in rows),
        "train.parquet": lambda: parquet(rows, compression=None, use_dictionary=False, row_group_size=8_000),
    }
    content = contents[name]()
    put(hub, name, content)
    result = workplace.check(workplace.job(NAME))["plan"]
    assert result["rows_looked_at"] == 4_000
    assert result["rows_estimated"] == pytest.approx(24_000, rel=0.2)
    assert hub.fetched == []
    assert 0 < sum(size for _, size in hub.parts) < len(content) / 2


def test_check_stops_where_the_first_rows_are_too_large(
    workplace: Workplace, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "HEAD_BYTES", 2 << 20)
    rows = [{"input": f"{n}" + "x" * 10_000, "target": f"{n}"} for n in range(1000)]
    put(hub, "train.jsonl", lines(rows))
    result = workplace.check(workplace.job(NAME))["plan"]
    assert 200 < result["rows_looked_at"] < 500
    assert result["rows_estimated"] == pytest.approx(1000, rel=0.2)
    assert sum(size for _, size in hub.parts) <= 4 << 20


def test_a_hub_that_serves_no_parts_will_do_for_small_files_only(workplace: Workplace, hub: Hub) -> None:
    hub.ranges = False
    put(hub, "train.jsonl", lines(pairs(50)))
    assert workplace.check(workplace.job(NAME))["plan"]["rows_looked_at"] == 50
    put(hub, "train.jsonl", lines([{"input": f"{n}" + "x" * 10_000, "target": f"{n}"} for n in range(200)]))
    error = refusal(workplace)
    assert (error.detail_code, error.param) == ("hub_unreachable", "data.train")
    assert "does not serve parts" in str(error)


def test_what_the_hub_does_not_have_is_refused(workplace: Workplace, hub: Hub) -> None:
    put(hub, "train.jsonl", lines(pairs(5)))
    workplace.rows("rows.jsonl", pairs(20))
    error = refusal(workplace, "cooks/nothing")
    assert (error.detail_code, error.reason, error.param) == ("dataset_not_found", "rejected", "data.train")
    error = refusal(workplace, f"{NAME}@nowhere")
    assert error.detail_code == "dataset_not_found"
    assert "branch, tag or commit of that dataset" in str(error.hint)
    error = refusal(workplace, "rows.jsonl", data={"validation": f"{NAME}:validation"})
    assert (error.detail_code, error.param) == ("unknown_split", "data.validation")
    assert "there are: train" in str(error)


def test_a_hub_that_does_not_answer_is_given_up(
    workplace: Workplace, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, "train.jsonl", lines(pairs(5)))
    monkeypatch.setattr(hub_data_module, "LOOKUP_S", 0.3)
    hub.delay_s = 2
    assert refusal(workplace).detail_code == "hub_unreachable"  # by the deadline, or the client's own


def test_a_damaged_file_on_the_hub_is_named(workplace: Workplace, hub: Hub) -> None:
    put(hub, "train.parquet", parquet(pairs(50))[:-50])
    error = refusal(workplace)
    assert error.detail_code == "damaged_file"
    assert f"{NAME}/train.parquet is damaged" in str(error)


def test_data_that_does_not_fit_is_not_fetched(workplace: Workplace, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, "train.jsonl", lines(pairs(30)))
    run = workplace.job(NAME)
    workplace.check(run)
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(DiskFull, match=NAME) as caught:
        workplace.prepare_only(run)
    assert "LONGHAUL_PREPARED" in str(caught.value.hint)
    assert hub.fetched == []


def test_a_file_in_the_data_directory_is_never_looked_for_on_the_hub(workplace: Workplace, hub: Hub) -> None:
    (workplace.data / "cooks").mkdir()
    workplace.rows("cooks/recipes.jsonl", pairs(20))
    workplace.rows("cooks/recipes", pairs(10))
    assert workplace.check(workplace.job("cooks/recipes.jsonl"))["plan"]["rows_looked_at"] == 20
    result = workplace.check(workplace.job("cooks/recipes", data={"format": "jsonl"}))["plan"]
    assert (result["rows_looked_at"], result["train"]) == (10, "cooks/recipes")
    assert hub.asked == []


# -- splits ----------------------------------------------------------------------------------------------------------


def split(name: str, *files: str, configs: tuple[dict[str, Any], ...] = ()) -> list[str]:
    named = hub_data(name, "auto")
    assert isinstance(named, HubData)
    listing = Listing(COMMIT, dict.fromkeys(files, 1), configs)
    return files_of_split(listing, named, HubRequest("dataset", name, "data.train", "a file"))


@pytest.mark.parametrize(
    ("name", "files", "chosen"),
    [
        (NAME, ["README.md", "a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (NAME, ["train.csv", "test.csv"], ["train.csv"]),
        (f"{NAME}:test", ["train.csv", "test.csv"], ["test.csv"]),
        (f"{NAME}:validation", ["train.csv", "dev.csv"], ["dev.csv"]),
        (f"{NAME}:validation", ["train/a.jsonl.gz", "valid/b.jsonl.gz"], ["valid/b.jsonl.gz"]),
        (NAME, ["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/test-0.parquet"],
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (f"{NAME}:train_sft", ["data/train_sft-0.parquet", "data/test_sft-0.parquet"], ["data/train_sft-0.parquet"]),
        (NAME, ["my_train_rows.jsonl.zst", "constraint.jsonl.zst", "training.jsonl.zst"],
         ["my_train_rows.jsonl.zst", "training.jsonl.zst"]),
        (NAME, [".hidden/train.jsonl", "_old/train.jsonl", "train.jsonl", "train/dataset_info.json"], ["train.jsonl"]),
        (f"{NAME}:main/test", ["main/train.csv", "main/test.csv", "other/test.csv"], ["main/test.csv"]),
        (f"{NAME}@refs/convert/parquet", ["default/train/0000.parquet", "default/test/0000.parquet"],
         ["default/train/0000.parquet"]),
    ],
)  # fmt: skip
def test_the_files_of_a_split_follow_from_their_names(name: str, files: list[str], chosen: list[str]) -> None:
    assert split(name, *files) == chosen


@pytest.mark.parametrize(
    ("name", "configs", "chosen"),
    [
        (NAME, [{"config_name": "x", "data_files": "b/*.csv"}], ["b/two.csv"]),
        (NAME, [{"config_name": "x", "data_files": ["a/*.csv", "b/two.csv"]}], ["a/one.csv", "b/two.csv"]),
        (NAME, [{"config_name": "x", "data_files": [{"split": "train", "path": "**/t*.csv"}]}],
         ["b/two.csv", "c/d/three.csv"]),
        (f"{NAME}:held", [{"data_files": [{"split": "held", "path": ["a/?ne.csv"]}, {"split": "train", "path": "b"}]}],
         ["a/one.csv"]),
        (NAME, [{"config_name": "x", "data_dir": "c"}], ["c/d/three.csv"]),
        (NAME, [{"config_name": "x", "data_files": "a/*"}, {"config_name": "default", "data_files": "b/*"}],
         ["b/two.csv"]),
        (NAME, [{"config_name": "x", "data_files": "a/*", "default": True}, {"config_name": "y", "data_files": "b/*"}],
         ["a/one.csv"]),
        (f"{NAME}:y/train", [{"config_name": "x", "data_files": "a/*"}, {"config_name": "y", "data_files": "b/*"}],
         ["b/two.csv"]),
    ],
)  # fmt: skip
def test_the_gpu_of_a_data_set_comes_first(name: str, configs: list[dict[str, Any]], chosen: list[str]) -> None:
    assert split(name, "recipes.py", "a/one.csv", "b/two.csv", "c/d/three.csv", configs=tuple(configs)) == chosen


@pytest.mark.parametrize(
    ("name", "files", "configs", "code", "said"),
    [
        (NAME, ["recipes.py", "train.jsonl"], [], "needs_script", "recipes.py"),
        (NAME, ["README.md", "images.zip"], [], "no_data_files", "images.zip"),
        (f"{NAME}:dev", ["train.csv", "test.csv"], [], "unknown_split", "there are: train, test"),
        (NAME, ["train.csv", "train.jsonl"], [], "mixed_formats", "train.csv"),
        (f"{NAME}:other/train", ["main/train.csv"], [], "unknown_configuration", "there are: main"),
        (f"{NAME}@refs/convert/parquet", ["a/train/0.parquet", "b/train/0.parquet"], [], "several_configurations",
         "a, b"),
        (NAME, ["a.csv", "b.csv"], [{"config_name": "x", "data_files": "a.csv"}, {"config_name": "y", "data_dir": "."}],
         "several_configurations", "x, y"),
        (NAME, ["a.csv"], [{"config_name": "x", "data_files": [{"split": "train"}]}], "bad_gpu", "names no files"),
        (NAME, ["../a.csv", "/etc/b.csv"], [], "no_data_files", "/etc/b.csv"),
        (f"{NAME}:z/train", ["a.csv"], [{"config_name": "x", "data_files": "a.csv"}], "unknown_configuration", "x"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused_by_name(
    name: str, files: list[str], configs: list[dict[str, Any]], code: str, said: str
) -> None:
    with pytest.raises(Rejected) as caught:
        split(name, *files, configs=tuple(configs))
    assert (caught.value.detail_code, caught.value.param) == (code, "data.train")
    assert said in str(caught.value)
    assert caught.value.hint
