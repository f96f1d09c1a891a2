"""A hub of our own on loopback: the part of the hub's protocol that is used, for one model and any data sets."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "cooks/t5-tiny"


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories at `commit`, by `models` or `datasets` and name, e.g. `datasets/cooks/recipes`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gpus: dict[str, dict[str, Any]] = {}
        """What a repository's GPU says, beside its name."""
        self.revisions = {"main", "refs/convert/parquet"}
        """Names of `commit`."""
        self.commit = COMMIT
        """The newest. COMMIT itself is known in any case, and has the same files."""
        self.delay_s = 0.0
        self.ranges = True
        self.fetched: list[str] = []
        """Names of files, one for each GET."""
        self.parts: list[tuple[str, int]] = []
        """Names of files of which a part was asked for, and its bytes."""
        self.asked: list[str] = []
        """Paths of all requests."""
        self.card_data: dict[str, dict[str, str]] = {}
        """What the model card of a repository says in front."""
        self.token = ""
        """Who has it may write; '': nobody."""
        self.created: dict[str, bool] = {}
        """By name, whether the repository that was made is private."""
        self.objects: dict[str, bytes] = {}
        """Large files that came in whole, by sha256."""
        self.received: list[str] = []
        """sha256 of each large file that was sent."""
        self.commits: list[dict[str, bytes]] = []
        """Files of each commit."""
        self.stalls_at: str | None = None
        """A large file with this beginning of its content waits, once it has come in, until `proceed`."""
        self.stalled, self.proceed = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), HubHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that give up are part of what is tested

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.server.delay_s)
        path = self.path.partition("?")[0].replace("%2F", "/")
        self.server.asked.append(path)
        if path.startswith("/api/"):
            self._repository(path.removeprefix("/api/"))
            return
        name, _, file = path.removeprefix("/").partition("/resolve/")
        folder = self.server.repositories.get(name if name.startswith("datasets/") else f"models/{name}")
        if folder is None:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            self._file(folder, *self._resolved(file))

    def do_PUT(self) -> None:
        """A large file."""
        content, sha256 = self._body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == sha256
        self.server.received.append(sha256)
        if self.server.stalls_at == sha256:
            self.server.stalls_at = None
            self.server.stalled.set()
            self.server.proceed.wait(60)
            self.close_connection = True
            return
        self.server.objects[sha256] = content
        self._answer(200, b"", {})

    def do_POST(self) -> None:
        """What an upload consists of besides its large files."""
        content = self._body()
        self.server.asked.append(self.path)
        if self.path != "/api/validate-yaml" and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._json({"error": "Invalid username or password."}, 401)
            return
        repository = re.sub(r"^/api/models/|/(preupload|commit)/main$|^/|\.git/info/lfs/objects/batch$", "", self.path)
        match self.path.rpartition("/")[2], self.path:
            case _, "/api/repos/create":
                asked = json.loads(content)
                name = f"{asked['organization']}/{asked['name']}"
                if name in self.server.created:
                    self._json(
                        {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}, 409
                    )
                    return
                self.server.created[name] = asked["visibility"] == "private"
                self._json({"url": f"{self.server.url}/{name}", "id": name})
            case _, "/api/validate-yaml":
                self._json({"errors": [], "warnings": []})
            case "batch", _:
                assert repository in self.server.created
                objects = [
                    {"oid": each["oid"], "size": each["size"]}
                    | ({} if each["oid"] in self.server.objects else self._upload_to(each["oid"]))
                    for each in json.loads(content)["objects"]
                ]
                self._json({"transfer": "basic", "objects": objects})
            case "main", path if "/preupload/" in path:
                large = (".safetensors", ".bin", "tokenizer.json")
                files = [
                    {"path": each["path"], "shouldIgnore": False,
                     "uploadMode": "lfs" if each["path"].endswith(large) else "regular"}
                    for each in json.loads(content)["files"]
                ]  # fmt: skip
                self._json({"files": files})
            case "main", _:
                lines = [json.loads(line) for line in content.splitlines()]
                self.server.commits.append(
                    {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines
                     if line["key"] == "file"}
                    | {line["value"]["path"]: self.server.objects[line["value"]["oid"]] for line in lines
                       if line["key"] == "lfsFile"}
                )  # fmt: skip
                url = f"{self.server.url}/{repository}/commit/{COMMIT}"
                self._json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    def _upload_to(self, sha256: str) -> dict[str, Any]:
        return {"actions": {"upload": {"href": f"{self.server.url}/objects/{sha256}"}}}

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _json(self, body: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolved(self, path: str) -> tuple[str, str]:
        """The path without its revision, and the commit that this stands for."""
        known = "|".join(map(re.escape, [COMMIT, self.server.commit, *self.server.revisions]))
        commit = COMMIT if path.startswith(COMMIT) else self.server.commit
        return re.sub(f"^(?:{known})/", "", path), commit

    def _repository(self, path: str) -> None:
        listing = "/tree/" in path
        name, _, revision = path.replace("/tree/", "/revision/").partition("/revision/")
        folder = self.server.repositories.get(name)
        if folder is None:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("", COMMIT, self.server.commit, *self.server.revisions):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            siblings = [{"rfilename": str(file.relative_to(folder)), "size": file.stat().st_size} for file in files]
            commit = COMMIT if revision == COMMIT else self.server.commit
            body: Any = {
                "cardData": self.server.card_data.get(name),
                "id": name.partition("/")[2],
                "sha": commit,
                "siblings": siblings,
            }
            if name in self.server.gpus:
                body["gpuData"] = self.server.gpus[name]
            if listing:
                body = [{"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "0"} for one in siblings]
            self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, folder: Path, name: str, commit: str) -> None:
        file = folder / name
        if not file.exists():
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part and self.server.ranges:
            first, last = int(part[1]), int(part[2])
            self.server.parts.append((name, last + 1 - first))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self._answer(206, content[first : last + 1], headers)
            return
        if self.command == "GET":
            self.server.fetched.append(name)
        self._answer(200, content, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client asks until the end of the block."""
    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
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
