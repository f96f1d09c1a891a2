"""A damaged job is cut back to its last whole event, with a backup, and resumes from there."""

from __future__ import annotations

import pytest

from jobs.attempt import Finished
from jobs.disk.event_log import EventLog
from jobs.disk.files import append_line
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobPaused,
    JobPauseRequested,
    JobQueued,
    JobRepaired,
    JobSucceeded,
    JobValidated,
)
from jobs.redis.connection import Tickets, connect
from jobs.state import Stage
from jobs.trainer_facts import CheckpointSaved
from tests.service.damage import destroyed, destroyed_line, half_a_plan, half_a_spec, no_events, queued, reconciler
from tests.service.running import TINY, Service
from tests.support.samples import QUEUED, write_plan

SAVED = CheckpointSaved(step=5, path="checkpoints/step-00000005", bytes=1, seconds=0.1)
RUNNING: list[AnyFact] = [AttemptStarted(worker="w", device="cpu"), SAVED, JobPauseRequested()]
DONE: list[AnyFact] = [AttemptEnded(reason="done", step=10), JobSucceeded(model="model", step=10, loss=1.0)]


@pytest.mark.parametrize("known", [True, False])
def test_a_repair_cuts_back_to_the_last_whole_event(service: Service, known: bool) -> None:
    first, job = queued(service), queued(service)
    service.append(job, *RUNNING)
    run = service.run(job)
    before = run.events()
    damaged = destroyed(run, 5)
    if known:
        reconciler(service).run_once()
        assert service.get(f"/jobs/{job}").json()["status"] == "damaged"
    tickets = Tickets(connect(service.settings.redis_url))
    waiting = tickets.count(Stage.TRAIN)
    answer = service.post(f"/jobs/{job}/repair").json()
    assert answer["backups"] == ["events.jsonl.damaged-1"]
    assert (run.path / "events.jsonl.damaged-1").read_bytes() == damaged
    assert answer["message"].startswith(f"job {job} was damaged: line 5 of events.jsonl is not an event: ")
    assert "events.jsonl is cut back to event 4: 3 lines (" in answer["message"]
    assert (answer["job"]["status"], answer["job"]["queue_position"], answer["job"]["event_number"]) == ("queued", 2, 5)
    assert run.events()[:-1] == before[:4] and run.events()[-1].fact == JobRepaired(lines_lost=3)
    assert service.store.events(job) == run.events()
    assert service.get("/workers").json()["damaged"] == [] and tickets.count(Stage.TRAIN) == waiting + 1
    assert [service.store.claim(Stage.TRAIN, each) for each in ("t1", "t2")] == [first, job]
    assert service.append(job, AttemptStarted(worker="w", device="cpu")).attempt == 1
    again = service.post(f"/jobs/{job}/repair").json()
    assert (again["message"], again["backups"]) == (f"job {job} is whole: nothing was changed", [])


@pytest.mark.parametrize(("dry_run", "line", "stage"), [(False, 4, Stage.PREPARE), (True, 3, Stage.CHECK)])
def test_a_stage_that_was_cut_short_is_done_again(service: Service, dry_run: bool, line: int, stage: Stage) -> None:
    """The train queue is not held up by a job that cannot run, and a dry run does not train."""
    job = str(service.post("/jobs", params={"dry_run": dry_run}, json=TINY).json()["id"])
    service.append(job, *([QUEUED[0], JobValidated()] if dry_run else QUEUED))
    behind = queued(service)
    destroyed(service.run(job), line)
    shown = service.post(f"/jobs/{job}/repair").json()["job"]
    assert (shown["status"], shown["stage"]) == ("validating", stage.value)
    assert [service.store.claim(Stage.TRAIN, each) for each in ("t1", "t2")] == [behind, None]
    assert service.store.claim(stage, "s") == job


def test_every_backup_is_kept(service: Service) -> None:
    job = queued(service)
    for number in (1, 2):
        destroyed_line(service.run(job))
        assert service.post(f"/jobs/{job}/repair").json()["backups"] == [f"events.jsonl.damaged-{number}"]
        service.append(job, *QUEUED[1:])


def test_a_running_job_is_repaired_under_its_worker(service: Service) -> None:
    """What the worker appends, and the end of the attempt, come after the last whole event."""
    job = queued(service)
    token = "w/1/t"
    assert service.store.claim(Stage.TRAIN, token) == job
    service.append(job, *RUNNING)
    destroyed(service.run(job), 7)
    assert service.post(f"/jobs/{job}/cancel").json()["error"]["code"] == "damaged"
    shown = service.post(f"/jobs/{job}/repair").json()["job"]
    assert (shown["status"], shown["requested"], shown["checkpoint"]) == ("running", "none", SAVED.path)
    assert service.store.maintenance.leased(job)
    assert service.post(f"/jobs/{job}/cancel").json()["requested"] == "cancel"
    assert service.append(job, *DONE, attempt=1).status == "succeeded"


def test_who_repairs_is_told_what_the_job_does_next(service: Service) -> None:
    ended, running = queued(service), queued(service)
    service.append(ended, *RUNNING[:2])
    service.append(ended, *DONE)
    service.append(running, *RUNNING)
    destroyed(service.run(ended), 5)
    destroyed(service.run(running), 7)
    assert (
        f"the job is queued now, and a worker will take it (`longhaul cancel {ended}` if it is not to continue); "
        in service.post(f"/jobs/{ended}/repair").json()["message"]
    )
    assert "; the job is running now; " in service.post(f"/jobs/{running}/repair").json()["message"]


def test_a_job_without_its_plan_is_checked_again_as_long_as_it_has_not_trained(service: Service) -> None:
    waiting, trained = queued(service), queued(service)
    service.append(trained, AttemptStarted(worker="w", device="cpu"), AttemptEnded(reason="worker_lost"), JobQueued())
    for job in (waiting, trained):
        half_a_plan(service.run(job))
    answer = service.post(f"/jobs/{waiting}/repair").json()
    assert answer["backups"] == ["events.jsonl.damaged-1", "plan.json.damaged-1"]
    assert (answer["job"]["status"], answer["job"]["stage"], answer["job"]["queue_position"]) == (
        "validating",
        "check",
        1,
    )
    assert not service.run(waiting).plan_file.exists()
    before = service.run(trained).events_file.read_bytes()
    refused = service.post(f"/jobs/{trained}/repair")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "damaged")
    assert "the job has trained by it" in refused.json()["error"]["message"]
    assert "put plan.json back from a backup" in refused.json()["error"]["hint"]
    assert service.run(trained).events_file.read_bytes() == before
    assert not list(service.run(trained).path.glob("*.damaged-*"))


def test_a_job_that_has_trained_waits_for_its_plan_to_be_put_back(service: Service) -> None:
    job = queued(service)
    run = service.run(job)
    write_plan(run)
    service.append(job, *RUNNING[:2], AttemptEnded(reason="interrupted"), JobPaused())
    append_line(run.attempt_file(1), Finished(at=1.0, reason="interrupted"))
    aside = run.plan_file.rename(run.path / "aside")
    mine = reconciler(service)
    mine.run_once()
    assert service.get(f"/jobs/{job}").json()["status"] == "damaged"
    for wish in ("resume", "repair"):
        refused = service.post(f"/jobs/{job}/{wish}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "damaged")
        assert "plan.json is gone" in refused.json()["error"]["message"]
        assert refused.json()["error"]["hint"].startswith("put plan.json back from a backup")
    aside.rename(run.plan_file)
    mine.run_once()
    assert service.post(f"/jobs/{job}/resume").json()["status"] == "queued"


def test_damage_before_what_was_read_last_is_found(service: Service) -> None:
    """Each process reads on from where it was: a user's wish, and a repair, begin at the first line again."""
    job = queued(service)
    run = service.run(job)
    mine = reconciler(service)
    mine.run_once()
    by_another = EventLog(run.events_file).append([JobPaused()], None, None)[0]
    damaged = destroyed(run, 3)
    assert service.post(f"/jobs/{job}/resume").json()["error"]["code"] == "damaged"
    assert run.events_file.read_bytes() == damaged, "nothing is appended behind the damage"
    mine.run_once()
    assert service.get(f"/jobs/{job}").json()["status"] == "damaged"
    run.events_file.write_bytes(damaged)
    answer = service.post(f"/jobs/{job}/repair").json()
    assert by_another.number == 5 and "cut back to event 2: 3 lines (" in answer["message"]
    assert answer["job"]["event_number"] == EventLog(run.events_file).record().number == 3


@pytest.mark.parametrize("reader", ["repair", "delete"])
def test_who_decides_reads_from_the_first_line(service: Service, reader: str) -> None:
    job = queued(service)
    run = service.run(job)
    EventLog(run.events_file).append([JobPaused()], None, None)
    destroyed(run, 3)
    if reader == "delete":
        assert service.request("DELETE", f"/jobs/{job}").status_code == 200
    else:
        assert service.post(f"/jobs/{job}/repair").json()["backups"] == ["events.jsonl.damaged-1"]


@pytest.mark.parametrize("harm", [no_events, half_a_spec])
def test_what_nothing_is_left_of_cannot_be_repaired(service: Service, harm: object) -> None:
    job = queued(service)
    assert callable(harm)
    harm(service.run(job))
    refused = service.post(f"/jobs/{job}/repair")
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert error["message"].startswith(f"job {job} cannot be repaired: ") and f"longhaul delete {job}" in error["hint"]
    assert service.request("DELETE", f"/jobs/{job}").status_code == 200


def test_redis_learns_of_a_file_that_comes_from_a_backup(service: Service) -> None:
    job = queued(service)
    old = service.run(job).events_file.read_bytes()
    service.append(job, *RUNNING)
    service.run(job).events_file.write_bytes(old)
    reconciler(service).run_once()
    shown = service.get(f"/jobs/{job}").json()
    assert (shown["status"], shown["event_number"], shown["queue_position"]) == ("queued", 4, 1)
    assert service.store.events(job) == service.run(job).events()


def test_a_folder_in_place_of_a_plan_is_taken_away(service: Service) -> None:
    job = queued(service)
    run = service.run(job)
    run.plan_file.mkdir()
    answer = service.post(f"/jobs/{job}/repair")
    assert (answer.status_code, answer.json()["backups"]) == (200, ["events.jsonl.damaged-1", "plan.json.damaged-1"])
    assert (run.path / "plan.json.damaged-1").is_dir() and answer.json()["job"]["status"] == "validating"
