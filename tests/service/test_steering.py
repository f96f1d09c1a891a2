"""Cancel, pause, resume, prioritise: every state against every wish."""

from __future__ import annotations

import pytest

from jobs.connection import connect
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    Fault,
    JobChecked,
    JobFailed,
    JobPaused,
    JobPrepared,
    JobQueued,
    JobRequested,
    JobSucceeded,
    JobValidated,
)
from jobs.queue import Tickets
from jobs.state import Stage
from tests.service.running import Service

QUEUED: list[AnyFact] = [JobChecked(plan={}), JobPrepared(data={}, steps=10), JobQueued()]
RUNNING: list[AnyFact] = [*QUEUED, AttemptStarted(worker="w", device="cpu")]
DONE: list[AnyFact] = [*RUNNING, AttemptEnded(reason="done", step=10)]
STATES: dict[str, list[AnyFact]] = {
    "validating": [],
    "queued": QUEUED,
    "running": RUNNING,
    "pausing": [*RUNNING, JobRequested(request="pause")],
    "cancelling": [*RUNNING, JobRequested(request="cancel")],
    "paused": [*QUEUED, JobPaused()],
    "succeeded": [*DONE, JobSucceeded(model="model", step=10, loss=1.0)],
    "failed": [JobFailed(error=Fault(code="bad_data", message="m", hint="h"))],
    "validated": [JobChecked(plan={}), JobValidated()],
}
# state, wish → status code, then the state after it (status/request)
TABLE = {
    ("validating", "cancel"): (200, "cancelled/none"),
    ("queued", "cancel"): (200, "cancelled/none"),
    ("running", "cancel"): (200, "running/cancel"),
    ("pausing", "cancel"): (200, "running/cancel"),
    ("cancelling", "cancel"): (200, "running/cancel"),
    ("paused", "cancel"): (200, "cancelled/none"),
    ("succeeded", "cancel"): (409, "succeeded/none"),
    ("failed", "cancel"): (409, "failed/none"),
    ("validated", "cancel"): (409, "validated/none"),
    ("validating", "pause"): (409, "validating/none"),
    ("queued", "pause"): (200, "paused/none"),
    ("running", "pause"): (200, "running/pause"),
    ("pausing", "pause"): (200, "running/pause"),
    ("cancelling", "pause"): (409, "running/cancel"),
    ("paused", "pause"): (200, "paused/none"),
    ("succeeded", "pause"): (409, "succeeded/none"),
    ("validating", "resume"): (409, "validating/none"),
    ("queued", "resume"): (409, "queued/none"),
    ("running", "resume"): (409, "running/none"),
    ("pausing", "resume"): (200, "running/none"),
    ("cancelling", "resume"): (409, "running/cancel"),
    ("paused", "resume"): (200, "queued/none"),
    ("failed", "resume"): (409, "failed/none"),
}


@pytest.mark.parametrize("wish", ["cancel", "pause", "resume"])
def test_every_state_against_every_wish(service: Service, wish: str) -> None:
    for state, facts in STATES.items():
        if (state, wish) not in TABLE:
            continue
        job = service.submit()
        for fact in facts:
            service.append(job, fact)
        before = len(service.run(job).events())
        answer = service.post(f"/jobs/{job}/{wish}")
        expected_code, expected = TABLE[state, wish]
        assert answer.status_code == expected_code, (state, wish, answer.text)
        shown = service.get(f"/jobs/{job}").json()
        assert f"{shown['status']}/{shown['request']}" == expected, (state, wish)
        if expected_code == 200:
            assert answer.json()["status"] == shown["status"]
        else:
            assert answer.json()["error"]["type"] == "conflict_error"
            assert len(service.run(job).events()) == before
        request_file = service.run(job).request_file
        wanted = expected.partition("/")[2]
        assert (request_file.read_text().strip() if request_file.exists() else "none") == wanted


def test_a_repeated_wish_adds_no_event(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    for _ in range(3):
        assert service.post(f"/jobs/{job}/cancel").status_code == 200
    assert [event.type for event in service.run(job).events()].count("job.requested") == 1


def test_a_paused_job_leaves_the_order_and_a_resumed_one_takes_its_old_place(service: Service) -> None:
    first, second = service.submit(), service.submit()
    for job in (first, second):
        service.append(job, *QUEUED)
    service.post(f"/jobs/{first}/pause")
    assert service.get(f"/jobs/{first}").json()["position"] is None
    assert service.get(f"/jobs/{second}").json()["position"] == 0
    tickets = Tickets(connect(service.settings.redis_url))
    before = tickets.count(Stage.TRAIN)
    assert service.post(f"/jobs/{first}/resume").json()["position"] == 0
    assert service.get(f"/jobs/{second}").json()["position"] == 1
    assert tickets.count(Stage.TRAIN) == before + 1


def test_the_priority_of_every_job_that_has_not_ended_can_be_changed(service: Service) -> None:
    for state, facts in STATES.items():
        job = service.submit(priority=1)
        for fact in facts:
            service.append(job, fact)
        before = service.run(job).events()
        answers = [service.request("PATCH", f"/jobs/{job}", json={"priority": -7}) for _ in range(2)]
        shown = service.get(f"/jobs/{job}").json()
        since = service.run(job).events()[len(before) :]
        if state in ("succeeded", "failed", "validated"):
            assert ([answer.status_code for answer in answers], shown["priority"], since) == ([409, 409], 1, []), state
            continue
        assert [answer.json()["priority"] for answer in answers] == [-7, -7] == [shown["priority"]] * 2, state
        assert [event.type for event in since] == ["job.prioritised"], "once"
        event = service.get(f"/jobs/{job}/events").json()["data"][-1]
        assert (event["message"], event["data"]) == ("priority -7 from now on", {"priority": -7})


def test_a_new_priority_is_a_new_place_in_the_order_of_any_stage(service: Service) -> None:
    jobs = [service.submit() for _ in range(3)]
    for facts in ([], QUEUED):
        for job in jobs:
            service.append(job, *facts)
        service.request("PATCH", f"/jobs/{jobs[2]}", json={"priority": 2})
        assert [service.get(f"/jobs/{job}").json()["position"] for job in jobs] == [1, 2, 0]
        service.request("PATCH", f"/jobs/{jobs[2]}", json={"priority": 0})
        assert [service.get(f"/jobs/{job}").json()["position"] for job in jobs] == [0, 1, 2], "its time still counts"


BAD_CHANGES: list[tuple[object, str | None]] = [
    ({}, "priority"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": "1"}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": None}, "priority"),
    ({"priority": 1, "name": "x"}, "name"),
    ([], None),
]


def test_a_change_that_cannot_be_made_is_refused_by_name(service: Service) -> None:
    job = service.submit()
    for body, param in BAD_CHANGES:
        answer = service.request("PATCH", f"/jobs/{job}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), body
    assert len(service.run(job).events()) == 1


def test_a_failed_job_shows_cause_and_hint(service: Service) -> None:
    job = service.submit()
    service.append(job, *STATES["failed"])
    error = service.get(f"/jobs/{job}").json()["error"]
    assert error == {"code": "bad_data", "message": "m", "hint": "h", "param": None}


@pytest.mark.parametrize("wish", ["", "/cancel", "/clone", "/events", "/metrics", "/logs"])
def test_an_unknown_job_is_404(service: Service, wish: str) -> None:
    method = "POST" if wish in ("/cancel", "/clone") else "GET"
    for job in ("job-unknown", "tmp-job-1", "%2e%2e", "..%2f..%2fetc", "job-A", "x" * 300, "job-%00"):
        answer = service.request(method, f"/jobs/{job}{wish}")
        assert answer.status_code == 404, job
        assert set(answer.json()["error"]) == {"type", "code", "message", "param"}
