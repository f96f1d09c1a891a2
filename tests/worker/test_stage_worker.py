"""The RQ workers: one trainer whatever the tickets say, one function only, nobody outlives a parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import requests
import rq
from rq.exceptions import StopRequested
from rq.serializers import JSONSerializer

from jobs.events import AttemptEnded, AttemptStarted
from jobs.redis.connection import Tickets, connect, queue_name
from jobs.redis.store import Store
from jobs.state import Stage
from jobs.trainer_facts import ModelLoaded
from tests.service.damage import destroyed
from tests.support.processes import alive, children, parent_of, trainers
from tests.support.stack import Stack, tiny_job
from worker.heartbeat import first_heartbeat
from worker.runs_lock import identified
from worker.settings import from_environment
from worker.stage_worker import StageWorker

BUT_TRAIN = ("service", "check", "prepare", "publish")


def test_workers_report_the_job_in_hand_and_sign_off(stack: Stack) -> None:
    stack.start_if_gone(*BUT_TRAIN)

    def workers() -> dict[str, dict[str, Any]]:
        return {each["stage"]: each for each in requests.get(f"{stack.url}/workers", timeout=60).json()["data"]}

    def all_there() -> dict[str, dict[str, Any]] | None:
        return found if (found := workers()).keys() == {"check", "prepare", "publish"} else None

    there = stack.wait_for(all_there, "three heartbeats")
    idle, publish = there["check"], there["publish"]
    assert (idle["queue"], idle["device"], idle["gpu"], idle["job"]) == ("longhaul-check", "cpu", None, None)
    assert {"torch", "rq"} <= idle["versions"].keys()
    assert publish["queue"] is None and publish["sinks"].keys() == {"log", "curve", "discord", "wandb"}
    run = stack.submit(tiny_job())

    def at_work() -> dict[str, Any] | None:
        return next((each for each in workers().values() if each["job"] is not None), None)

    busy = stack.wait_for(at_work, "the job in hand")
    assert (busy["name"], busy["job"]) == (idle["name"], run.id)
    stack.stop("publish")
    assert "publish" not in workers()


def lines(file: Path) -> list[dict[str, Any]]:
    """Every line of the log is an object."""
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def test_service_and_workers_write_json_with_job_and_request(stack: Stack) -> None:
    stack.start_if_gone(*BUT_TRAIN)
    run = stack.submit(tiny_job(), **{"X-Request-Id": "my-own.id_7"})
    stack.wait_for_event(run, "job.checked")
    answer = requests.get(f"{stack.url}/jobs/{run.id}/plan", headers={"X-Request-Id": "no good\tid"}, timeout=60)
    made = answer.headers["X-Request-Id"]
    assert made.isalnum()

    def told() -> bool | None:
        found = lines(stack.home / "publish.log")
        return any(line["logger"] == "longhaul.events" and line["job"] == run.id for line in found) or None

    stack.wait_for(told, "publish to tell of it")

    def answered() -> list[dict[str, Any]] | None:  # the line follows the answer
        found = lines(stack.home / "service.log")
        return found if any(line.get("request_id") == made for line in found) else None

    service = stack.wait_for(answered, "the service to tell of the request")
    (submitted,) = (line for line in service if line.get("request_id") == "my-own.id_7")
    assert (submitted["method"], submitted["path"], submitted["status"]) == ("POST", "/jobs", 202)
    assert submitted["ms"] > 0
    (asked,) = (line for line in service if line.get("request_id") == made)
    assert (asked["job"], asked["path"]) == (run.id, f"/jobs/{run.id}/plan")
    assert any(line["logger"].startswith("uvicorn") for line in service)
    assert {line["logger"].split(".")[0] for line in lines(stack.home / "check.log")} <= {"longhaul", "rq"}


def test_two_workers_and_many_tickets_make_one_attempt(stack: Stack) -> None:
    stack.start_if_gone(*BUT_TRAIN)
    run = stack.submit(tiny_job())
    stack.wait_for_event(run, "job.queued")
    tickets = Tickets(connect(stack.redis.url))
    for _ in range(6):
        tickets.add(Stage.TRAIN)
    stack.start("train")
    first = stack.processes.pop("train")
    stack.start("train")
    stack.processes["train-2"] = first
    stack.wait_for_event(run, "job.succeeded", "job.failed")
    stack.wait_for(lambda: tickets.count(Stage.TRAIN) == 0 or None, "all tickets to be taken")
    attempts = [event for event in run.events() if isinstance(event.fact, AttemptStarted)]
    assert len(attempts) == 1
    assert [event.number for event in run.events()] == list(range(1, run.record().number + 1))


def test_of_two_train_workers_one_may_be_killed_and_one_stopped_and_no_job_is_lost(stack: Stack) -> None:
    stack.start_if_gone(*BUT_TRAIN, "train", "train-2")
    runs = [stack.submit(tiny_job(training={"epochs": 400, "batch_size": 8})) for _ in range(2)]
    for run in runs:
        stack.wait_for_event(run, "model.loaded")
    pids = {f"-{stack.processes[role].pid}-": role for role in ("train", "train-2")}
    by_role = {}
    for run in runs:
        [started] = [event.fact for event in run.events() if isinstance(event.fact, AttemptStarted)]
        by_role[next(role for pid, role in pids.items() if pid in started.worker)] = run
    assert by_role.keys() == {"train", "train-2"}, "a job each"
    stack.kill("train")
    assert stack.stop("train-2") == 0
    assert by_role["train-2"].record().last_reason == "interrupted"
    stack.start("train", "train-2")
    for run in runs:
        stack.wait_for(lambda run=run: run.record().attempt == 2 or None, "the next attempt")  # type: ignore[misc]
    assert [event.fact.reason for event in by_role["train"].events() if isinstance(event.fact, AttemptEnded)] == [
        "worker_lost"
    ]


def test_a_ticket_that_names_another_function_is_refused(stack: Stack, tmp_path: Path) -> None:
    stack.start_if_gone("check")
    queue = rq.Queue(queue_name(Stage.CHECK), connection=connect(stack.redis.url), serializer=JSONSerializer)
    proof = tmp_path / "proof"
    evil = queue.enqueue("os.mkdir", str(proof), job_timeout=-1)
    stack.wait_for(lambda: "asks for 'os.mkdir'" in (stack.home / "check.log").read_text() or None, "a refusal")
    stack.wait_for(lambda: (evil.id not in queue.job_ids and not queue.connection.exists(evil.key)) or None, "its end")
    assert not proof.exists()


@pytest.mark.parametrize("victim", ["parent", "horse"])
def test_nobody_outlives_its_parent(stack: Stack, victim: str) -> None:
    stack.start_if_gone(*BUT_TRAIN, "train")
    run = stack.submit(tiny_job(training={"epochs": 200, "batch_size": 8}))
    stack.wait_for_event(run, "model.loaded")
    parent = stack.processes["train"].pid
    [trainer] = trainers(run)
    [horse] = set(children(parent)) - {parent_of(trainer)}
    family = [horse, trainer]
    if victim == "parent":
        stack.kill("train")
    else:
        os.kill(horse, signal.SIGKILL)
    stack.wait_for(lambda: not any(alive(pid) for pid in family) or None, "the end of the family", 5)
    assert Store(connect(stack.redis.url)).maintenance.leased(run.id), (
        "the lease runs out by itself; reconcile takes over then"
    )


class Swallows(StageWorker):
    """As a library may: takes the stop that falls into its hands for a fault of its own, once."""

    heartbeats_after: int | None = None

    def run_maintenance_tasks(self) -> None:
        with contextlib.suppress(StopRequested):
            os.kill(os.getpid(), signal.SIGTERM)  # Python runs the handler before the next line
            raise AssertionError("RQ has not raised StopRequested")
        self.heartbeats_after = 0

    def heartbeat(self, *arguments: Any, **more: Any) -> None:
        if self.heartbeats_after is not None:
            self.heartbeats_after += 1
        super().heartbeat(*arguments, **more)


def test_a_stop_that_somebody_swallowed_is_obeyed_all_the_same(redis_url: str, tmp_path: Path) -> None:
    settings = from_environment(
        {"LONGHAUL_DEVICE": "cpu", "LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(tmp_path / "runs")}
    )
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    worker = Swallows(Stage.CHECK, settings, first_heartbeat("check", settings))
    try:
        worker.work(logging_level="WARNING")
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert worker.heartbeats_after == 1


class Leaves(StageWorker):
    """Stopped at its third heartbeat."""

    heartbeats = 0

    def heartbeat(self, *arguments: Any, **more: Any) -> None:
        super().heartbeat(*arguments, **more)
        self.heartbeats += 1
        if self.heartbeats == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("there", ["nothing", "another folder"])
def test_a_worker_with_another_runs_directory_than_that_of_the_jobs_leaves_tickets_to_others(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    store, tickets, runs = Store(connect(redis_url)), Tickets(connect(redis_url)), tmp_path / "runs"
    runs.mkdir()
    if there == "another folder":
        identified(runs)
    store.maintenance.name_runs("that of the first box")
    tickets.add(Stage.CHECK)
    monkeypatch.setattr("worker.stage_worker.RETRY_S", 0.01)
    settings = from_environment({"LONGHAUL_DEVICE": "cpu", "LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(runs)})
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    worker = Leaves(Stage.CHECK, settings, first_heartbeat("check", settings))
    try:
        worker.work(logging_level="WARNING")
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert tickets.count(Stage.CHECK) == 1
    [said] = store.workers.all()
    assert not said.healthy and "the runs directory of the jobs in Redis; mount that one" in (said.why or "")


def check_worker(tmp_path: Path, redis_url: str) -> StageWorker:
    """One of *check*, in this process."""
    settings = from_environment(
        {"LONGHAUL_DEVICE": "cpu", "LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(tmp_path / "runs")}
    )
    return StageWorker(Stage.CHECK, settings, first_heartbeat("check", settings))


def test_a_worker_says_that_its_clock_differs_from_that_of_redis(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, store, right = check_worker(tmp_path, redis_url), Store(connect(redis_url)), time.time

    def said() -> float | None:
        for _ in range(2):  # of the answer to one heartbeat the next one tells
            worker.heartbeat()
        return store.workers.all()[0].clock_ahead_s

    assert said() is None
    monkeypatch.setattr("worker.heartbeat.time.time", lambda: right() + 3600)
    assert 3595 < (said() or 0) < 3605
    monkeypatch.undo()
    assert said() is None


def test_a_stop_that_comes_as_the_horse_has_ended_stops_the_worker(tmp_path: Path, redis_url: str) -> None:
    worker = check_worker(tmp_path, redis_url)
    with subprocess.Popen(["true"]) as horse:
        pass
    worker._horse_pid = horse.pid
    with pytest.raises(StopRequested):
        worker.request_stop(signal.SIGTERM, None)


def test_a_trainer_stops_when_a_repair_cuts_its_attempt_off(tmp_path: Path, data: Path) -> None:
    """What is said of the job then is true: it waits and resumes from its checkpoint, or it is cancelled."""

    def cut_off() -> None:
        stack.wait_for(lambda: run.metrics()[-1].step > 4 or None if run.metrics() else None, "the trainer to train")
        destroyed(run, 5)
        assert stack.post(run, "repair").json()["job"]["status"] == "queued"

    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare", "train", "publish")
        long = {"epochs": 2000, "batch_size": 8, "learning_rate": 0.003}
        rarely = {"every_steps": 4000, "every_minutes": None, "keep": 2}
        run = stack.submit(tiny_job(training=long, checkpoint=rarely, evaluation={"every_steps": 4000, "samples": 0}))
        stack.wait_for_event(run, "attempt.started")
        cut_off()
        loaded = stack.wait_for_event(run, "model.loaded").fact
        assert isinstance(loaded, ModelLoaded) and loaded.resumed_step
        cut_off()
        assert stack.post(run, "cancel").json()["status"] == "cancelled"
        stack.wait_for(lambda: None if run.held() else True, "the trainer to stop")
        assert [event.type for event in run.events()][4:] == ["job.repaired", "job.cancelled"]
