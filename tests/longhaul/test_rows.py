"""How a file of rows gets to the service: where it lies, or by an upload, and never one twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from longhaul import Longhaul
from longhaul.jobfile import at_the_service
from tests.service.running import Service


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a data directory in it."""
    folder = tmp_path / "here"
    (folder / "data").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def placed(service: Service, file: str, *, upload: bool = False, url: str | None = None) -> tuple[str, str]:
    """(what `data.train` has to be, what was said)."""
    said: list[str] = []
    with Longhaul(url or service.url, service.settings.api_key) as api:
        train = at_the_service(
            api,
            file,
            data=Path("data"),
            upload=upload,
            before_upload=lambda: None,
            say=said.append,
            on_progress=lambda *_: None,
        )
    [line] = said
    return train, line


def test_a_file_in_the_data_directory_is_read_where_it_lies(service: Service, here: Path) -> None:
    (here / "data" / "deep").mkdir()
    (here / "data" / "deep" / "rows.jsonl").write_text("{}\n")
    train, said = placed(service, "data/deep/rows.jsonl")
    assert train == "deep/rows.jsonl" and "--upload" in said
    assert placed(service, "data/deep/rows.jsonl", upload=True)[0] == "dataset:rows.jsonl"


def test_another_one_is_uploaded_once(service: Service, here: Path) -> None:
    (here / "my rows ½.jsonl").write_text("{}\n")
    train, said = placed(service, "my rows ½.jsonl")
    assert train == "dataset:my-rows--.jsonl"
    assert said == "uploaded my rows ½.jsonl (3 B) as dataset:my-rows--.jsonl"
    assert placed(service, "my rows ½.jsonl") == (train, f"the service already has my rows ½.jsonl as {train}")
    (here / "my rows ½.jsonl").write_text('{"other": 1}\n')
    other, said = placed(service, "my rows ½.jsonl")
    assert other.startswith("dataset:my-rows---") and other.endswith(".jsonl") and said.startswith("uploaded")
    assert placed(service, "my rows ½.jsonl")[0] == other


@pytest.mark.parametrize(("file", "name"), [("データ.jsonl", "data.jsonl"), ("данные.csv.gz", "data.csv.gz")])
def test_a_name_without_a_legal_character_becomes_data(service: Service, here: Path, file: str, name: str) -> None:
    (here / file).write_text("{}\n")
    assert placed(service, file)[0] == f"dataset:{name}"


def test_json_under_another_name_gets_an_ending(service: Service, here: Path) -> None:
    (here / "rows.txt").write_text("{}\n")
    assert placed(service, "rows.txt")[0] == "dataset:rows.txt.json"


def test_a_file_that_is_not_here_may_be_there(service: Service, here: Path) -> None:
    train, said = placed(service, "elsewhere.jsonl")
    assert train == "elsewhere.jsonl" and "looks for it in its data directory" in said
    assert "among the uploaded data sets" in placed(service, "dataset:rows.jsonl")[1]
    assert placed(service, "org/rows")[1].endswith("looks for it on the hub")
