"""A folder that takes the name of another: whenever it is killed, one of the two has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.disk import files
from jobs.disk.files import replace_folder, restore_folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What is made, and where it goes: there is an older one."""
    made, target = tmp_path / "tmp-new", tmp_path / "export"
    for folder, content in ((made, "new"), (target, "old")):
        folder.mkdir()
        (folder / "content").write_text(content)
    return made, target


class Sigkill(Exception):
    """Instead of SIGKILL."""


def killed(*_: object) -> None:
    raise Sigkill


def test_the_name_is_exchanged_in_one_step(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = folders
    monkeypatch.setattr(os, "rename", killed)
    replace_folder(made, target)
    assert (target / "content").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_without_an_older_one_it_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "tmp-new").mkdir()
    replace_folder(tmp_path / "tmp-new", tmp_path / "export")
    assert [file.name for file in tmp_path.iterdir()] == ["export"]


def test_where_names_cannot_be_exchanged_a_kill_in_between_is_made_good(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target = folders
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    rename = os.rename

    def killed_at_the_second(source: Path, to: Path) -> None:
        killed() if source == made else rename(source, to)

    monkeypatch.setattr(os, "rename", killed_at_the_second)
    with pytest.raises(Sigkill):
        replace_folder(made, target)
    assert not target.exists()
    restore_folder(target)
    assert (target / "content").read_text() == "old"
    monkeypatch.setattr(os, "rename", rename)
    replace_folder(made, target)
    assert (target / "content").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]
