"""POST /jobs: what is accepted, what is refused, and that nothing is lost or doubled."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import Conflict, StoreUnavailable
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store, make_id
from jobs.state import Stage
from service.jobs.submissions import Submissions
from tests.service.running import TINY, Service, running
from tests.support.redis_server import RedisServer


def test_a_job_is_on_disk_in_redis_and_has_a_ticket(service: Service) -> None:
    answer = service.post("/jobs", json={**TINY, "priority": 3, "metadata": {"team": "kitchen"}})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["Location"] == f"/jobs/{job['id']}"
    assert job["status"] == "validating"
    assert job["stage"] == "check"
    assert job["queue_position"] == 1
    assert job["training_file"] == "rows.jsonl"
    assert job["run_dir"] == f"runs/{job['id']}"
    assert job["metadata"] == {"team": "kitchen"}
    run = service.run(job["id"])
    assert [event.type for event in run.events()] == ["job.submitted"]
    assert run.spec().priority == 3
    assert service.store.waiting(Stage.CHECK) == 1
    assert Tickets(connect(service.settings.redis_url)).count(Stage.CHECK) == 1
    assert service.get(f"/jobs/{job['id']}").json() == job


def test_the_shape_of_a_job_has_all_that_openai_requires(service: Service) -> None:
    job = service.get(f"/jobs/{service.submit()}").json()
    required = {
        "created_at", "error", "finished_at", "fine_tuned_model", "hyperparameters", "id", "model", "object",
        "organization_id", "result_files", "status", "trained_tokens", "training_file", "validation_file", "seed",
    }  # fmt: skip
    assert required <= set(job)
    assert job["object"] == "fine_tuning.job"
    assert isinstance(job["created_at"], int)


BAD: list[tuple[str, Any, str | None, str]] = [
    ("unknown key", {**TINY, "epochs": 3}, "epochs", "unknown key"),
    ("a list", [], None, "a job is a JSON object"),
    ("outside, relative", {**TINY, "data": {"train": "../rows.jsonl"}}, "data.train", "outside the data directory"),
    ("outside, absolute", {**TINY, "data": {"train": "/etc/rows.jsonl"}}, "data.train", "outside the data directory"),
    ("outside, sibling", {**TINY, "data": {"train": "../data2/rows.jsonl"}}, "data.train", "outside"),
    (
        "validation outside",
        {**TINY, "data": {"train": "rows.jsonl", "validation": "a/../../v.jsonl"}},
        "data.validation",
        "outside",
    ),
    ("NUL in a path", {**TINY, "data": {"train": "rows\0.jsonl"}}, "data.train", "control character"),
    ("the name of the newest", {**TINY, "name": "last"}, "name", "means the newest one"),
    ("the name of an id", {**TINY, "name": "job-01m8eekagsbsdgymbjnd"}, "name", "means an id"),
    ("model outside", {**TINY, "model": "./../model"}, "model", "outside the data directory"),
]


@pytest.mark.parametrize(("body", "param", "part"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_jobs_are_refused_by_name(service: Service, body: Any, param: str | None, part: str) -> None:
    answer = service.post("/jobs", json=body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert part in error["message"]
    assert list(service.settings.runs.iterdir()) == []


def test_an_absolute_path_inside_the_data_directory_is_fine(service: Service) -> None:
    service.submit(data={"train": str(service.settings.data / "rows.jsonl")})


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "not JSON"),
        (b'{"data": ', "line 1, column 10"),
        (b'{"data": {"train": "a.jsonl"}, "data": {"train": "b.jsonl"}}', "given twice"),
        (b'{"data": {"train": "a.jsonl"}, "priority": NaN}', "NaN is not JSON"),
        (b'{"name": "\xff"}', "Unicode"),
        (b'{"name": "\\ud800"}', "Unicode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"priority": ' + b"9" * 5000 + b"}", "cannot be used|can be used"),
    ],
)
def test_bad_json_is_refused(service: Service, raw: bytes, part: str) -> None:
    answer = service.post("/jobs", data=raw)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "invalid_json"
    assert any(each in error["message"] for each in part.split("|"))


def test_a_body_beyond_the_limit_is_refused(service: Service) -> None:
    answer = service.post("/jobs", data=json.dumps({**TINY, "name": "x" * 2**20}))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_key_stands_for_one_job(service: Service) -> None:
    def post(body: dict[str, Any], **params: str) -> Any:
        return service.post("/jobs", json=body, headers={"Idempotency-Key": "monday"}, params=params)

    first = post(TINY)
    again = post(TINY)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    reordered = dict(reversed(TINY.items()))
    assert post(reordered).json()["id"] == first.json()["id"]
    for other in (post({**TINY, "name": "other"}), post(TINY, dry_run="true")):
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "conflict"
    assert [run.name for run in service.settings.runs.iterdir()] == [first.json()["id"]]
    event = service.run(first.json()["id"]).record()
    assert event.idempotency_key == "monday"


def test_fifty_submissions_with_one_key_at_once_make_one_job(service: Service) -> None:
    def post(_: int) -> tuple[int, str]:
        answer = service.post("/jobs", json=TINY, headers={"Idempotency-Key": "rush"})
        return answer.status_code, answer.json()["id"]

    with ThreadPoolExecutor(50) as pool:
        answers = set(pool.map(post, range(50)))
    assert len(answers) == 1
    (status, job) = answers.pop()
    assert status == 202
    assert [run.name for run in service.settings.runs.iterdir()] == [job]
    assert [event.number for event in service.run(job).events()] == [1]
    assert Tickets(connect(service.settings.redis_url)).count(Stage.CHECK) == 1


def test_a_submission_that_died_after_its_reservation_is_completed_by_the_next(service: Service) -> None:
    """The first one reserved the key and its process was killed: the same id comes to life."""
    _reserved_by_a_dead_one(service)
    job = service.post("/jobs", json=TINY, headers={"Idempotency-Key": "half"}).json()
    assert job["id"] == "job-halfmade"
    assert service.run("job-halfmade").exists()


def test_without_redis_nothing_is_on_disk(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, running(redis.url, tmp_path) as service:
        job = service.submit()
        redis.stop()
        answer = service.post("/jobs", json=TINY)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["type"] == "unavailable_error"
        assert str(redis.port) not in answer.text
        assert [run.name for run in service.settings.runs.iterdir()] == [job]
        assert service.get(f"/jobs/{job}").status_code == 503
        redis.start()
        assert service.post("/jobs", json=TINY).status_code == 202


def test_redis_lost_after_the_reservation_still_accepts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last write fails: the job is on disk, so it is accepted, shown, and completed by reconcile."""

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("Redis does not answer: test")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "project", away)
        job = service.submit()
    assert service.store.number(job) == 0
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["status"], shown["training_file"]) == ("validating", "rows.jsonl")
    run = service.run(job)
    service.store.project(run, run.record(), run.events())  # what reconcile does
    assert service.get(f"/jobs/{job}").json()["queue_position"] == 1


def test_ids_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for milliseconds in (1, 2, 1_700_000_000_000, 1_700_000_000_001, 2**48 - 1):
        monkeypatch.setattr("time.time_ns", lambda ms=milliseconds: ms * 1_000_000)
        ids.append(make_id())
    assert ids == sorted(ids)
    assert {len(each) for each in ids} == {24}


def _reserved_by_a_dead_one(service: Service) -> None:
    """Reserve as a submission of TINY under the key `half` does, and stop there."""
    settings = service.settings

    class Dying(Store):
        def reserve(self, key: str, job: str, body_sha256: str, **_: object) -> tuple[str, str]:
            service.store.reserve(key, "job-halfmade", body_sha256)
            raise Conflict("killed here")

    client = connect(settings.redis_url)
    submissions = Submissions(
        runs=settings.runs, data=settings.data, uploads=settings.uploads, store=Dying(client), tickets=Tickets(client)
    )
    with pytest.raises(Conflict, match="killed here"):
        submissions.submit(TINY, key="half", dry_run=False)
