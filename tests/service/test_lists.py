"""GET /jobs with filters and cursors."""

from __future__ import annotations

from jobs.connection import connect
from jobs.events import AttemptStarted, JobChecked, JobPrepared, JobQueued
from jobs.metrics import MetricRow
from jobs.queue import Tickets
from jobs.store import Store
from tests.jobs.test_queries import ROW
from tests.service.running import Service
from worker.reconcile import Reconciler


def ids(service: Service, query: str) -> list[str]:
    answer = service.get(f"/jobs?{query}")
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


def test_filters_can_be_combined_and_repeated_and_outlive_a_wiped_redis(service: Service) -> None:
    cake = service.submit(metadata={"team": "kitchen", "what is it?": "a & b"})
    bread = service.submit(metadata={"team": "bakery"})
    other = service.submit()
    service.post(f"/jobs/{bread}/cancel")
    table = {
        "": [other, bread, cake],
        "status=cancelled": [bread],
        "status=cancelled&status=validating": [other, bread, cake],
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
    Reconciler(service.settings.runs, Store(client), Tickets(client)).once()
    assert {query: ids(service, query) for query in table} == table
    page = service.get("/jobs?limit=2").json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (other, bread, True)


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
    service.store.workers.report({"name": "t", "stage": "train", "healthy": True, "why": None})
    queued = (JobChecked(plan={}), JobPrepared(data={}, steps=9, time={"hours_expected": 0.5}), JobQueued())
    busy, waits = service.submit(), service.submit()
    for job in (busy, waits):
        service.append(job, *queued)
    record = service.append(busy, AttemptStarted(worker="t", device="cpu"))
    row: MetricRow = ROW.model_copy(update={"at": (record.attempt_started_at or 0) + 100, "eta_s": 1000.0})
    service.store.set_latest(busy, row)
    running, waiting = (service.get(f"/jobs/{job}").json() for job in (busy, waits))
    assert (running["estimated_start"], running["estimated_finish"]) == (None, int(row.at + 1000))
    assert waiting["position"] == 0
    assert 0 <= waiting["estimated_start"] - running["estimated_finish"] <= 1
    assert waiting["estimated_finish"] - waiting["estimated_start"] == 1800
    assert service.get("/jobs").json()["data"][0] == waiting
