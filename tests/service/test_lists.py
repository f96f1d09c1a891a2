"""GET /jobs with filters and cursors."""

from __future__ import annotations

import time
from typing import Any

from jobs.errors import Damaged
from jobs.events import AttemptStarted, JobQueued
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.trainer_facts import DiskLow
from tests.service.running import TINY, Service
from tests.service.scraping import figure, scrape
from tests.service.seeded import STARTED, leave_behind, train
from tests.support.samples import checked, heartbeat, metric_row, prepared, time_summary
from worker.reconcile import Reconciler


def ids(service: Service, query: str) -> list[str]:
    answer = service.get(f"/jobs?{query}")
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


def test_filters_can_be_combined_and_repeated_and_outlive_a_wiped_redis(service: Service) -> None:
    cake = service.submit(metadata={"team": "kitchen", "what is it?": "a & b"})
    bread = service.submit(metadata={"team": "bakery"})
    other = service.submit()
    dry = str(service.post("/jobs", params={"dry_run": True}, json=TINY).json()["id"])
    service.post(f"/jobs/{bread}/cancel")
    table = {
        "": [other, bread, cake],
        "dry_runs=true": [dry, other, bread, cake],
        "dry_run=false": [other, bread, cake],
        "dry_run=true": [dry],
        "status=validated&status=validating": [dry, other, cake],
        f"dry_run=false&limit=1&after={dry}": [other],
        "dry_run=true&metadata[team]=kitchen": [],
        "status=cancelled": [bread],
        "dry_run=false&status=cancelled&status=validating": [other, bread, cake],
        "metadata[team]=kitchen": [cake],
        "metadata%5Bteam%5D=kitchen&metadata[team]=bakery": [bread, cake],
        "metadata[team]=kitchen&metadata[what is it?]=a%20%26%20b": [cake],
        "metadata[team]=bakery&status=validating": [],
        "metadata[nobody]=has": [],
        f"status=validating&after={bread}": [cake],
        f"status=validating&limit=1&after={other}": [cake],
        f"after={cake}": [],
    }
    assert {query: ids(service, query) for query in table} == table
    client = connect(service.settings.redis_url)
    client.flushall()
    Reconciler(service.settings.runs, Store(client), Tickets(client)).run_once()
    assert {query: ids(service, query) for query in table} == table
    page = service.get("/jobs?limit=2&dry_runs=true").json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (dry, other, True)


BAD = [
    ("after=job-unknown", 404, None),
    ("after=%00", 404, None),
    ("status=queued&status=asleep", 422, "status"),
    ("metadata[]=x", 422, "metadata"),
    ("metadata=x", 422, "metadata"),
    ("metadata[a=x", 422, "metadata"),
    ("metadata[" + "k" * 65 + "]=x", 422, "metadata"),
    ("metadata[k]=" + "x" * 513, 422, "metadata"),
    ("&".join(f"metadata[k]={n}" for n in range(17)), 422, "metadata"),
]


def test_what_cannot_be_listed_is_refused_by_name(service: Service) -> None:
    for query, status, param in BAD:
        answer = service.get(f"/jobs?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), query


def test_a_waiting_job_says_when_its_turn_comes_and_when_it_is_done(service: Service) -> None:
    service.store.workers.report(heartbeat("train-0"))
    queued = (checked(), prepared(9, time=time_summary(hours_expected=0.5)), JobQueued())
    busy, waits = service.submit(), service.submit()
    for job in (busy, waits):
        service.append(job, *queued)
    record = service.append(busy, AttemptStarted(worker="t", device="cpu"))
    row = metric_row(5, at=(record.attempt_started_at or 0) + 100, eta_s=1000.0)
    service.store.set_latest(busy, row)
    running, waiting = (service.get(f"/jobs/{job}").json() for job in (busy, waits))
    assert (running["estimated_start"], running["estimated_finish"]) == (None, int(row.at + 1000))
    assert waiting["queue_position"] == 1
    assert 0 <= waiting["estimated_start"] - running["estimated_finish"] <= 1
    assert waiting["estimated_finish"] - waiting["estimated_start"] == 1800
    assert service.get("/jobs").json()["data"][0] == waiting


def test_jobs_that_were_listed_before_are_listed_as_they_are_now(service: Service) -> None:
    """Everything that an answer is made of: events, rows of metrics, the order, the workers, damage."""
    waits, job = service.submit(), service.submit()
    for each in (waits, job):
        service.append(each, checked(), prepared(9, time=time_summary(hours_expected=0.5)), JobQueued())

    def listed() -> dict[str, Any]:
        while True:  # an estimate of "now", as behind a job that is asked to pause, changes with the second
            second = int(time.time())
            first, again = (service.get("/jobs").json()["data"] for _ in range(2))
            alone = [service.get(f"/jobs/{each}").json() for each in (job, waits)]
            if int(time.time()) == second:
                assert first == again == alone
                return {each["id"]: each for each in first}

    before = listed()
    assert (before[waits]["queue_position"], before[job]["queue_position"]) == (1, 2)
    service.request("PATCH", f"/jobs/{job}", json={"priority": 5})
    assert listed()[waits] == before[waits] | {"queue_position": 2}, "nothing happened to it but its place"
    assert (listed()[job]["priority"], listed()[job]["queue_position"]) == (5, 1)
    record = service.append(job, STARTED)
    assert listed()[job]["status"] == "running" and listed()[job]["progress"]["step"] == 0
    for step in (3, 4):
        row = metric_row(step, at=(record.attempt_started_at or 0) + step, eta_s=1000.0)
        service.store.set_latest(job, row)
        assert listed()[job]["progress"]["step"] == step
        assert listed()[job]["estimated_finish"] == int(row.at + 1000)
    assert listed()[waits]["estimated_start"] == int(row.at + 1000)
    service.append(job, DiskLow(step=4, free_bytes=1, needed_bytes=2), attempt=1)
    assert listed()[job]["event_number"] == record.number + 1
    service.post(f"/jobs/{job}/pause")
    assert listed()[job]["requested"] == "pause"
    service.store.mark_damaged(service.run(job), Damaged("events.jsonl is damaged"))
    assert listed()[job]["status"] == "damaged"
    service.store.clear_damage(job, reproject=True)
    assert listed()[job]["status"] == "running" and listed()[job]["error"] is None


def test_while_redis_is_rebuilt_lists_say_so_and_a_job_is_read_from_its_directory(service: Service) -> None:
    job = service.submit()
    train(service, job)
    service.append(job, STARTED)
    leave_behind(service.run(job))
    before = service.get(f"/jobs/{job}").json(), service.get(f"/jobs/{job}/events").json()
    service.request("PUT", "/datasets/unused.jsonl", data=b"{}")
    client = connect(service.settings.redis_url)
    client.flushall()
    other = service.submit()
    for method, path in (("GET", "/jobs"), ("GET", "/jobs?status=running"), ("DELETE", "/datasets/unused.jsonl")):
        answer = service.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "recovering"), path
        assert int(answer.headers["Retry-After"]) > 0
    figures = scrape(service)
    assert (figure(figures, "redis_up"), figure(figures, "redis_recovering")) == (1, 1)
    assert figure(figures, "jobs", status="validating") is None, "some are not all"
    now = service.get(f"/jobs/{job}").json()
    assert now["progress"]["step"] == 20 and now["status"] == "running"
    assert {**now, "progress": None, "estimated_finish": None} == {
        **before[0], "progress": None, "estimated_finish": None
    }  # fmt: skip
    assert service.get(f"/jobs/{job}/events").json() == before[1]
    assert len(service.get(f"/jobs/{job}/metrics").json()["data"]) == 10
    assert service.get(f"/jobs/{other}").json()["queue_position"] is None
    Reconciler(service.settings.runs, service.store, Tickets(client)).run_once()
    assert {each["id"] for each in service.get("/jobs").json()["data"]} == {job, other}
    assert figure(scrape(service), "redis_recovering") == 0


def test_a_record_of_another_version_costs_no_other_job_its_answer(service: Service) -> None:
    whole, other = service.submit(), service.submit()
    client = connect(service.settings.redis_url)
    record = client.hget(f"longhaul:job:{other}", "record")
    assert isinstance(record, bytes)
    client.hset(f"longhaul:job:{other}", "record", record.replace(b'"number"', b'"of_the_future":1,"number"', 1))
    shown = {job["id"]: job for job in service.get("/jobs").json()["data"]}
    assert shown[whole]["status"] == "validating" and shown[whole]["error"] is None
    assert shown[other]["status"] == "damaged" and shown[other]["error"]["code"] == "unreadable_record"
    assert service.get(f"/jobs/{other}").json() == shown[other]
