"""The library: jobs, lists, typed refusals, one job for one submission, nothing that looks like Longhaul but is not."""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import requests

from jobs.events import JobCancelled
from longhaul import ApiError, Longhaul, Unreachable
from longhaul.main import main
from tests.service.running import TINY, Service
from tests.support.fakes import FakeServer, Reply
from tests.support.samples import heartbeat, metric_row


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


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8306", "http://127.0.0.1:8306"),
        ("localhost", "http://localhost"),
        ("box.lan:8000/", "http://box.lan:8000"),
        ("https://box.lan/longhaul/", "https://box.lan/longhaul"),
        ("http://box.lan/longhaul/jobs", "http://box.lan/longhaul"),
        ("http://jobs:8000/jobs/job-1?tab=log", "http://jobs:8000"),
        ("http://box/jobs/job-1/report", "http://box"),
        ("http://box/compare?jobs=job-1&jobs=job-2", "http://box"),
        ("http://box/longhaul/?status=failed#top", "http://box/longhaul"),
    ],
)
def test_a_url_without_a_scheme_is_http(given: str, meant: str) -> None:
    assert Longhaul(given).url == meant


@pytest.mark.parametrize("given", ["ftp://box", "http://", ":8000", "box:port", "http:///jobs"])
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is not the URL of a service"):
        Longhaul(given)


def test_what_json_does_not_have_is_refused_here_and_is_no_outage(service: Service) -> None:
    with Longhaul(service.url, service.settings.api_key) as api:
        for ask in (
            lambda: api.generate("job-unknown", {"row": {"note": math.nan}}),
            lambda: api.submit({**TINY, "training": {"learning_rate": math.inf}}),
        ):
            with pytest.raises(ApiError, match="not JSON") as caught:
                ask()
            assert (caught.value.status, caught.value.hint) == (422, "give a finite number or null")


def test_a_row_of_try_may_have_nan_as_pandas_writes_it(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "job-unknown", "--row", '{"note": NaN}']) == 2
    assert "there is no job job-unknown" in capsys.readouterr().err


def test_a_service_without_its_scheme_answers(service: Service) -> None:
    with Longhaul(service.url.removeprefix("http://"), service.settings.api_key) as api:
        assert api.ready()


def test_a_lost_answer_does_not_double_the_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service did it, the answer was lost, the client sends it again under the same key."""
    with Longhaul(service.url, service.settings.api_key) as api:
        session = api._connection.session
        real, lost = session.request, [True]

        def flaky(*arguments: Any, **more: Any) -> requests.Response:
            answer = real(*arguments, **more)
            if lost.pop() if lost else False:
                raise requests.ConnectionError("lost")
            return answer

        monkeypatch.setattr(session, "request", flaky)
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


def test_lists_are_filtered_and_walked_to_the_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.api.PAGE", 2)
    kitchen = [service.submit(metadata={"team": "kitchen", "try": str(number)}) for number in range(5)]
    garden = service.submit(metadata={"team": "garden"})
    service.append(kitchen[0], JobCancelled())
    with Longhaul(service.url, service.settings.api_key) as api:
        assert [job["id"] for job in api.all()] == [garden, *reversed(kitchen)]
        assert [job["id"] for job in api.all(metadata={"team": "kitchen"})] == kitchen[::-1]
        both = {"team": "kitchen", "try": "3"}
        assert [job["id"] for job in api.list(metadata=both)["data"]] == [kitchen[3]]
        assert [job["id"] for job in api.all(status="cancelled")] == kitchen[:1]
        either = api.all(status=("cancelled", "validating"), metadata={"team": "kitchen"})
        assert [job["id"] for job in either] == kitchen[::-1]


def test_a_job_is_moved_cloned_and_deleted(service: Service) -> None:
    first, second = service.submit(), service.submit(metadata={"team": "kitchen"})
    with Longhaul(service.url, service.settings.api_key) as api:
        assert (api.get(first)["queue_position"], api.get(second)["queue_position"]) == (1, 2)
        moved = api.set_priority(second, 5)
        assert (moved["priority"], moved["queue_position"]) == (5, 1)
        assert [event["type"] for event in api.past_events(second)][-1] == "job.priority_changed"

        clone = api.clone(second, {"name": "other", "metadata": None}, idempotency_key="once")
        assert (clone["cloned_from"], clone["name"], clone["metadata"]) == (second, "other", {})
        assert api.clone(second, {"name": "other", "metadata": None}, idempotency_key="once")["id"] == clone["id"]

        with pytest.raises(ApiError) as refused:
            api.delete(second)
        assert refused.value.status == 409
        api.cancel(second)
        assert api.delete(second) == {"id": second, "object": "fine_tuning.job", "deleted": True}
        with pytest.raises(ApiError) as gone:
            api.get(second)
        assert gone.value.status == 404


def test_a_service_that_is_asked_too_much_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was: what was refused for its rate was not done."""
    waits: list[float] = []
    monkeypatch.setattr("longhaul.connection.time.sleep", waits.append)
    with TooMuch(refusals=2) as busy, Longhaul(busy.origin) as api:
        assert api.pause("job-a")["id"] == "job-a"
        assert waits == [7.0, 7.0]
    with TooMuch(refusals=3) as busy, Longhaul(busy.origin) as api:
        with pytest.raises(ApiError, match="slower, please") as refused:
            api.pause("job-a")
        assert (refused.value.status, refused.value.code) == (429, "rate_limited")


def test_a_service_that_recovers_is_asked_again_and_one_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    told: list[str] = []
    monkeypatch.setattr("longhaul.connection.time.sleep", waits.append)
    with TooMuch(2, 503, "recovering") as busy, Longhaul(busy.origin, on_wait=told.append) as api:
        assert api.get("job-a")["id"] == "job-a"
        assert waits == [7.0, 7.0] and told == ["slower, please Trying again in 7 s."] * 2
    with (
        TooMuch(1, 503, "store_unavailable") as busy,
        Longhaul(busy.origin, on_wait=told.append) as api,
        pytest.raises(ApiError),
    ):
        api.list()
    assert len(waits) == len(told) == 2


class TooMuch(FakeServer):
    """A service that refuses so many times."""

    def __init__(self, refusals: int, status: int = 429, code: str = "rate_limited") -> None:
        super().__init__()
        self.refusals, self.status, self.code = refusals, status, code

    def respond(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: bytes
    ) -> Reply:
        if self.refusals:
            self.refusals -= 1
            error = {"type": "rate_limit_error", "code": self.code, "message": "slower, please", "param": None}
            return Reply(self.status, {"error": error}, {"Retry-After": "7"})
        return Reply(200, {"id": "job-a"})


def test_metrics_plan_and_workers(service: Service) -> None:
    job = service.submit()
    service.run(job).metrics_file.write_text(
        "".join(f"{metric_row(step, loss=10 / step).model_dump_json()}\n" for step in range(1, 101))
    )
    with Longhaul(service.url, service.settings.api_key) as api:
        assert [row["step"] for row in api.metrics(job, after_step=97)["data"]] == [98, 99, 100]
        points = api.metrics(job, points=10, fields=("loss", "rows_per_s"))["data"]
        assert len(points) == 10 and points[-1]["step"] == 100
        assert points[0].keys() >= {"step", "at", "loss", "rows_per_s"} and "grad_norm" not in points[0]
        first, last = points[0]["loss"], points[-1]["loss"]
        assert first is not None and last is not None and first > last
        with pytest.raises(ApiError) as missing:
            api.plan(job)
        assert missing.value.code == "no_plan"
        service.store.workers.report(heartbeat("train-0"))
        assert [worker["name"] for worker in api.workers()["data"]] == ["train-0"]
