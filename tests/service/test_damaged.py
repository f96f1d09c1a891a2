"""Jobs whose run directory is damaged: shown as that everywhere, refused, deleted; nobody else is harmed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from jobs.answers import ShownStatus
from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted
from jobs.redis.connection import Tickets, connect
from jobs.state import DAMAGED, Stage, Status
from tests.service.damage import destroyed_line, half_a_plan, half_a_spec, no_events, queued, reconciler
from tests.service.running import Service
from tests.support.samples import QUEUED, stumble_over
from worker.reconcile import Reconciler


def wrong_character(run: RunDir) -> None:
    run.events_file.write_bytes(run.events_file.read_bytes().replace(b'"steps":10', b'"steps":90'))


def unreadable_events(run: RunDir) -> None:
    run.events_file.unlink()
    run.events_file.mkdir()


def unreadable_spec(run: RunDir) -> None:
    run.spec_file.unlink()
    run.spec_file.mkdir()


def no_spec(run: RunDir) -> None:
    run.spec_file.unlink()


DAMAGE: dict[Callable[[RunDir], None], str] = {
    destroyed_line: "line 3 of events.jsonl is not an event: ",
    wrong_character: "line 3 of events.jsonl is not an event: its CRC does not match",
    no_events: "events.jsonl is gone",
    unreadable_events: "events.jsonl cannot be opened or read: Is a directory",
    unreadable_spec: "spec.json cannot be opened or read: Is a directory",
    no_spec: "spec.json is gone",
    half_a_spec: "spec.json cannot be read: ",
    half_a_plan: "plan.json cannot be read: ",
}


@pytest.mark.parametrize("harm", DAMAGE, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("wiped", [False, True])
def test_a_damaged_job_is_shown_as_that_and_can_be_deleted(
    service: Service, harm: Callable[[RunDir], None], wiped: bool
) -> None:
    first, job, behind = queued(service), queued(service, metadata={"team": "x"}), queued(service)
    harm(service.run(job))
    if wiped:
        connect(service.settings.redis_url).flushall()
    reconciler(service).run_once()
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["status"], shown["queue_position"], shown["error"]["code"]) == ("damaged", None, "damaged")
    assert shown["error"]["message"].startswith(DAMAGE[harm]) and shown["error"]["hint"]
    assert [each["status"] for each in service.get("/jobs").json()["data"]] == ["queued", "damaged", "queued"]
    for status, ids in (("damaged", [job]), ("queued", [behind, first])):
        assert [each["id"] for each in service.get("/jobs", params={"status": status}).json()["data"]] == ids
    assert [service.get(f"/jobs/{each}").json()["queue_position"] for each in (first, behind)] == [1, 2]
    assert service.get("/workers").json()["damaged"] == [job]
    figures = service.get("/metrics").text
    assert 'longhaul_jobs{status="damaged"} 1.0' in figures and 'longhaul_jobs{status="queued"} 2.0' in figures
    for wish in ("cancel", "pause", "resume"):
        answer = service.post(f"/jobs/{job}/{wish}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "damaged"), answer.text
        assert answer.json()["error"]["message"].startswith(f"job {job} is damaged: {DAMAGE[harm]}")
        assert answer.json()["error"]["hint"] == shown["error"]["hint"]
    assert service.request("DELETE", f"/jobs/{job}").status_code == 200
    assert not service.run(job).path.exists() and service.get(f"/jobs/{job}").status_code == 404
    assert service.get("/workers").json()["damaged"] == []
    assert [service.store.claim(Stage.TRAIN, each) for each in ("t1", "t2", "t3")] == [first, behind, None]


def test_every_state_can_be_shown_and_asked_for() -> None:
    assert get_args(ShownStatus) == (*Status, DAMAGED)


def test_who_meets_the_damage_first_tells_everybody(service: Service) -> None:
    job = queued(service)
    destroyed_line(service.run(job))
    assert service.get(f"/jobs/{job}").json()["status"] == "queued", "nobody has looked"
    assert service.post(f"/jobs/{job}/cancel").status_code == 409
    assert service.get(f"/jobs/{job}").json()["status"] == "damaged"
    assert service.store.waiting(Stage.TRAIN) == 0


def test_a_job_that_is_whole_again_waits_again(service: Service) -> None:
    job, other = queued(service), queued(service)
    spec = service.run(job).spec_file.read_bytes()
    half_a_spec(service.run(job))
    mine = reconciler(service)
    mine.run_once()
    assert service.get(f"/jobs/{other}").json()["queue_position"] == 1
    service.run(job).spec_file.write_bytes(spec)
    mine.run_once()
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["status"], shown["queue_position"], shown["error"]) == ("queued", 1, None)
    assert service.get("/workers").json()["damaged"] == []


def test_a_job_with_an_error_that_nobody_foresaw_is_shown_and_can_be_removed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = service.submit()
    stumble_over(monkeypatch, job)
    service.append(job, *QUEUED)
    reconciler(service).run_once()
    shown = service.get(f"/jobs/{job}").json()
    assert shown["status"] == "damaged" and f"`longhaul cancel {job}`" in shown["error"]["hint"]
    assert [each["id"] for each in service.get("/jobs").json()["data"]] == [job]
    assert service.post(f"/jobs/{job}/cancel").status_code == 200
    assert service.request("DELETE", f"/jobs/{job}").status_code == 200
    assert service.get("/jobs").json()["data"] == []


def test_a_running_job_can_be_cancelled_though_its_plan_is_damaged(service: Service) -> None:
    job = queued(service)
    service.append(job, AttemptStarted(worker="w", device="cpu"))
    half_a_plan(service.run(job))
    reconciler(service).run_once()
    assert service.get(f"/jobs/{job}").json()["status"] == "damaged"
    answer = service.post(f"/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["requested"]) == (200, "cancel"), answer.text
    assert service.post(f"/jobs/{job}/clone").status_code == 202


def test_a_damaged_job_in_the_hands_of_a_worker_is_not_deleted(service: Service) -> None:
    job = queued(service)
    assert service.store.claim(Stage.TRAIN, "t") == job
    destroyed_line(service.run(job))
    assert service.request("DELETE", f"/jobs/{job}").status_code == 409
    service.store.release(job, "t")
    assert service.request("DELETE", f"/jobs/{job}").status_code == 200


def test_a_job_that_trains_without_its_events_says_how_it_can_be_removed(service: Service) -> None:
    job = queued(service)
    assert service.store.claim(Stage.TRAIN, "t") == job
    service.append(job, AttemptStarted(worker="w", device="cpu"))
    no_events(service.run(job))
    for wish in ("cancel", "pause", "repair"):
        hint = service.post(f"/jobs/{job}/{wish}").json()["error"]["hint"]
        assert f"`longhaul delete {job}` (first stop the worker that holds it)" in hint
    refused = service.request("DELETE", f"/jobs/{job}")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == (
        f"a worker has job {job} in hand, and cannot be asked to let go of it (events.jsonl is gone): "
        "stop that worker, then delete the job"
    )
    assert not service.store.release(job, "another") and service.store.release(job, "t"), "the worker has stopped"
    assert service.request("DELETE", f"/jobs/{job}").status_code == 200


def folder(place: Path) -> None:
    place.mkdir()


def pipe(place: Path) -> None:
    os.mkfifo(place)


def loop(place: Path) -> None:
    place.symlink_to(place.name)


@pytest.mark.parametrize("harm", [folder, pipe, loop])
@pytest.mark.parametrize("told", [False, True])
def test_what_is_no_file_gets_a_typed_answer_everywhere_and_holds_up_nobody(
    service: Service, harm: Callable[[Path], None], told: bool
) -> None:
    """In the place of any file, and also of one that only a lock or a log is in."""
    gets = ("", "/events", "/plan", "/metrics", "/metrics?points=9", "/logs", "/checkpoints", "/files")
    routes = [("GET", path) for path in gets] + [
        ("POST", path) for path in ("/pause", "/resume", "/clone", "/cancel", "/repair")
    ]
    for name in ("spec.json", "plan.json", "events.jsonl", "events.lock", "lock", "metrics.jsonl", "trainer.log"):
        job, other = queued(service), queued(service)
        place = service.run(job).path / name
        place.unlink(missing_ok=True)
        harm(place)
        if told:
            reconciler(service).run_once()
        for method, path in [*routes, ("PATCH", ""), ("DELETE", "")]:
            answer = service.request(
                method, f"/jobs/{job}{path}", **({"json": {"priority": 3}} if method == "PATCH" else {})
            )
            error = answer.json().get("error", {}) if "json" in answer.headers["Content-Type"] else {}
            if answer.status_code == 503:
                assert error["code"] == "unreadable" and error["message"].startswith(f"{name} cannot be ")
                assert error["hint"].endswith("or move it away")
            else:
                assert answer.status_code in (200, 202, 404, 409), (name, method, path, answer.text)
                if answer.status_code == 409 and error["code"] == "damaged":
                    assert error["hint"] and name in error["message"]
        assert other in service.get("/jobs").text
        if service.run(job).path.exists():  # DELETE was refused; what repair has not mended, the hint does
            if os.path.lexists(place):
                place.rename(service.settings.runs.parent / f"away-{job}")
            assert service.post(f"/jobs/{job}/cancel").status_code == 200
            assert service.request("DELETE", f"/jobs/{job}").status_code == 200
            assert service.get(f"/jobs/{job}").status_code == 404


def test_one_lock_that_is_no_file_keeps_reconcile_from_nothing(service: Service) -> None:
    job, other = queued(service), queued(service)
    for each in (job, other):
        service.append(each, AttemptStarted(worker="w", device="cpu"))
        service.run(each).lock_file.unlink(missing_ok=True)
    service.run(job).lock_file.mkdir()
    clock = iter((0.0, 10_000.0))
    mine = Reconciler(
        service.settings.runs,
        service.store,
        Tickets(connect(service.settings.redis_url)),
        lease_s=0.0,
        clock=lambda: next(clock),
    )
    mine.run_once()
    assert service.get(f"/jobs/{other}").json()["status"] == "queued"
