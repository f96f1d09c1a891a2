"""`/workers`: who works here, on what, and how lately it was heard of."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from jobs.events import JobQueued
from jobs.heartbeat import WorkerHeartbeat
from jobs.redis.workers import lease_token
from jobs.state import Stage
from tests.service.running import TINY, Service
from tests.support.samples import checked, prepared

TRAIN_0: dict[str, Any] = {
    "name": "train-0", "pid": 7, "stage": "train", "queue": "longhaul-train", "healthy": True, "why": None,
    "busy": True, "device": "cuda", "versions": {"torch": "2.13.0"},
    "gpu": {"uuid": "GPU-1", "name": "NVIDIA H200", "memory_bytes": 2**37, "driver": "580.1"},
}  # fmt: skip


def test_a_worker_is_shown_with_its_gpu_and_the_job_in_hand(service: Service) -> None:
    job = service.submit()
    service.append(job, checked(), prepared(9), JobQueued())
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0))
    assert service.store.claim(Stage.TRAIN, lease_token("train-0")) == job
    answer = service.get("/workers").json()
    assert (answer["object"], answer["has_more"]) == ("list", False)
    (shown,) = answer["data"]
    assert shown["job"] == job
    assert abs(shown.pop("job_since") - time.time()) < 60
    assert abs(shown.pop("last_seen_at") - time.time()) < 60
    assert 0 <= shown.pop("heartbeat_age_s") < 60
    assert shown == TRAIN_0 | {"job": job}


def test_the_page_shows_a_gpu_with_its_slots(service: Service) -> None:
    for slot in range(3):
        name = f"train-box-{slot}-abc"
        service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | {"name": name, "slot": slot, "busy": slot == 1}))
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | {"name": "train-box-9-abc", "gpu": None, "slot": 0}))
    page = service.get("/workers", headers={"Accept": "text/html"}).text
    assert page.count("<article") == 2 and page.count("3 slots") == page.count("GPU-1,") == 1
    assert [each.get("slot") for each in service.get("/workers").json()["data"]] == [0, 1, 2, 0]


def test_the_page_warns_of_a_box_whose_clock_or_version_differs(service: Service) -> None:
    other = {"name": "train-gpu2-7-abc", "box": "gpu2", "clock_ahead_s": -3600.0, "versions": {"longhaul": "1.0.0"}}
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | other))
    page = service.get("/workers", headers={"Accept": "text/html"}).text
    assert "its clock is 1 h behind that of Redis" in page and "it is of Longhaul" not in page
    publish = {"name": "publish-main-8-abc", "stage": "publish", "gpu": None, "versions": {"longhaul": "1.1.0"}}
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | publish))
    page = service.get("/workers", headers={"Accept": "text/html"}).text
    assert page.count("it is of Longhaul 1.0.0, and publish of 1.1.0: update that box") == 1


def test_the_places_of_an_engine_are_told_apart_and_a_job_sees_those_of_its_own(service: Service) -> None:
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0))
    for place in range(2):
        gpu = {"uuid": f"cluster/{place}", "name": "NVIDIA L4", "memory_bytes": 2**34, "driver": ""}
        more = {"name": f"train-box-{place}-abc", "slot": 0, "engine": "cluster", "gpu": gpu}
        service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | more))
    page = service.get("/workers", headers={"Accept": "text/html"}).text
    assert page.count("<article") == 3 and page.count("at most, on the engine cluster") == 2
    assert page.count("driver") == 1, "of its GPUs nothing more is known"
    jobs = {
        engine: service.get(f"/jobs/{service.submit(resources={'engine': engine})}").json()
        for engine in (None, "cluster", "cloud")
    }
    assert {engine: [gpu["name"] for gpu in job["gpus"]] for engine, job in jobs.items()} == {
        None: ["NVIDIA H200"], "cluster": ["NVIDIA L4"], "cloud": [],
    }  # fmt: skip
    assert [job["engine"] for job in jobs.values()] == [None, "cluster", "cloud"]
    assert "the job is for the engine cloud, and a worker" in jobs["cloud"]["waiting_reason"]
    assert jobs["cluster"]["waiting_reason"] is None


def test_a_job_says_behind_which_other_it_waits_to_be_checked(service: Service) -> None:
    first, second = service.submit(), service.submit()
    assert service.store.claim(Stage.CHECK, lease_token("check-a")) == first

    def reasons() -> list[str | None]:
        return [service.get(f"/jobs/{job}").json()["waiting_reason"] for job in (first, second)]

    assert reasons() == [None, None], "for less than a minute"
    client = redis.Redis.from_url(service.settings.redis_url)
    client.hset(f"longhaul:job:{first}", "lease", f"check-a/{int(time.time()) - 200}/abc")
    why = f"job {first} is before it, in check for 3 min"
    assert reasons() == [None, why]
    assert why[1:] in service.get(f"/jobs/{second}", headers={"Accept": "text/html"}).text


@pytest.mark.parametrize("junk", [
    b"", b"\xff\xfe", b"not json", b"[1]", b'"train-1"', b"{}", b"[" * 100_000,
    *(b'{"name": "train-1", "stage": "train", "healthy": true, "why": %s}' % why
      for why in (b"NaN", b"1e999", b'"\\ud800"', b"7")),
    b'{"name": "train-1", "stage": "train", "healthy": true, "why": null, "gpu": {"name": "H200"}}',
    b'{"name": "publish", "stage": "publish", "healthy": true, "why": null, "sinks": {"log": {"jobs_behind": "x"}}}',
])  # fmt: skip
def test_what_is_no_heartbeat_is_passed_over(service: Service, caplog: pytest.LogCaptureFixture, junk: bytes) -> None:
    client = redis.Redis.from_url(service.settings.redis_url)
    for name in ("train-0", "train-1", "train-2"):
        service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | {"name": name}))
    client.set("longhaul:worker:train-1", junk)
    client.delete("longhaul:worker:train-2")
    client.hset("longhaul:worker:train-2", "not", "a string")
    answer = service.get("/workers")
    assert (answer.status_code, [each["name"] for each in answer.json()["data"]]) == (200, ["train-0"])
    passed_over = [record.getMessage() for record in caplog.records if record.name == "longhaul.workers"]
    assert [line[:10] for line in passed_over] == ["'train-1' ", "'train-2' "]


def test_a_job_says_which_gpus_can_take_it_and_at_once_if_none_can(service: Service) -> None:
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0))
    small = {"uuid": "GPU-0", "name": "NVIDIA L4", "memory_bytes": 23_034 * 2**20, "driver": "580.1"}
    service.store.workers.report(WorkerHeartbeat(**TRAIN_0 | {"name": "train-1", "gpu": small}))
    job = service.submit(resources={"gpu_memory_gib": 24})
    shown = service.get(f"/jobs/{job}").json()
    lacks = "NVIDIA L4 has 23.0 GiB, and resources.gpu_memory_gib asks for 24.0 GiB"
    assert shown["waiting_reason"] is None
    assert [(gpu["uuid"], gpu["can_take"], gpu["why"]) for gpu in shown["gpus"]] == [
        ("GPU-0", False, lacks), ("GPU-1", True, None),
    ]  # fmt: skip
    none = service.post("/jobs", json={**TINY, "resources": {"gpu_name": "B200"}}).json()
    assert none["status"] == "validating" and [gpu["can_take"] for gpu in none["gpus"]] == [False, False]
    assert none["waiting_reason"] == "no GPU here can take the job: NVIDIA H200 is not 'B200'; NVIDIA L4 is not 'B200'"
    assert [each["waiting_reason"] for each in service.get("/jobs").json()["data"]] == [none["waiting_reason"], None]
    service.store.workers.forget("train-1")
    assert [gpu["uuid"] for gpu in service.get(f"/jobs/{job}").json()["gpus"]] == ["GPU-1"], "never out of date"
    ended = service.post(f"/jobs/{none['id']}/cancel").json()
    assert (ended["waiting_reason"], ended["gpus"]) == (None, [])
