"""What a killed export has left goes: its folder may be as large as the model, and nothing lists it."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from jobs.disk.rundir import RunDir, create
from jobs.errors import NotFound
from jobs.events import JobSubmitted
from jobs.export import ExportFormat, ExportRequest
from jobs.redis.requests import Request
from jobs.spec import parse_spec
from worker import exports
from worker.exports import ExportHandler
from worker.requests import Abandoned, AnswerWriter, RequestFailed
from worker.settings import from_environment
from worker.training.journal import Journal
from worker.training.machine.locks import try_lock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    return create(tmp_path, "job-1", spec, JobSubmitted(name="n", model="m", spec_sha256=spec.sha256()))[0]


@pytest.fixture
def handler(tmp_path: Path) -> ExportHandler:
    return ExportHandler(dataclasses.replace(from_environment({"LONGHAUL_DEVICE": "cpu"}), runs=tmp_path))


def begun(run: RunDir, format: str) -> Path:
    """What an export writes into."""
    folder = run.path / "exports" / f"tmp-{format}"
    (folder / "export").mkdir(parents=True)
    (folder / "export" / "model.bin").write_bytes(b"half of it")
    return folder


class EndedWriter(AnswerWriter):
    """Ends the work as soon as its process has begun to write."""

    def __init__(self, run: RunDir, error: Exception) -> None:
        super().__init__(cast("Any", None), cast("Any", Request("r", "export", run.id, {})), threading.Event())
        self._run, self._error = run, error

    def hold(self) -> None:
        begun(self._run, "ctranslate2")
        raise self._error


@pytest.mark.parametrize("error", [Abandoned(), RequestFailed("stopped", code="worker_stopped")])
def test_nothing_is_left_where_its_process_is_killed(
    handler: ExportHandler, run: RunDir, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(exports, "LOOK_S", 0.0)
    asked = ExportRequest(format=ExportFormat.CTRANSLATE2).model_dump(mode="json")
    with pytest.raises(type(error)):
        handler.answer(Request("r", "export", run.id, asked), EndedWriter(run, error))
    assert not list((run.path / "exports").glob("tmp-*"))


def test_deleting_the_job_ends_the_export_and_the_directory_stays_away(
    handler: ExportHandler, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the worker looks at its process."""

    class JobDeletedMeanwhile(EndedWriter):
        def hold(self) -> None:
            shutil.rmtree(run.path)

    monkeypatch.setattr(exports, "LOOK_S", 0.0)
    asked = ExportRequest(format=ExportFormat.CTRANSLATE2).model_dump(mode="json")
    with pytest.raises(NotFound, match="job job-1 was deleted, and its export is given up"):
        handler.answer(Request("r", "export", run.id, asked), JobDeletedMeanwhile(run, Abandoned()))
    with pytest.raises(FileNotFoundError):
        Journal(run.attempt_file("export-gguf"))
    assert not run.path.exists()


def test_what_a_killed_worker_left_goes_and_what_is_being_made_stays(
    handler: ExportHandler, run: RunDir, tmp_path: Path
) -> None:
    left, made = begun(run, "ctranslate2"), begun(run, "gguf")
    lock = try_lock(run.path / "exports" / ".gguf.lock")
    assert lock is not None
    with lock:
        handler.idle()
        assert not left.exists() and (made / "export" / "model.bin").exists()


def test_a_link_is_not_followed(handler: ExportHandler, run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "tmp-gguf").mkdir(parents=True)
    (run.path / "exports").symlink_to(tmp_path / "elsewhere")
    handler.idle()
    assert (tmp_path / "elsewhere" / "tmp-gguf").is_dir()
