"""Models on a hub: a small one of our own, on loopback, that speaks the part of the hub's protocol that is used."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from jobs.errors import DiskFull, Refused, StageError
from tests.training.attempts import same_tensors
from tests.training.workplace import Workplace, pairs
from worker.training import builtin, hub, store
from worker.training.layout import t5_parameters

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "cooks/t5-tiny"


class Hub(ThreadingHTTPServer):
    """Serves the files of one folder as the model NAME at COMMIT."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.delay_s = 0.0
        self.fetched: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.server.delay_s)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self._model(path.removeprefix("/api/models/"))
        elif path.startswith(f"/{NAME}/resolve/"):
            self._file(self.server.folder / path.rsplit("/", 1)[1])
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _model(self, path: str) -> None:
        listing = "/tree/" in path
        name, _, revision = path.replace("/tree/", "/revision/").partition("/revision/")
        if name != NAME:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("", "main", COMMIT):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = sorted(self.server.folder.iterdir())
            siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
            body: Any = {"id": NAME, "sha": COMMIT, "siblings": siblings}
            if listing:
                body = [{"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "0"} for one in siblings]
            self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, file: Path) -> None:
        if not file.exists():
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        if self.command == "GET":
            self.server.fetched.append(file.name)
        tag = hashlib.sha256(content).hexdigest()
        self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    place = Workplace(tmp_path, offline=False)
    place.rows("rows.jsonl", pairs(20))
    return place


@pytest.fixture
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    folder.mkdir()
    builtin.build(folder, [text for row in pairs(20) for text in row.values()], seed=1)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "README.md").write_text("a model")
    server = Hub(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at(monkeypatch, server.url)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Point the hub's client, which reads its environment at import, at `url`."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def refusal(workplace: Workplace, model: str) -> StageError:
    with pytest.raises(StageError) as caught:
        workplace.check(workplace.job(model=model))
    assert caught.value.param == "model"
    assert caught.value.hint
    return caught.value


def test_check_resolves_the_commit_and_prepare_fetches_nothing_but_what_is_needed(
    workplace: Workplace, own_hub: Hub
) -> None:
    run = workplace.job(model=NAME)
    result = workplace.check(run)["plan"]
    assert result["parameters"] == t5_parameters(builtin.CONFIG)
    assert run.plan().model.revision == COMMIT
    assert "model.safetensors" not in own_hub.fetched
    workplace.prepare(run)
    folder = Path(run.plan().model.folder or "")
    assert folder.parent == workplace.settings.models
    assert same_tensors(folder / "model.safetensors", own_hub.folder / "model.safetensors")
    assert sorted(set(own_hub.fetched)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert own_hub.fetched.count("model.safetensors") == 1


def test_what_is_in_the_store_needs_no_hub(workplace: Workplace, own_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace.prepare(workplace.job(model=NAME))
    at(monkeypatch, "http://127.0.0.1:9")
    for model in (NAME, f"{NAME}@{COMMIT}"):
        run = workplace.job(model=model)
        workplace.prepare(run)
        assert run.plan().model.revision == COMMIT
    assert refusal(workplace, "cooks/another").detail_code == "hub_unreachable"


def test_what_was_converted_needs_not_even_the_download(workplace: Workplace, own_hub: Hub) -> None:
    first = workplace.job(model=NAME)
    workplace.prepare(first)
    for blob in (workplace.settings.models / "hub").rglob("*.safetensors"):
        blob.unlink()
    fetched = own_hub.fetched.count("model.safetensors")
    second = workplace.job(model=NAME)
    workplace.prepare(second)
    assert second.plan().model == first.plan().model
    assert own_hub.fetched.count("model.safetensors") == fetched


def test_a_model_that_is_not_what_its_config_says_is_refused_once_it_is_here(
    workplace: Workplace, own_hub: Hub
) -> None:
    config = json.loads((own_hub.folder / "config.json").read_text())
    (own_hub.folder / "config.json").write_text(json.dumps(config | {"num_decoder_layers": 3}))
    run = workplace.job(model=NAME)
    workplace.check(run)  # sees the config only
    with pytest.raises(Refused, match=r"missing from the weights.*: decoder\.block\.2\.") as caught:
        workplace.prepare(run)
    assert (caught.value.detail_code, caught.value.param) == ("missing_keys", "model")


def test_a_model_with_code_of_its_own_is_refused_at_check(workplace: Workplace, own_hub: Hub) -> None:
    config = json.loads((own_hub.folder / "config.json").read_text())
    (own_hub.folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Mine"}}))
    assert refusal(workplace, NAME).detail_code == "remote_code"
    assert "model.safetensors" not in own_hub.fetched


def test_what_the_hub_does_not_have_is_refused(workplace: Workplace, own_hub: Hub) -> None:
    assert refusal(workplace, "cooks/t5-huge").detail_code == "model_not_found"
    error = refusal(workplace, f"{NAME}@nowhere")
    assert error.detail_code == "model_not_found"
    assert "branch, tag or commit" in str(error.hint)
    (own_hub.folder / "model.safetensors").unlink()
    error = refusal(workplace, NAME)
    assert (error.detail_code, error.reason) == ("no_safetensors", "refused")
    assert "pytorch_model.bin" not in own_hub.fetched


def test_a_hub_that_does_not_answer_is_given_up(
    workplace: Workplace, own_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "LOOKUP_S", 0.5)
    own_hub.delay_s = 3
    start = time.perf_counter()
    assert refusal(workplace, NAME).detail_code == "hub_unreachable"
    assert time.perf_counter() - start < 2


def test_weights_that_do_not_fit_are_not_fetched(
    workplace: Workplace, own_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.job(model=NAME)
    workplace.check(run)
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(DiskFull, match="are free"):
        workplace.prepare(run)
    assert "model.safetensors" not in own_hub.fetched
