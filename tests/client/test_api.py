"""The library: events across outages, one job for one submission, nothing that looks like Longhaul but is not."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from client.api import ApiError, Longhaul, Unreachable
from jobs.events import JobCancelled, JobChecked
from tests.service.running import TINY, Service, running


def test_events_go_on_after_a_restart_of_the_service(redis_url: str, tmp_path: Path) -> None:
    troubles: list[str] = []
    with running(redis_url, tmp_path) as first:
        job = first.submit()
        api = Longhaul(first.url)
        events = api.events(job, on_trouble=troubles.append)
        assert next(events)["number"] == 1
        port = first.settings.port
    assert troubles == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.service.running.free_port", lambda: port)
        with running(redis_url, tmp_path) as second, api:
            second.append(job, JobChecked(plan={}))
            second.append(job, JobCancelled())
            assert [event["number"] for event in events] == [2, 3]


def test_errors_are_typed(service: Service) -> None:
    with Longhaul(service.url, service.settings.api_key) as api:
        with pytest.raises(ApiError) as caught:
            api.submit({**TINY, "data": {"train": "/etc/passwd.jsonl"}})
        error = caught.value
        assert (error.status, error.code, error.param) == (422, "invalid_value", "data.train")
        assert error.hint
        with pytest.raises(ApiError) as missing:
            list(api.events("job-unknown"))
        assert missing.value.status == 404
        assert "test-key-123" not in repr(api)


def test_a_lost_answer_does_not_double_the_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service did it, the answer was lost, the client sends it again under the same key."""
    with Longhaul(service.url, service.settings.api_key) as api:
        real, lost = api._answer, [True]

        def flaky(*arguments: str, **more: object) -> object:
            answer = real(*arguments, **more)
            if lost.pop() if lost else False:
                raise Unreachable("lost")
            return answer

        monkeypatch.setattr(api, "_answer", flaky)
        job = api.submit(TINY)
    assert [run.name for run in service.settings.runs.iterdir()] == [job["id"]]


def test_something_else_at_the_address() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/workers" else 404)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with Longhaul(f"http://127.0.0.1:{server.server_port}") as api:
            for call in (api.workers, api.list):
                with pytest.raises(Unreachable, match="not Longhaul"):
                    call()
        server.shutdown()
        thread.join()
