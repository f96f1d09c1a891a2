"""The service on a real uvicorn in a thread of this process, on a free loopback port."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import uvicorn

from jobs.disk.rundir import RunDir
from jobs.events import AnyFact
from jobs.process.public_url import path_of
from jobs.record import JobRecord
from jobs.redis.connection import connect
from jobs.redis.store import Store
from service.edge.connections import LIMITS
from service.main import create_app
from service.settings import ServiceSettings
from tests.service.contract import Contract, document_of_the_service
from tests.support.redis_server import free_port

STARTED_WITHIN_S = 120.0
"""A machine that others use takes seconds for what is done in milliseconds elsewhere."""
TINY: dict[str, Any] = {"name": "tiny", "model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}}


class Service:
    """Where it runs, requests to it, and the worker's side: `append`."""

    def __init__(self, settings: ServiceSettings, contract: Contract | None = None) -> None:
        self.settings, self._contract = settings, contract
        self.url = f"http://127.0.0.1:{settings.port}"
        self.store = Store(connect(settings.redis_url))
        self.session = requests.Session()
        if settings.api_key:
            self.session.headers["Authorization"] = f"Bearer {settings.api_key}"

    def request(self, method: str, path: str, **more: Any) -> requests.Response:
        """One request, with the key if there is one."""
        return self.session.request(method, self.url + path, timeout=60, **more)

    def get(self, path: str, **more: Any) -> requests.Response:
        """GET."""
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> requests.Response:
        """POST."""
        return self.request("POST", path, **more)

    def submit(self, **changes: Any) -> str:
        """Id of a new job."""
        answer = self.post("/jobs", json={**TINY, **changes})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def run(self, job: str) -> RunDir:
        """Its run directory."""
        return RunDir(self.settings.runs / job)

    def append(self, job: str, *facts: AnyFact, attempt: int | None = None) -> JobRecord:
        """What a worker does: append facts."""
        return self.store.append(self.run(job), list(facts), attempt=attempt)[0]

    @contextmanager
    def checked(self) -> Iterator[Service]:
        """For one test: its answers are as documented, and nothing of them is left for the next."""
        assert self._contract is not None
        try:
            with self.session:
                yield self
            assert self._contract.broken() == [], "these answers are not as the OpenAPI document says"
        finally:
            self._contract.seen.clear()

    @contextmanager
    def emptied(self) -> Iterator[Service]:
        """The same service for another test, which begins with its own connections and ends with empty folders."""
        try:
            with Service(self.settings, self._contract).checked() as service:
                yield service
        finally:
            for left in self.settings.runs.parent.iterdir():
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            self.settings.runs.mkdir()


@contextmanager
def running(
    redis_url: str,
    folder: Path,
    *,
    api_key: str | None = None,
    api_keys_file: Path | None = None,
    rate_limit: float = 0.0,
    keep_alive_s: float = 15.0,
    max_upload_bytes: int = 10**9,
    max_streams: int = 1000,
    public_url: str | None = None,
) -> Iterator[Service]:
    """A running service with `runs` and `data` in `folder`."""
    settings = ServiceSettings(
        redis_url=redis_url,
        runs=folder / "runs",
        data=folder / "data",
        uploads=folder / "uploads",
        max_upload_bytes=max_upload_bytes,
        port=free_port(),
        api_key=api_key,
        api_keys_file=api_keys_file,
        rate_limit=rate_limit,
        keep_alive_s=keep_alive_s,
        max_streams=max_streams,
        public_url=public_url,
    )
    contract = Contract(create_app(settings), document_of_the_service(), path_of(public_url))
    server = uvicorn.Server(uvicorn.Config(contract, port=settings.port, **(LIMITS | {"timeout_graceful_shutdown": 1})))
    thread = threading.Thread(target=server.run, name="service")
    thread.start()
    try:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.01)
        with Service(settings, contract).checked() as service:
            yield service
    finally:
        server.should_exit = True
        thread.join(timeout=STARTED_WITHIN_S)
        assert not thread.is_alive(), "the service did not stop"
