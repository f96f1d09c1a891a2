"""The routes of sweeps: what is accepted, what is refused and by which key, and what becomes of the jobs of trials."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jobs.disk import removal
from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, JobCancelled, JobFailed, JobPaused, JobSucceeded
from jobs.sweeps.directory import SweepDir, find
from jobs.sweeps.events import SweepEnded, SweepFact, TrialEnded, TrialRetried, TrialStarted
from jobs.trainer_facts import Fault
from tests.service.running import TINY, Service
from tests.service.seeded import seed_sweep, start_trial
from tests.support.samples import DONE, QUEUED, RUNNING

SWEEP: dict[str, Any] = {
    "job": {"model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}},
    "space": {"training.learning_rate": {"range": [1e-5, 1e-3], "log": True}, "training.batch_size": [16, 32]},
}


def submit(service: Service, body: Mapping[str, Any] = SWEEP, key: str | None = None) -> Any:
    """The answer."""
    return service.post("/sweeps", json=body, headers={} if key is None else {"Idempotency-Key": key})


def directory(service: Service, sweep: str) -> SweepDir:
    """Of an existing sweep."""
    return find(service.settings.runs, sweep)


def end(service: Service, sweep: str, *facts: SweepFact) -> None:
    """What publish does at the end."""
    directory(service, sweep).append([*facts, SweepEnded(reason="done")])


def test_a_sweep_is_on_disk_and_is_shown_with_every_default(service: Service) -> None:
    answer = submit(service, {**SWEEP, "name": "tickets", "pruning": "asha"})
    assert answer.status_code == 202
    sweep = answer.json()
    assert answer.headers["Location"] == f"/sweeps/{sweep['id']}"
    assert (sweep["name"], sweep["status"], sweep["max_trials"], sweep["best"]) == ("tickets", "running", 20, None)
    assert (sweep["metric"], sweep["direction"]) == ("loss", "minimize")
    assert sweep["parameters"] == ["training.learning_rate", "training.batch_size"]
    assert sweep["specification"]["max_failures"] == 3
    [warning] = sweep["warnings"]
    assert "asha with 20 trials" in warning
    assert service.get(f"/sweeps/{sweep['id']}").json() == sweep
    assert service.get(f"/sweeps/{sweep['id']}/trials").json()["data"] == []
    assert [event.fact.type for event in directory(service, sweep["id"]).events()] == ["sweep.submitted"]


def test_a_key_stands_for_one_sweep(service: Service) -> None:
    first, again = submit(service, key="monday"), submit(service, dict(reversed(SWEEP.items())), key="monday")
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    other = submit(service, {**SWEEP, "name": "other"}, key="monday")
    assert other.status_code == 409 and first.json()["id"] in other.json()["error"]["message"]
    assert submit(service, key="no space, please").status_code == 422
    with ThreadPoolExecutor(8) as pool:
        rush = set(pool.map(lambda _: submit(service, key="rush").json()["id"], range(16)))
    assert len(rush) == 1
    assert len(service.get("/sweeps").json()["data"]) == 2


JOB = SWEEP["job"]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEF"
BAD: list[tuple[str, Any, str | None, str]] = [
    ("no object", [], None, "a sweep is a JSON object"),
    ("nothing", {}, "job", "- space: is required"),
    ("no key", {**SWEEP, "space": {"Training!": [1]}}, 'space."Training!"', "must match pattern"),
    ("job", {**SWEEP, "job": {**JOB, "epochs": 3}}, "job.epochs", "job.epochs: unknown key"),
    ("the name of the newest", {**SWEEP, "name": "last"}, "name", "means the newest one"),
    ("secret", {**SWEEP, "job": {**JOB, "metadata": {"note": TOKEN}}}, "job.metadata.note", "looks like a secret"),
    ("secret choice", {**SWEEP, "space": {"metadata.note": ["a", TOKEN]}}, "space.metadata.note", "like a secret"),
    (
        "no upload",
        {**SWEEP, "job": {"data": {"train": "dataset:none.jsonl"}}},
        "job.data.train",
        "there is no uploaded data set 'none.jsonl'",
    ),
    (
        "outside",
        {**SWEEP, "space": {"data.train": ["rows.jsonl", "../rows.jsonl"]}},
        "space.data.train",
        "outside the data directory",
    ),
]


@pytest.mark.parametrize(("body", "param", "part"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_sweeps_are_refused_by_key(service: Service, body: Any, param: str | None, part: str) -> None:
    answer = submit(service, body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert part in error["message"] and TOKEN not in answer.text
    assert service.get("/sweeps").json()["data"] == []


def test_a_cancelled_sweep_stops_once_and_an_ended_one_not_at_all(service: Service) -> None:
    sweep = submit(service).json()["id"]
    for _ in range(2):
        answer = service.post(f"/sweeps/{sweep}/cancel")
        assert (answer.status_code, answer.json()["cancel_requested"]) == (200, True)
    asked = [event.fact.type for event in directory(service, sweep).events()]
    assert asked == ["sweep.submitted", "sweep.cancel_requested"]
    refused = service.request("DELETE", f"/sweeps/{sweep}")
    assert refused.status_code == 409 and "cancel it first" in refused.json()["error"]["message"]
    directory(service, sweep).append([SweepEnded(reason="cancelled")])
    refused = service.post(f"/sweeps/{sweep}/cancel")
    assert refused.status_code == 409 and "already ended (cancelled)" in refused.json()["error"]["message"]


def test_a_deleted_sweep_takes_its_jobs_with_it_and_no_other(service: Service) -> None:
    other, sweep = service.submit(), submit(service).json()["id"]
    jobs = [start_trial(service, sweep, number) for number in range(2)]
    for job in jobs:
        service.append(job, JobCancelled())
    service.request("DELETE", f"/jobs/{jobs[0]}")  # by hand, before
    end(service, sweep, *(TrialEnded(trial=number, outcome="cancelled") for number in range(2)))
    gone = service.request("DELETE", f"/sweeps/{sweep}")
    assert (gone.status_code, gone.json()) == (200, {"id": sweep, "object": "sweep", "deleted": True})
    assert [service.get(f"/{path}").status_code for path in (f"sweeps/{sweep}", f"jobs/{jobs[1]}")] == [404, 404]
    assert not RunDir(service.settings.runs / jobs[1]).exists() and service.run(other).exists()
    assert list((service.settings.runs / ".sweeps").iterdir()) == []


def test_a_trial_that_is_tried_again_says_so_and_its_failed_jobs_are_deleted_too(service: Service) -> None:
    sweep = submit(service).json()["id"]
    failed = start_trial(service, sweep, 0)
    error = Fault(code="no_room", message="the disk is full", hint="make room")
    service.append(failed, JobFailed(error=error))
    [trial] = service.get(f"/sweeps/{sweep}/trials").json()["data"]
    why = "the disk is full; make room; it is tried again by itself"
    assert (trial["status"], trial["message"]) == ("paused", why)
    assert service.get(f"/sweeps/{sweep}").json()["waiting"] == why
    again = TrialRetried(trial=0, jobs=["job-again"], error=error)
    end(service, sweep, again, TrialEnded(trial=0, outcome="succeeded", value=1.0, values=[1.0]))
    assert service.request("DELETE", f"/sweeps/{sweep}").status_code == 200
    assert not service.run(failed).exists()


def test_a_deletion_that_was_killed_is_completed_by_reconcile(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = seed_sweep(service, ended=True)
    monkeypatch.setattr("service.jobs.sweeps.remove", lambda _: None)  # as if it died before
    assert service.request("DELETE", f"/sweeps/{sweep}").status_code == 200
    folder = service.settings.runs / ".sweeps"
    assert list(folder.iterdir()) and service.get("/sweeps").json()["data"] == []
    removal.sweep(service.settings.runs)
    assert not list(folder.iterdir())


def test_a_trial_without_a_model_says_which_one_has_it(service: Service) -> None:
    sweep = submit(service).json()["id"]
    job = start_trial(service, sweep, 0)
    service.append(job, *DONE, JobSucceeded(model="model", step=10, loss=1.0))
    refused = service.post(f"/jobs/{job}/generate", json={"input": "a"}).json()["error"]
    assert refused["code"] == "no_model" and f"sweep {sweep}, which keeps the model of its best" in refused["message"]
    assert f"longhaul sweep show {sweep}" in refused["hint"]


def test_a_sweep_says_which_models_are_gone_also_after_its_end(service: Service) -> None:
    sweep = submit(service).json()["id"]
    jobs = [start_trial(service, sweep, number) for number in range(2)]
    service.run(jobs[1]).model.mkdir()  # that of the other was removed, for it was worse
    ended = [TrialEnded(trial=number, outcome="succeeded", value=2.0 - number) for number in range(2)]
    end(service, sweep, *ended)
    trials = service.get(f"/sweeps/{sweep}/trials").json()["data"]
    assert [each["gone"] for each in trials] == [[jobs[0]], []]
    best = service.get(f"/sweeps/{sweep}").json()["best"]
    assert (best["number"], best["gone"]) == (1, [])
    service.append(jobs[1], JobCancelled())
    assert service.request("DELETE", f"/jobs/{jobs[1]}").ok
    best = service.get(f"/sweeps/{sweep}").json()["best"]
    assert (best["number"], best["gone"]) == (1, [jobs[1]])
    page = service.get(f"/sweeps/{sweep}", headers={"Accept": "text/html"}).text
    assert f"<code>{jobs[1]}</code> has no model any more" in page and f'href="/jobs/{jobs[1]}">Its job' not in page


def test_lists_of_jobs_have_trials_when_they_are_asked_for(service: Service) -> None:
    job, sweep = service.submit(), submit(service).json()["id"]
    trial = start_trial(service, sweep, 0)
    assert service.get(f"/jobs/{trial}").json()["sweep"] == sweep

    def listed(query: str) -> list[str]:
        return [each["id"] for each in service.get(f"/jobs{query}").json()["data"]]

    assert listed("") == [job]
    assert listed("?trials=true") == [trial, job]
    assert listed(f"?sweep={sweep}") == [trial]
    assert listed("?sweep=sweep-unknown") == []


def test_a_paused_trial_says_why_and_how_it_continues(service: Service) -> None:
    sweep = submit(service).json()["id"]
    by_itself, by_hand, running = (start_trial(service, sweep, number) for number in range(3))
    full = Fault(code="disk_full", message="the disk is full", hint="make room")
    service.append(by_itself, *RUNNING, AttemptEnded(reason="disk_full", step=5), JobPaused(error=full))
    service.append(by_hand, *QUEUED, JobPaused())
    service.append(running, *RUNNING)
    trials = service.get(f"/sweeps/{sweep}/trials").json()["data"]
    assert [trial["status"] for trial in trials] == ["paused", "paused", "running"]
    why = f"the disk is full; make room; then `longhaul resume {by_itself}`"
    assert [trial["message"] for trial in trials] == [
        why, f"job {by_hand} is paused: `longhaul resume {by_hand}` continues it", None,
    ]  # fmt: skip
    answer = service.get(f"/sweeps/{sweep}").json()
    assert (answer["trials"], answer["waiting"]) == ({"running": 1, "paused": 2}, why)
    page = service.get(f"/sweeps/{sweep}", headers={"Accept": "text/html"}).text
    assert f"No trial starts now: {why}" in page and '<span class="state paused">paused</span>' in page
    service.post(f"/jobs/{by_itself}/resume")
    answer = service.get(f"/sweeps/{sweep}").json()
    assert (answer["trials"], answer["waiting"]) == ({"running": 2, "paused": 1}, None), "that of a user holds none up"


def test_a_clone_of_a_trial_reports_as_the_job_of_the_sweep(service: Service) -> None:
    job = {**SWEEP["job"], "integrations": {"discord": True, "wandb": {"project": "p"}}}
    trial = start_trial(service, submit(service, {**SWEEP, "job": job}).json()["id"], 0)
    clone = service.post(f"/jobs/{trial}/clone", json={}).json()
    assert (clone["spec"]["integrations"]["discord"], clone["sweep"]) == (True, None)
    assert clone["spec"]["integrations"]["wandb"]["project"] == "p"


def test_the_plan_of_a_trial_is_not_drawn_and_that_is_said(service: Service) -> None:
    trial = start_trial(service, submit(service).json()["id"], 0)
    answer = service.get(f"/jobs/{trial}/plan.png")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_plan")
    assert f"GET /jobs/{trial}/plan has the plan" in answer.json()["error"]["message"]


def test_the_table_has_no_formula(service: Service) -> None:
    formula, quoted = "=HYPERLINK(1)", 'a "b", c'
    space = {"metadata.note": [formula, quoted], "training.learning_rate": [1e-4, 1e-3]}
    sweep = submit(service, {**SWEEP, "space": space}).json()["id"]
    directory(service, sweep).append(
        [
            TrialStarted(trial=0, settings={"metadata.note": formula, "training.learning_rate": 1e-4}, jobs=["job-a"]),
            TrialEnded(trial=0, outcome="succeeded", value=-0.5, values=[-0.5], seconds=2.0),
            TrialStarted(trial=1, settings={"metadata.note": quoted, "training.learning_rate": 1e-3}, jobs=["job-b"]),
        ]
    )
    answer = service.get(f"/sweeps/{sweep}/trials.csv")
    assert answer.headers["Content-Type"].startswith("text/csv")
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{sweep}.csv"'
    heads, *rows = csv.reader(io.StringIO(answer.text))
    assert heads == ["trial", "status", "loss", "seconds", "cause", "jobs", *space]
    assert rows == [
        ["0", "succeeded", "-0.5", "2.000", "", "job-a", f"'{formula}", "0.0001"],
        ["1", "running", "", "0.000", "", "job-b", quoted, "0.001"],
    ]


def test_a_repeated_trial_is_a_sweep_of_seeds(service: Service) -> None:
    seeded = seed_sweep(service, ended=True)
    path = f"/sweeps/{seeded}/repeat"
    answer = service.post(path, headers={"Idempotency-Key": "again"})
    again = answer.json()
    assert (answer.status_code, answer.headers["Location"]) == (202, f"/sweeps/{again['id']}")
    asked = again["specification"]
    assert (asked["sampler"], again["max_trials"], again["metric"]) == ("grid", 5, "loss")
    assert asked["space"]["training.seed"]["choice"] == [43, 44, 45, 46, 47], "not its own one"
    assert asked["job"]["training"] == {"learning_rate": 1e-4, "batch_size": 16}, "those of the best trial"
    assert service.post(path, headers={"Idempotency-Key": "again"}).json()["id"] == again["id"]
    other = service.post(path, json={"trial": 2, "seeds": 3}).json()
    assert other["max_trials"] == 3
    assert other["specification"]["job"]["training"]["learning_rate"] == pytest.approx(3e-4)
    for body, param in (({"trial": 9}, "trial"), ({"seeds": 1}, "seeds"), ({"seed": 1}, "seed")):
        refused = service.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, param)
    none = service.post(f"/sweeps/{submit(service).json()['id']}/repeat")
    assert none.status_code == 409 and "name one, as `trial` or with `--trial`" in none.json()["error"]["message"]


def test_sweeps_are_listed_by_pages_without_damaged_ones(service: Service) -> None:
    ids = [submit(service).json()["id"] for _ in range(5)][::-1]
    directory(service, ids[1]).events_file.write_text("{\n")
    refused = service.get(f"/sweeps/{ids[1]}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "damaged")
    whole, listed, after = [ids[0], *ids[2:]], [], ""
    while True:
        page = service.get(f"/sweeps?limit=2{after}").json()
        listed += [sweep["id"] for sweep in page["data"]]
        if not page["has_more"]:
            break
        assert len(page["data"]) == 2
        after = f"&after={page['last_id']}"
    assert listed == whole


def test_the_answer_of_an_ended_sweep_is_kept_while_its_events_are_what_they_were(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, running = seed_sweep(service, ended=True), seed_sweep(service, ended=False)
    first = service.get("/sweeps").json()
    read: list[str] = []
    events = SweepDir.events

    def counted(sweep: SweepDir) -> Any:
        read.append(sweep.id)
        return events(sweep)

    monkeypatch.setattr(SweepDir, "events", counted)
    assert service.get("/sweeps").json() == first and read == [running]
    with open(directory(service, ended).events_file, "ab") as file:
        file.write(b"{}\n")
    assert service.get(f"/sweeps/{ended}").status_code == 409


@pytest.mark.parametrize("sweep", ["sweep-unknown", "..", "job-unknown", "sweep-%2e%2e"])
def test_a_sweep_that_there_is_not(service: Service, sweep: str) -> None:
    for method, path in (("GET", ""), ("GET", "/trials.csv"), ("POST", "/cancel"), ("POST", "/repeat"), ("DELETE", "")):
        assert service.request(method, f"/sweeps/{sweep}{path}").status_code in (404, 405)
    assert service.post("/jobs", json=TINY).status_code == 202
