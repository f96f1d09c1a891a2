"""Cancel, pause, resume, prioritise: every state against every wish."""

from __future__ import annotations

import pytest

from jobs.events import AttemptEnded, JobCancelled, JobPaused, JobResumed
from jobs.redis.connection import Tickets, connect
from jobs.state import Stage
from jobs.trainer_facts import CheckpointSaved, Fault
from tests.service.running import Service
from tests.support.machine import longest_file
from tests.support.samples import QUEUED, RUNNING, STATES, facts_of, metric_row
from worker.reconcile import Reconciler

ROW = metric_row(4)
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
        assert f"{shown['status']}/{shown['requested']}" == expected, (state, wish)
        if expected_code == 200:
            assert answer.json()["status"] == shown["status"]
        else:
            assert answer.json()["error"]["type"] == "conflict_error"
            assert len(service.run(job).events()) == before
        assert service.run(job).record().requested == expected.partition("/")[2]


FAULT = Fault(code="no_valid_checkpoint", message="checkpoints/step-00000004 is gone", hint="bring it back")


def test_a_job_that_paused_by_itself_says_why_until_it_is_resumed(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING, AttemptEnded(reason="no_valid_checkpoint", error=FAULT), JobPaused(error=FAULT))
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["status"], shown["error"]) == ("paused", FAULT.model_dump())
    assert service.get("/jobs").json()["data"][0]["error"]["code"] == "no_valid_checkpoint"
    ended, paused = service.get(f"/jobs/{job}/events").json()["data"][-2:]
    assert ended["message"].startswith("attempt 1 ended at step 0: none of the job's checkpoints verifies: ")
    assert (paused["level"], paused["message"]) == (
        "error",
        "paused: checkpoints/step-00000004 is gone (bring it back)",
    )
    assert service.post(f"/jobs/{job}/resume").json()["error"] is None


def test_a_job_begins_again_only_when_that_is_asked_for(service: Service) -> None:
    job, running = service.submit(), service.submit()
    service.append(job, *QUEUED, JobPaused())
    service.append(running, *RUNNING)
    wrong: list[tuple[object, str]] = [
        ({"from_scratch": "yes"}, "from_scratch"),
        ({"from_scratch": None}, "from_scratch"),
        ({"scratch": True}, "scratch"),
    ]
    for body, param in wrong:
        answer = service.post(f"/jobs/{job}/resume", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), body
    assert service.post(f"/jobs/{job}/resume", json=[]).status_code == 422
    for status in ("running", "pausing"):
        answer = service.post(f"/jobs/{running}/resume", json={"from_scratch": True})
        assert answer.status_code == 409 and "once it is paused" in answer.json()["error"]["message"], status
        service.post(f"/jobs/{running}/pause")
    service.store.set_latest(job, ROW)
    for body in (None, {}, {"from_scratch": False}):
        assert service.post(f"/jobs/{job}/resume", json=body).json()["status"] == "queued"
        assert service.get(f"/jobs/{job}").json()["progress"]["loss"] == ROW.loss
        service.post(f"/jobs/{job}/pause")
    answer = service.post(f"/jobs/{job}/resume", json={"from_scratch": True})
    assert (answer.json()["status"], answer.json()["progress"]["loss"]) == ("queued", ROW.loss)
    assert [resumed.from_scratch for resumed in facts_of(service.run(job), JobResumed)] == [False, False, False, True]
    last = service.get(f"/jobs/{job}/events").json()["data"][-1]["message"]
    assert last == "resumed from scratch: waits for its turn, then starts at step 0 without the earlier checkpoints"
    service.append(job, RUNNING[-1])
    assert service.get(f"/jobs/{job}").json()["progress"]["loss"] is None


def test_a_repeated_wish_adds_no_event(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    for _ in range(3):
        assert service.post(f"/jobs/{job}/cancel").status_code == 200
    assert [event.type for event in service.run(job).events()].count("job.cancel_requested") == 1


def test_a_wish_for_which_there_is_no_room_on_the_disk_is_as_if_never_made(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    before = service.run(job).events_file.read_bytes()
    for wish in ("cancel", "pause"):
        with longest_file(len(before) + 20):
            answer = service.post(f"/jobs/{job}/{wish}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "disk_full")
        assert service.run(job).events_file.read_bytes() == before
        assert service.get(f"/jobs/{job}").json()["requested"] == "none"
    assert service.post(f"/jobs/{job}/cancel").json()["requested"] == "cancel"
    assert service.run(job).record().requested == "cancel"


def test_a_wish_on_disk_is_granted_whatever_becomes_of_redis(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    client = connect(service.settings.redis_url)
    client.delete(f"longhaul:job:{job}")
    client.set(f"longhaul:job:{job}", "something else")
    answer = service.post(f"/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["requested"]) == (200, "cancel")
    assert service.run(job).record().requested == "cancel"
    client.delete(f"longhaul:job:{job}")
    tickets = Tickets(client)
    Reconciler(service.settings.runs, service.store, tickets).run_once()
    assert service.get(f"/jobs/{job}").json()["requested"] == "cancel"


def test_a_paused_job_leaves_the_order_and_a_resumed_one_takes_its_old_place(service: Service) -> None:
    first, second = service.submit(), service.submit()
    for job in (first, second):
        service.append(job, *QUEUED)
    service.post(f"/jobs/{first}/pause")
    assert service.get(f"/jobs/{first}").json()["queue_position"] is None
    assert service.get(f"/jobs/{second}").json()["queue_position"] == 1
    tickets = Tickets(connect(service.settings.redis_url))
    before = tickets.count(Stage.TRAIN)
    assert service.post(f"/jobs/{first}/resume").json()["queue_position"] == 1
    assert service.get(f"/jobs/{second}").json()["queue_position"] == 2
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
        assert [event.type for event in since] == ["job.priority_changed"], "once"
        event = service.get(f"/jobs/{job}/events").json()["data"][-1]
        assert (event["message"], event["data"]) == ("the priority is now -7", {"priority": -7})


def test_a_new_priority_is_a_new_place_in_the_order_of_any_stage(service: Service) -> None:
    jobs = [service.submit() for _ in range(3)]
    for facts in ([], QUEUED):
        for job in jobs:
            service.append(job, *facts)
        service.request("PATCH", f"/jobs/{jobs[2]}", json={"priority": 2})
        assert [service.get(f"/jobs/{job}").json()["queue_position"] for job in jobs] == [2, 3, 1]
        service.request("PATCH", f"/jobs/{jobs[2]}", json={"priority": 0})
        assert [service.get(f"/jobs/{job}").json()["queue_position"] for job in jobs] == [1, 2, 3], (
            "its time still counts"
        )


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


def test_who_resumes_a_cancelled_job_is_told_how_it_goes_on(service: Service) -> None:
    job = service.submit()
    service.append(job, *QUEUED)
    service.post(f"/jobs/{job}/cancel")
    said = service.post(f"/jobs/{job}/resume").json()["error"]["message"]
    assert said == f"job {job} is cancelled and not paused: there is nothing to resume"
    saved = service.submit()
    service.append(saved, *RUNNING, CheckpointSaved(step=5, path="checkpoints/step-00000005", bytes=1, seconds=1.0))
    service.append(saved, JobCancelled(checkpoint="checkpoints/step-00000005"))
    said = service.post(f"/jobs/{saved}/resume").json()["error"]["message"]
    assert said.endswith(f"; `longhaul clone {saved} --resume` starts a new job at its newest checkpoint")
