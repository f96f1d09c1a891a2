"""DELETE /jobs/{job}: an ended job goes, with its files and all that Redis has of it."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import requests

from jobs.errors import StoreUnavailable
from jobs.events import JobFailed
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.state import Stage
from jobs.trainer_facts import Fault
from tests.service.running import TINY, Service, running
from tests.support.redis_server import RedisServer
from tests.support.samples import STATES
from worker.reconcile import Reconciler


def test_only_an_ended_job_is_deleted(service: Service) -> None:
    for state, facts in STATES.items():
        job = service.submit(metadata={"state": state})
        for fact in facts:
            service.append(job, fact)
        answer = service.request("DELETE", f"/jobs/{job}")
        if state in ("succeeded", "failed", "validated"):
            assert_gone(service, job, answer)
            assert service.get(f"/jobs?metadata[state]={state}").json()["data"] == []
        else:
            assert answer.status_code == 409 and "cancel it first" in answer.json()["error"]["message"], state
            assert service.get(f"/jobs/{job}").status_code == 200 and service.run(job).exists()
    assert not [run.name for run in service.settings.runs.iterdir() if run.name.startswith("tmp-")]


def assert_gone(service: Service, job: str, answer: requests.Response) -> None:
    assert (answer.status_code, answer.json()) == (200, {"id": job, "object": "fine_tuning.job", "deleted": True})
    assert not service.run(job).path.exists()
    for method, path in (("DELETE", ""), ("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/clone")):
        assert service.request(method, f"/jobs/{job}{path}").status_code == 404


def test_a_deleted_job_frees_its_idempotency_key(service: Service) -> None:
    def post(body: dict[str, object]) -> str:
        answer = service.post("/jobs", json=body, headers={"Idempotency-Key": "monday"})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    first = post(TINY)
    service.post(f"/jobs/{first}/cancel")
    assert service.request("DELETE", f"/jobs/{first}").status_code == 200
    assert post({**TINY, "name": "other"}) != first


def test_a_job_that_a_trainer_or_a_worker_still_holds_is_kept(service: Service) -> None:
    job = service.submit()
    assert service.store.claim(Stage.CHECK, "t") == job
    service.post(f"/jobs/{job}/cancel")
    assert service.request("DELETE", f"/jobs/{job}").status_code == 409
    service.store.release(job, "t")
    with open(service.run(job).lock_file, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = service.request("DELETE", f"/jobs/{job}")
        assert (answer.status_code, "trainer" in answer.text) == (409, True)
    assert service.request("DELETE", f"/jobs/{job}").status_code == 200


def test_a_deletion_that_died_half_way_is_completed_by_reconcile(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before Redis was told, and before the folder was removed; and nobody takes what is left for a job."""

    def away(*_: object) -> None:
        raise StoreUnavailable("Redis does not answer: test")

    job = service.submit()
    service.append(job, JobFailed(error=Fault(code="c", message="m")))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "forget", away)
        patch.setattr("service.jobs.actions.remove", lambda folder: None)
        assert service.request("DELETE", f"/jobs/{job}").status_code == 200
    (left,) = service.settings.runs.iterdir()
    assert left.name.startswith(f"tmp-deleted-{job}-") and (left / "events.jsonl").exists()
    client = connect(service.settings.redis_url)
    Reconciler(service.settings.runs, Store(client), Tickets(client)).run_once()
    assert [file.name for file in service.settings.runs.iterdir()] == [".locks"], "the id of the runs directory"
    assert service.get(f"/jobs/{job}").status_code == 404
    assert client.keys(f"*{job}*") == []


def test_without_redis_nothing_is_deleted(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, running(redis.url, tmp_path) as service:
        job = service.submit()
        service.append(job, JobFailed(error=Fault(code="c", message="m")))
        redis.stop()
        assert service.request("DELETE", f"/jobs/{job}").status_code == 503
        assert service.run(job).exists()
