"""Reconcile: lost tickets, lost projections, lost workers, a wiped Redis – each put right from the run directories."""

from __future__ import annotations

import fcntl
import multiprocessing
import threading
import time
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import redis

from benchmarks.rebuild import story, write
from jobs.attempt import Noted
from jobs.disk.files import append_line
from jobs.disk.removal import move_away
from jobs.disk.rundir import RunDir, create, list_runs, submitted_under
from jobs.errors import NewerFormat, Recovering
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPriorityChanged,
    JobSubmitted,
    JobValidated,
)
from jobs.heartbeat import Gpu, TrainWorker, WorkerHeartbeat
from jobs.redis.connection import Tickets, connect
from jobs.redis.gauges import Gauges
from jobs.redis.store import Store
from jobs.redis.workers import lease_token
from jobs.spec import parse_spec
from jobs.state import Stage, Status
from jobs.trainer_facts import CheckpointSaved, DeviceWaiting, Fault
from tests.sinks.driving import until
from tests.support.machine import Clock
from tests.support.samples import QUEUED, STARTED, checked, heartbeat, stumble_over, write_plan
from worker.ending import ending
from worker.reconcile import MOST_EXPIRIES, REFUSED_DRY_RUN_S, Reconciler
from worker.settings import from_environment
from worker.supervise import CONTEXT, WorkerContext, work


class House:
    """A store, tickets and a reconciler over one folder of runs."""

    def __init__(self, url: str, runs: Path) -> None:
        self.client: redis.Redis = connect(url)
        self.runs = runs
        self.store = Store(self.client)
        self.tickets = Tickets(self.client)
        self.clock = Clock(0.0)
        self.wall_clock = Clock(time.time())
        self.reconciler = Reconciler(
            runs, self.store, self.tickets, lease_s=0.0, clock=self.clock, wall_clock=self.wall_clock
        )

    def submit(
        self, job: str, *facts: AnyFact, resources: dict[str, Any] | None = None, dry_run: bool = False
    ) -> RunDir:
        first = JobSubmitted(
            name=job, model="m", spec_sha256="s", idempotency_key=f"key-{job}", body_sha256="b", dry_run=dry_run
        )
        spec = parse_spec({"data": {"train": "rows.jsonl"}, "resources": resources or {}})
        run, _ = create(self.runs, job, spec, first)
        self.store.project(run, run.record(), run.events())
        if facts:
            self.store.append(run, facts)
        return run

    def begun(self, job: str) -> RunDir:
        """A job in its first attempt."""
        run = self.submit(job, *QUEUED)
        assert self.store.claim(Stage.TRAIN, "t") == job
        self.store.append(run, [STARTED])
        return run

    def run_out(self, job: str) -> None:
        """Let the lease on a job run out."""
        self.client.zadd("longhaul:leases", {job: 1})


@pytest.fixture
def house(redis_url: str, tmp_path: Path) -> House:
    return House(redis_url, tmp_path)


@pytest.fixture
def wiped(house: House) -> House:
    """The same with a Redis that is new."""
    house.client.flushall()
    return house


def types(run: RunDir) -> list[str]:
    return [event.type for event in run.events()]


def test_lost_tickets_are_added_and_not_more(house: House) -> None:
    house.submit("a")
    house.submit("b", *QUEUED)
    house.submit("c", *QUEUED)
    for _ in range(3):
        house.reconciler.run_once()
    assert [house.tickets.count(stage) for stage in Stage] == [1, 0, 2]


def test_an_expired_lease_in_check_puts_the_job_back_at_most_five_times(house: House) -> None:
    run = house.submit("a")
    for count in range(1, MOST_EXPIRIES + 1):
        assert house.store.claim(Stage.CHECK, f"t{count}") == "a"
        house.run_out("a")
        house.reconciler.run_once()
    record = run.record()
    assert record.status is Status.FAILED and record.error is not None
    assert (record.error.code, types(run)) == ("worker_lost", ["job.submitted", "job.failed"])
    assert house.store.get("a").record == record


def test_an_expiry_sent_twice_counts_once(house: House) -> None:
    house.submit("a")
    assert house.store.claim(Stage.CHECK, "t") == "a"
    house.run_out("a")
    assert (house.store.maintenance.expire("a", "t"), house.store.maintenance.expire("a", "t")) == (1, 1)
    assert house.store.claim(Stage.CHECK, "t2") == "a"
    assert house.store.maintenance.expire("a", "t") == 0, "the new holder's lease is not the old one's"


def test_a_running_job_whose_worker_is_gone_is_queued_again_in_its_place(house: House) -> None:
    run = house.begun("a")
    fact = CheckpointSaved(step=3, path="checkpoints/step-00000003", bytes=1, seconds=0.1)
    append_line(run.attempt_file(1), Noted(at=1.0, fact=fact))
    write_plan(run)
    house.run_out("a")
    house.reconciler.run_once()
    assert types(run)[-4:] == ["attempt.started", "checkpoint.saved", "attempt.ended", "job.queued"]
    stored = house.store.get("a")
    assert (stored.record.last_reason, stored.record.restarts, stored.position) == ("worker_lost", 0, 0)
    assert house.tickets.count(Stage.TRAIN) == 1


def test_the_loss_of_a_box_names_it(house: House) -> None:
    run = house.submit("a", *QUEUED, AttemptStarted(worker="train-one", device="cpu", box="gpu2"))
    write_plan(run)
    house.reconciler.run_once()
    ended = next(event.fact for event in run.events() if isinstance(event.fact, AttemptEnded))
    assert ended.error is not None and "it was not heard of for too long (box gpu2)" in ended.error.message


def test_a_lease_is_not_judged_while_a_trainer_holds_the_run(house: House) -> None:
    run = house.begun("a")
    house.run_out("a")
    with open(run.lock_file, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        house.reconciler.run_once()
        assert run.record().status is Status.RUNNING
        assert house.store.renew("a", "t"), "its supervisor takes the lease again"
    house.reconciler.run_once()
    assert run.record().status is Status.RUNNING


def test_leases_are_judged_only_after_redis_was_there_for_a_whole_lease(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = house.begun("a")
    house.run_out("a")
    # Redis' own uptime counts too: make it count as long enough, and the reconciler's memory decide
    monkeypatch.setattr(house.store.maintenance, "uptime_s", lambda: 1e9)
    patient = Reconciler(house.runs, house.store, house.tickets, lease_s=30.0, clock=house.clock)
    patient.run_once()
    house.clock.now = 29.0
    patient.run_once()
    assert run.record().status is Status.RUNNING
    house.clock.now = 30.0
    patient.run_once()
    assert run.record().status is Status.QUEUED


def test_a_wiped_redis_is_rebuilt_from_the_directories(house: House) -> None:
    house.submit("a", *QUEUED)
    house.submit("b")
    house.submit("c", *QUEUED)
    before = {name: house.store.get(name) for name in "abc"}
    house.client.flushall()
    house.reconciler.run_once()
    assert {name: house.store.get(name) for name in "abc"} == before
    assert [event.number for event in house.store.events("a")] == [1, 2, 3, 4]
    assert house.store.reserve("key-a", "new", "b") == ("a", "b")
    assert [house.tickets.count(stage) for stage in Stage] == [1, 0, 2]


def test_a_running_job_without_any_lease_is_taken_over(house: House) -> None:
    run = house.submit("a", *QUEUED, STARTED)
    house.client.flushall()
    house.reconciler.run_once()
    assert (run.record().status, run.record().last_reason) == (Status.QUEUED, "worker_lost")


def test_only_one_reconciles_at_a_time(house: House) -> None:
    house.reconciler.run_once()
    house.submit("a")
    Reconciler(house.runs, house.store, house.tickets, lease_s=0.0).run_once()
    assert house.tickets.count(Stage.CHECK) == 0
    house.reconciler.run_once()
    assert house.tickets.count(Stage.CHECK) == 1


def test_the_job_whose_turn_it_is_says_once_why_no_gpu_takes_it(house: House) -> None:
    first, second = house.submit("a", *QUEUED), house.submit("b", *QUEUED)
    house.store.workers.report(heartbeat("check-0"))
    house.reconciler.run_once()
    assert types(first)[-1] == "job.queued", "no train worker was heard of yet: one may just be starting"

    house.store.workers.report(heartbeat("train-0", why="no driver"))
    house.store.workers.report(heartbeat("train-1", why="no driver"))
    for _ in range(3):
        house.reconciler.run_once()
    assert types(first)[4:] == ["device.waiting"] and types(second)[-1] == "job.queued"
    assert house.store.get("a").record.waiting_reason == first.record().waiting_reason == "no driver"
    assert house.store.get("a").position == 0, "it moves nothing"

    house.store.workers.report(heartbeat("train-1", why="driver too old"))
    for _ in range(3):
        house.reconciler.run_once()
    assert types(first)[4:] == ["device.waiting"] * 2
    assert first.record().waiting_reason == "driver too old; no driver"

    house.store.append(first, [JobPaused()])
    house.reconciler.run_once()
    assert first.record().waiting_reason is None and types(second)[-1] == "device.waiting", "the next in the order"


def test_with_one_usable_gpu_nobody_waits_for_another(house: House) -> None:
    run = house.submit("a", *QUEUED)
    house.store.workers.report(heartbeat("train-0", why="no driver"))
    house.store.workers.report(heartbeat("train-1"))
    house.reconciler.run_once()
    assert types(run)[-1] == "job.queued"


def on(name: str, gpu: str | None, gib: int = 32, why: str | None = None) -> WorkerHeartbeat:
    """A train worker with this GPU."""
    has = None if gpu is None else Gpu(uuid=f"GPU-{name}", name=gpu, memory_bytes=gib * 2**30, driver="580")
    return heartbeat(name, why=why, device="cuda", gpu=has)


def test_jobs_that_no_gpu_here_can_take_say_so_until_there_is_one(house: House) -> None:
    plain = house.submit("a", *QUEUED)
    asking = [house.submit(job, *QUEUED, resources={"gpu_name": "H200"}) for job in "bc"]
    house.store.workers.report(on("train-0", "NVIDIA L4"))
    for _ in range(2):
        house.reconciler.run_once()
    assert house.tickets.count(Stage.TRAIN) == 1, "those that nobody here can take have none"
    none = "no GPU here can take the job: NVIDIA L4 is not 'h200'"
    assert [run.record().waiting_reason for run in (plain, *asking)] == [None, none, none]
    assert [types(run)[4:] for run in (plain, *asking)] == [[], ["device.waiting"], ["device.waiting"]]
    house.store.workers.report(on("train-1", None, why="no driver"))
    house.reconciler.run_once()
    there = "there is a GPU again that can take the job: it waits for its turn"
    assert asking[0].record().waiting_reason in (there, "no driver"), "it may turn out to be one"
    house.store.workers.report(on("train-1", "NVIDIA H200"))
    for _ in range(2):
        house.reconciler.run_once()
    assert house.tickets.count(Stage.TRAIN) == 2, "one for each idle worker"
    told = [event.fact for run in asking for event in run.events() if isinstance(event.fact, DeviceWaiting)]
    assert {(fact.message == there, fact.available) for fact in told} == {(False, False), (True, True)}
    trainer = TrainWorker(device="cuda", gpu=on("train-1", "NVIDIA H200").gpu)
    assert house.store.claim(Stage.TRAIN, "t", trainer) == "a"
    assert house.store.claim(Stage.TRAIN, "u", trainer) == "b"


def test_a_job_whose_only_gpu_is_lost_says_why_while_another_works(house: House) -> None:
    large = house.submit("a", *QUEUED, resources={"gpu_memory_gib": 48})
    small = house.submit("b", *QUEUED)
    house.store.workers.report(on("train-0", "NVIDIA L4"))
    house.store.workers.report(on("train-1", "NVIDIA RTX A6000", 48, why="GPU is lost"))
    for _ in range(2):
        house.reconciler.run_once()
    assert (large.record().waiting_reason, small.record().waiting_reason) == ("GPU is lost", None)
    assert house.tickets.count(Stage.TRAIN) == 1


def test_a_worker_with_nothing_to_do_leaves_a_ticket_to_the_one_it_is_for(house: House) -> None:
    house.reconciler.run_once()
    house.submit("a", *QUEUED, resources={"gpu_name": "H200"})
    stopping, lost = threading.Event(), multiprocessing.get_context("fork").Event()
    settings = from_environment({"LONGHAUL_RUNS": str(house.runs)})
    small = on("train-0", "NVIDIA L4").gpu
    context = WorkerContext(settings, house.store, house.tickets, "train-0", stopping, small, lost)
    house.store.workers.report(on("train-0", "NVIDIA L4"))
    for trainers, tickets in (
        ([], 0),
        ([on("train-1", "NVIDIA H200", why="lost")], 0),
        ([on("train-1", "NVIDIA H200")], 1),
    ):
        for trainer in trainers:
            house.store.workers.report(trainer)
        here = copy_context()
        here.run(CONTEXT.set, context)
        here.run(work, "train")
        assert house.tickets.count(Stage.TRAIN) == tickets


def test_a_slot_adds_no_ticket_while_a_job_waits_for_its_gpu_to_be_empty(house: House) -> None:
    house.reconciler.run_once()
    gpu = on("train-0", "NVIDIA L4").gpu
    for slot in (0, 1):
        house.store.workers.report(heartbeat(f"train-{slot}", device="cuda", gpu=gpu, slot=slot))
    trial = house.submit("trial", *QUEUED)
    house.client.hset("longhaul:job:trial", "trial", "1")
    token = lease_token("train-1")
    assert house.store.claim(Stage.TRAIN, token, TrainWorker(device="cuda", gpu=gpu, slot=1)) == "trial"
    house.submit("job", *QUEUED)
    house.submit("behind", *QUEUED)
    house.client.hset("longhaul:job:behind", "trial", "1")
    lost = multiprocessing.get_context("fork").Event()
    settings = from_environment({"LONGHAUL_RUNS": str(house.runs)})
    context = WorkerContext(settings, house.store, house.tickets, "train-0", threading.Event(), gpu, lost)
    here = copy_context()
    here.run(CONTEXT.set, context)
    for _ in range(3):
        here.run(work, "train")
        house.reconciler.run_once()
        assert house.tickets.count(Stage.TRAIN) == 0
    house.store.append(trial, [JobCancelled()], release=token)
    house.reconciler.run_once()
    assert house.tickets.count(Stage.TRAIN) == 1, "for the job alone, not for what is behind it"
    assert house.store.claim(Stage.TRAIN, lease_token("train-0"), context.train_worker) == "job"


def test_a_wait_for_a_gpu_ends_with_the_attempt_and_is_none_of_its_trainers_facts(house: House) -> None:
    run = house.submit("a", *QUEUED, DeviceWaiting(message="no driver"))
    record, _ = house.store.append(run, [STARTED])
    assert (record.waiting_reason, record.noted) == (None, 0)
    record, _ = house.store.append(run, [DeviceWaiting(message="another trainer holds the GPU")])
    assert (record.waiting_reason, record.noted) == (None, 1)


@pytest.mark.parametrize("damage", [b"not json", b"{}", b'{"data": 3}', b"[]"])
def test_a_specification_that_cannot_be_read_stops_nobody_else(house: House, damage: bytes) -> None:
    house.submit("a").spec_file.write_bytes(damage)
    house.submit("b", *QUEUED)
    house.client.flushall()
    house.reconciler.run_once()
    assert house.store.all_damaged() == ["a"] and house.tickets.count(Stage.TRAIN) == 1


def test_a_directory_that_cannot_be_read_stops_nobody_else(house: House) -> None:
    broken = house.submit("a")
    broken.events_file.write_bytes(b"not json\n")
    assert house.store.claim(Stage.CHECK, "t1") == "a"
    lost = house.submit("b", *QUEUED, STARTED)
    for job in "ab":
        house.client.zadd("longhaul:leases", {job: 1})
    house.reconciler.run_once()
    assert lost.record().status is Status.QUEUED


@pytest.mark.parametrize("emptied", [False, True])
def test_a_job_with_an_error_that_nobody_foresaw_stops_nobody_else(
    house: House, emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = house.submit("odd")
    stumble_over(monkeypatch, "odd")
    house.store.append(odd, QUEUED)
    house.submit("well", *QUEUED)
    if emptied:
        house.client.flushall()
    for _ in range(2):
        house.reconciler.run_once()
    assert {job.id for job in house.store.page(limit=10)[0]} == {"odd", "well"}
    damage = house.store.get("odd").damage
    assert damage is not None and damage.hint is not None
    assert "LookupError" in damage.message and "`longhaul cancel odd`" in damage.hint
    assert [house.store.claim(Stage.TRAIN, token) for token in "ab"] == ["well", None]
    house.store.append(odd, [JobCancelled()])
    assert move_away(odd).is_dir(), "the hint works"


def test_a_job_that_cannot_be_taken_over_stops_nobody_else(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    odd, well = (house.submit(job, *QUEUED, STARTED) for job in ("odd", "well"))

    def stumbling(run: RunDir, *more: Any) -> list[AnyFact]:
        if run.id == odd.id:
            raise LookupError("rank")
        return ending(run, *more)

    monkeypatch.setattr("worker.reconcile.ending", stumbling)
    house.reconciler.run_once()
    assert (odd.record().status, well.record().status) == (Status.RUNNING, Status.QUEUED)


def test_who_takes_over_from_a_reconciler_that_was_killed_judges_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen Redis for a whole lease while the dead one's key ran out, and need not wait for another."""
    run = house.begun("a")
    house.run_out("a")
    monkeypatch.setattr(house.store.maintenance, "uptime_s", lambda: 1e9)
    killed, heir = (
        Reconciler(house.runs, house.store, house.tickets, lease_s=30.0, clock=house.clock) for _ in range(2)
    )
    assert killed.run_once() and not heir.run_once()
    house.clock.now = 45.0
    house.client.delete("longhaul:reconcile")  # its time has run out
    assert heir.run_once() and run.record().status is Status.QUEUED


def test_who_stops_in_good_order_leaves_the_lead_to_the_next_at_once(house: House) -> None:
    stop = threading.Event()
    stop.set()
    assert house.reconciler.run_once()
    house.reconciler.run(stop)
    assert Reconciler(house.runs, house.store, house.tickets).run_once()


def test_after_a_wipe_holders_have_a_whole_lease_to_come_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor whose trainer is still loading holds no lock; its lease was wiped and is taken again within 5 s."""
    run = house.begun("a")
    monkeypatch.setattr(house.store.maintenance, "uptime_s", lambda: 1e9)
    patient = Reconciler(house.runs, house.store, house.tickets, lease_s=30.0, clock=house.clock)
    for house.clock.now in (0.0, 100.0):
        patient.run_once()
    house.client.flushall()
    house.clock.now = 115.0
    patient.run_once()
    assert run.record().status is Status.RUNNING
    assert house.store.renew("a", "t")
    house.clock.now = 145.0
    patient.run_once()
    assert run.record().status is Status.RUNNING


def test_a_key_is_given_back_though_an_event_has_told_redis_of_the_job_again(house: House) -> None:
    run = house.submit("a")
    house.reconciler.run_once()
    house.client.flushall()
    house.store.append(run, QUEUED)
    assert house.store.number("a") == run.record().number
    house.reconciler.run_once()
    assert house.store.reserve("key-a", "new", "b") == ("a", "b")


def test_dry_runs_that_came_to_nothing_are_deleted_after_a_day(house: House) -> None:
    failed = JobFailed(error=Fault(code="bad_data", message="m", hint="h"))
    ends: dict[str, AnyFact] = {"failed": failed, "cancelled": JobCancelled()}
    for name, end in ends.items():
        house.submit(f"dry-{name}", end, dry_run=True)
        house.submit(f"real-{name}", end)
    house.submit("dry-validated", checked(), JobValidated(), dry_run=True)
    house.submit("dry-open", dry_run=True)
    everything, ended = {run.id for run in list_runs(house.runs)}, time.time()
    for later, gone in ((REFUSED_DRY_RUN_S - 600, set[str]()), (REFUSED_DRY_RUN_S, {"dry-failed", "dry-cancelled"})):
        house.wall_clock.now = ended + later
        house.reconciler.run_once()
        assert {run.id for run in list_runs(house.runs)} == everything - gone
        assert house.store.maintenance.known() == everything - gone


def test_until_a_wiped_redis_is_rebuilt_the_directories_say_whose_key_it_is(wiped: House) -> None:
    house = wiped
    house.submit("a")

    def on_disk() -> tuple[str, str] | None:
        return submitted_under(house.runs, "key-a")

    assert house.store.reserve("key-a", "new", "b", on_disk=on_disk) == ("a", "b")
    assert house.store.reserve("key-z", "z", "b", on_disk=lambda: submitted_under(house.runs, "key-z")) == ("z", "b")
    house.reconciler.run_once()

    def never() -> tuple[str, str] | None:
        raise AssertionError("Redis knows everything: nobody looks on disk")

    assert house.store.reserve("key-y", "y", "b", on_disk=never) == ("y", "b")


def test_a_rebuilding_that_is_wiped_half_way_is_not_taken_for_done(wiped: House) -> None:
    house = wiped
    assert house.store.maintenance.begin_rebuild("one")
    house.client.flushall()
    assert not house.store.maintenance.end_rebuild("one")
    assert house.store.maintenance.begin_rebuild("two") and house.store.maintenance.end_rebuild("two")
    assert not house.store.maintenance.begin_rebuild("three")


def test_until_redis_knows_all_jobs_none_is_claimed_or_listed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of higher priority may be among those that it has not heard of."""
    house.submit("low", *QUEUED)
    high = house.submit("high", *QUEUED, JobPriorityChanged(priority=9))
    house.client.flushall()
    low = RunDir(house.runs / "low")
    project = house.store.project

    def asked_half_way(run: RunDir, *more: Any, **named: Any) -> None:
        project(run, *more, **named)
        if house.client.zcard("longhaul:jobs") == 1:
            assert house.store.claim(Stage.TRAIN, f"early-{run.id}") is None
            for ask in (
                lambda: house.store.page(limit=10),
                lambda: house.store.get(run.id),
                lambda: house.store.using("rows.jsonl"),
                Gauges(house.client).read,
            ):
                with pytest.raises(Recovering):
                    ask()
            told.append(run.id)

    told: list[str] = []
    monkeypatch.setattr(house.store, "project", asked_half_way)
    house.store.append(low, [JobPriorityChanged(priority=1)])  # an event of its own tells Redis of it
    assert told == ["low"]
    house.reconciler.run_once()
    assert [house.store.claim(Stage.TRAIN, token) for token in "ab"] == [high.id, low.id]
    assert [job.id for job in house.store.page(limit=10)[0]] == ["high", "low"]


def test_a_redis_that_was_emptied_is_rebuilt_without_waiting_for_the_next_look(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.reconcile.EVERY_S", 3600.0)
    monkeypatch.setattr("worker.reconcile.LOOK_S", 0.01)
    house.submit("a", *QUEUED)
    stop = threading.Event()
    thread = threading.Thread(target=house.reconciler.run, args=(stop,))
    thread.start()
    try:
        until(lambda: house.tickets.count(Stage.TRAIN) == 1)
        house.client.flushall()
        until(lambda: house.tickets.count(Stage.TRAIN) == 1)
        assert house.store.get("a").position == 0
    finally:
        stop.set()
        thread.join()


def test_two_thousand_jobs_are_all_there_before_one_can_be_claimed(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting, trained = story(evaluations=10)
    for number in range(2000):
        write(RunDir(house.runs / f"job-{number:06}"), waiting if number % 10 else waiting + trained)
    house.client.flushall()
    start = time.monotonic()
    house.reconciler.run_once()
    seconds = time.monotonic() - start
    with capsys.disabled():
        print(f" [2,000 jobs rebuilt in {seconds:.1f} s]", end="")
    assert len(house.store.maintenance.known()) == 2000
    assert house.tickets.count(Stage.TRAIN) == house.store.waiting(Stage.TRAIN) == 1800
    assert house.store.claim(Stage.TRAIN, "t") == "job-000001"


def taken(house: House, runs: Path) -> WorkerContext:
    """A train worker whose runs directory this is has taken a ticket."""
    outdated, lost = (multiprocessing.get_context("fork").Event() for _ in range(2))
    settings = from_environment({"LONGHAUL_DEVICE": "cpu", "LONGHAUL_RUNS": str(runs)})
    worker = WorkerContext(
        settings, house.store, house.tickets, "train-0", threading.Event(), None, lost, outdated=outdated
    )
    horse = copy_context()
    horse.run(CONTEXT.set, worker)
    horse.run(work, "train")
    return worker


def test_a_job_whose_directory_a_box_does_not_see_is_not_forgotten(house: House, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    run = house.submit("a", *QUEUED)
    house.reconciler.run_once()
    taken(house, tmp_path / "own")
    assert house.store.get("a").record == run.record() and house.store.maintenance.leased("a")
    house.run_out("a")
    house.reconciler.run_once()
    assert house.store.claim(Stage.TRAIN, "t") == "a"


def newer(run: RunDir) -> None:
    raise NewerFormat(f"a newer version of Longhaul wrote an event of {run.id}")


def test_a_job_of_a_newer_version_is_left_to_that(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.submit("a", *QUEUED)
    house.reconciler.run_once()
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "verified", newer)
        worker = taken(house, house.runs)
    assert worker.outdated is not None and worker.outdated.is_set()
    assert house.store.all_damaged() == [] and house.store.claim(Stage.TRAIN, "t") == "a"


def test_a_damaged_job_that_is_in_no_list_any_more_does_not_stop_reconcile(house: House) -> None:
    run = house.submit("a", *QUEUED)
    whole = run.events_file.read_bytes()
    run.events_file.write_bytes(b"damage\n" + whole)
    house.reconciler.run_once()
    assert house.store.all_damaged() == ["a"]
    house.client.delete("longhaul:jobs")
    run.events_file.write_bytes(whole)
    house.reconciler.run_once()
    assert house.store.all_damaged() == []
