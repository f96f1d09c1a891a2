"""Downloads that break off and continue, whatever happens to the file meanwhile; uploads, and what is said of both."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longhaul import ApiError, Longhaul, Unreachable
from longhaul.connection import Connection
from longhaul.transfer import _fetch
from tests.service.running import Service

CONTENT = bytes(range(256)) * 1000


class FileServer:
    """One file with an ETag and ranges. Each answer breaks off after so many bytes: `cuts`, the first one first."""

    def __init__(self) -> None:
        self.content, self.etag = CONTENT, '"one"'
        self.cuts: list[int] = []
        self.asked: list[str | None] = []
        self.wrong_start = 0


@contextmanager
def serving() -> Iterator[tuple[FileServer, Connection]]:
    told = FileServer()

    class FileHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            given = self.headers.get("Range")
            told.asked.append(given)
            whole, start = told.content, 0
            if given is not None and self.headers.get("If-Range") == told.etag:
                start = int(given.removeprefix("bytes=").removesuffix("-")) + told.wrong_start
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(whole) - start))
            if told.etag:
                self.send_header("ETag", told.etag)
            self.end_headers()
            cut = told.cuts.pop(0) if told.cuts else len(whole)
            self.wfile.write(whole[start : start + cut])
            self.close_connection = start + cut < len(whole)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), FileHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        connection = Connection(f"http://127.0.0.1:{server.server_port}", None, print)
        try:
            with connection.session:
                yield told, connection
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.connection.PAUSE_S", 0.01)


def left(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_a_download_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    target, seen = tmp_path / "deep" / "model.bin", []
    with serving() as (server, connection):
        server.cuts = [100_000, 80_000]
        _fetch(connection, "/file", target, lambda done, size: seen.append((done, size)))
        assert server.asked == [None, "bytes=65535-", "bytes=131070-"], "blocks of 64 KiB are kept"
    assert target.read_bytes() == CONTENT and left(target.parent) == {"model.bin"}
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_it_goes_on_in_another_process_even_when_all_is_there(tmp_path: Path) -> None:
    target = tmp_path / "model.bin"
    with serving() as (server, connection):
        server.cuts = [70_000, 0, 0, 0]
        with pytest.raises(Unreachable, match="run it again to continue"):
            _fetch(connection, "/file", target, lambda *_: None)
        assert left(tmp_path) == {"model.bin.part-%22one%22"}, "nothing looks finished that is not"
        (tmp_path / "model.bin.part-%22one%22").write_bytes(CONTENT)
        server.cuts, server.asked = [], []
        _fetch(connection, "/file", target, lambda *_: None)
        assert server.asked == [f"bytes={len(CONTENT) - 1}-"]
    assert target.read_bytes() == CONTENT and left(tmp_path) == {"model.bin"}


def test_a_file_that_changed_is_fetched_anew(tmp_path: Path) -> None:
    target = tmp_path / "log"
    with serving() as (server, connection):
        server.cuts = [70_000, 0, 0, 0]
        with pytest.raises(Unreachable):
            _fetch(connection, "/file", target, lambda *_: None)
        server.cuts, server.content, server.etag = [], CONTENT[::-1], '"two"'
        _fetch(connection, "/file", target, lambda *_: None)
    assert target.read_bytes() == CONTENT[::-1] and left(tmp_path) == {"log"}


def test_without_an_etag_nothing_is_put_together(tmp_path: Path) -> None:
    target = tmp_path / "log"
    with serving() as (server, connection):
        server.etag, server.cuts = "", [70_000]
        _fetch(connection, "/file", target, lambda *_: None)
        assert server.asked == [None, None]
    assert target.read_bytes() == CONTENT and left(tmp_path) == {"log"}


def test_a_part_that_was_not_asked_for_is_not_taken(tmp_path: Path) -> None:
    with serving() as (server, connection):
        server.cuts, server.wrong_start = [70_000], 5
        with pytest.raises(Unreachable):
            _fetch(connection, "/file", tmp_path / "log", lambda *_: None)
    assert not (tmp_path / "log").exists()


def test_a_model_and_a_single_file_of_a_job(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.submit()
    run = service.run(job)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    (run.model / "model-00001.safetensors").write_bytes(CONTENT)
    run.metrics_file.write_text("hello\n")
    seen: set[str] = set()
    with Longhaul(service.url, service.settings.api_key) as api:
        written = api.download(job, "model", tmp_path / "here", on_progress=lambda path, *_: seen.add(path))
        here = [tmp_path / "here" / "config.json", tmp_path / "here" / "model-00001.safetensors"]
        assert sorted(written) == here and here[1].read_bytes() == CONTENT
        assert seen == {"model/config.json", "model/model-00001.safetensors"}
        here[0].unlink()
        here[1].rename(f"{here[1]}.part-x")
        assert sorted(api.download(job, "model", tmp_path / "here")) == here, "what was begun is completed"
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "notes.txt").write_text("")
        assert sorted(api.download(job, "model", tmp_path / "used"))[0] == tmp_path / "used" / "model" / "config.json"
        monkeypatch.chdir(tmp_path / "here")
        for file in here:
            file.unlink()
        assert sorted(api.download(job))[0] == Path("model/config.json")
        assert [file.name for file in api.download(job, "metrics.jsonl", tmp_path)] == ["metrics.jsonl"]
        with pytest.raises(ApiError, match="no file or folder 'models'") as missing:
            api.download(job, "models", tmp_path)
        assert missing.value.status == 404


def test_the_log_of_the_trainer_is_whole_and_without_secrets(service: Service, tmp_path: Path) -> None:
    job, token = service.submit(), "hf_" + "a1B2c3D4" * 4
    lines = [f"step {number:,}: näher am Ziel" for number in range(60_000)]
    service.run(job).trainer_log.write_text("\n".join([*lines, f"token {token}", "cut in the mid"]))
    with Longhaul(service.url, service.settings.api_key) as api:
        assert api.download(job, "trainer.log", tmp_path / "here") == [tmp_path / "here" / "trainer.log"]
    written = (tmp_path / "here" / "trainer.log").read_text().splitlines()
    assert written == [*lines, "token hf_***"], "the last line may still grow"
    assert left(tmp_path / "here") == {"trainer.log"}


@pytest.mark.parametrize("name", ["../up", "/etc/up", "model/../../up"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Longhaul()
    monkeypatch.setattr(api, "files", lambda job: [{"path": name, "bytes": 1}])
    with api, pytest.raises(Unreachable, match="is not Longhaul"):
        api.download("job-a", name, tmp_path / "to")
    assert list(tmp_path.iterdir()) == []


def test_an_upload_is_streamed_checked_and_may_be_repeated(service: Service, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"input": "a", "target": "b"}\n' * 20_000)
    seen: list[tuple[int, int]] = []
    with Longhaul(service.url, service.settings.api_key) as api:
        made = api.upload(rows, on_progress=lambda *told: seen.append(told))
        assert made["sha256"] == hashlib.sha256(rows.read_bytes()).hexdigest()
        assert len(seen) > 2 and seen[-1] == (600_000, 600_000)
        assert api.upload(str(rows))["created_at"] == made["created_at"]
        assert [each["name"] for each in api.datasets()] == ["rows.jsonl"]
        rows.write_text("{}\n")
        with pytest.raises(ApiError) as taken:
            api.upload(rows)
        assert taken.value.status == 409
        job = api.submit({"data": {"train": "dataset:rows.jsonl"}})
        assert api.dataset("rows.jsonl")["jobs"] == [job["id"]]
        with pytest.raises(ApiError) as used:
            api.delete_dataset("rows.jsonl")
        assert used.value.status == 409
        api.cancel(job["id"])
        assert api.delete_dataset("rows.jsonl")["deleted"] is True
        with pytest.raises(FileNotFoundError):
            api.upload(tmp_path / "nothing.jsonl")
