"""`dataset:NAME` is the uploaded file of that name, and nothing else."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.errors import BadData, Rejected, StageError
from tests.training.workplace import Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training.rows.origin import find_head
from worker.training.settings import TrainerSettings, from_environment

ROWS = b'{"input": "a", "target": "b"}\n'


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    """With one data set, and a file beside all of them."""
    folder = tmp_path / "uploads" / "rows.jsonl"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_bytes(ROWS)
    (tmp_path / "secret.jsonl").write_bytes(ROWS)
    (tmp_path / "data").mkdir()
    here = from_environment({"LONGHAUL_DEVICE": "cpu", "LONGHAUL_UPLOADS": str(tmp_path / "uploads")})
    return replace(here, data=tmp_path / "data")


def test_the_uploaded_file_is_read(settings: TrainerSettings) -> None:
    head = find_head("dataset:rows.jsonl", "data.train", "auto", settings)
    assert head.name == "dataset:rows.jsonl"
    assert Path(head.place) == settings.uploads / "rows.jsonl" / "rows.jsonl"
    with head.files[0].open("data.train") as file:
        assert file.read() == ROWS


@pytest.mark.parametrize(
    "name",
    ["gone.jsonl", "../secret.jsonl", "rows.jsonl/rows.jsonl", "", "..", "/etc/passwd", "about.json", "a\0.jsonl"],
)
def test_anything_else_is_missing(settings: TrainerSettings, name: str) -> None:
    with pytest.raises(BadData) as caught:
        find_head(f"dataset:{name}", "data.validation", "jsonl", settings)
    assert (caught.value.detail_code, caught.value.param) == ("dataset_missing", "data.validation")
    assert "longhaul datasets add" in str(caught.value.hint)


def test_a_file_that_was_uploaded_and_is_named_as_if_it_lay_in_the_data_directory(settings: TrainerSettings) -> None:
    for name, hint in (("rows.jsonl", "name it dataset:rows.jsonl"), ("other.jsonl", "longhaul datasets add FILE")):
        with pytest.raises(BadData) as caught:
            find_head(name, "data.train", "auto", settings)
        assert caught.value.detail_code == "file_missing" and hint in str(caught.value.hint)


def test_a_link_in_its_place_leads_nowhere(settings: TrainerSettings) -> None:
    file = settings.uploads / "rows.jsonl" / "rows.jsonl"
    file.unlink()
    file.symlink_to(settings.data.parent / "secret.jsonl")
    with pytest.raises(Rejected) as caught:
        find_head("dataset:rows.jsonl", "data.train", "auto", settings)
    assert caught.value.detail_code == "path_outside_data"


@pytest.mark.parametrize(
    ("make", "code"), [(os.mkfifo, "not_a_file"), (Path.mkdir, "not_a_file"), (Path.touch, "file_empty")]
)
def test_what_is_no_file_of_rows_is_said(settings: TrainerSettings, make: object, code: str) -> None:
    file = settings.uploads / "rows.jsonl" / "rows.jsonl"
    file.unlink()
    assert callable(make)
    make(file)
    with pytest.raises(StageError) as caught:
        find_head("dataset:rows.jsonl", "data.train", "auto", settings)
    assert caught.value.detail_code == code


def test_content_decides_what_is_prepared_not_where_it_came_from(workplace: Workplace) -> None:
    workplace.settings = replace(workplace.settings, uploads=workplace.root / "uploads")
    rows = workplace.rows("rows.jsonl", pairs(50))
    uploaded = workplace.root / "uploads" / "other.jsonl"
    uploaded.mkdir(parents=True)
    shutil.copy(rows, uploaded / "other.jsonl")
    runs = [workplace.job(train) for train in ("rows.jsonl", "dataset:other.jsonl")]
    for run in runs:
        workplace.prepare(run)
    first, second = (run.plan().data for run in runs)
    assert first.prepared == second.prepared
    assert second.train == str(uploaded / "other.jsonl")
