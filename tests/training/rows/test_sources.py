"""Finding files of rows."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.errors import BadData, Rejected, StageError
from worker.training.rows.sources import find_file
from worker.training.store import fingerprint

NOBODY = 65534


def refusal(data: Path, name: str) -> StageError:
    with pytest.raises(StageError) as caught:
        find_file(data, name, "data.train")
    assert caught.value.param == "data.train"
    return caught.value


def test_a_file_is_found_by_relative_and_absolute_name_and_through_links(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to(file)
    for name in ("folder/rows.jsonl", str(file), "link.jsonl", "folder/../folder/rows.jsonl"):
        assert find_file(tmp_path, name, "data.train") == file


def test_a_path_outside_the_data_directory_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    secret = tmp_path / "secret.jsonl"
    secret.write_text("{}\n")
    (data / "link.jsonl").symlink_to(secret)
    for name in ("../secret.jsonl", str(secret), "link.jsonl", "/etc/passwd", "../data2/x.jsonl"):
        error = refusal(data, name)
        assert isinstance(error, Rejected)
        assert error.detail_code == "path_outside_data"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing.jsonl", "file_missing"), ("empty.jsonl/below", "file_missing"),
        ("nul\0.jsonl", "file_missing"), ("loop", "file_missing"), ("empty.jsonl", "file_empty"),
        ("folder", "not_a_file"), ("pipe", "not_a_file"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_rows_is_named(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    error = refusal(tmp_path, name)
    assert isinstance(error, BadData)
    assert error.detail_code == code
    if name == "missing.jsonl":
        assert "`longhaul datasets add FILE`" in str(error.hint)


@pytest.fixture
def someone_else() -> Iterator[Path]:
    """A data directory that others can enter, seen by a user who is not root."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    root = os.geteuid() == 0
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in folder.rglob("*"):
            path.chmod(stat.S_IRWXU)
        shutil.rmtree(folder)


def test_an_unreadable_file_is_refused_with_the_chmod_that_helps(someone_else: Path) -> None:
    file = someone_else / "rows.jsonl"
    file.write_text("{}\n")
    file.chmod(0)
    locked = someone_else / "locked"
    locked.mkdir()
    (locked / "rows.jsonl").write_text("{}\n")
    locked.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    error = refusal(someone_else, "rows.jsonl")
    assert (error.detail_code, error.hint) == ("file_unreadable", "in the data directory: chmod a+r rows.jsonl")
    error = refusal(someone_else, "locked/rows.jsonl")
    assert error.detail_code == "file_unreadable"
    assert f"chmod a+rx {locked}" in str(error.hint)


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (9 << 20))
    (tmp_path / "b").write_bytes(b"x" * (9 << 20))
    calls: list[None] = []
    assert fingerprint(tmp_path / "a", lambda: calls.append(None)) == fingerprint(tmp_path / "b", lambda: None)
    assert len(calls) == 2
