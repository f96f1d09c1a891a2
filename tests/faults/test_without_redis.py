"""Redis goes away, hangs or is wiped: no step and no event is lost, nothing is twice, and the order stays as it was."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import requests

from jobs.disk.rundir import RunDir, create
from jobs.events import Event, JobQueued, JobSubmitted
from jobs.redis.connection import connect
from jobs.redis.store import Store, StoredJob
from jobs.spec import parse_spec
from jobs.state import Stage, Status
from tests.faults.conftest import (
    LiveReader,
    MakeJob,
    Undisturbed,
    assert_all_is_told,
    assert_as_if_nothing_had_happened,
    small_job,
)
from tests.support.processes import continue_once_asked, freeze, stepping, thaw
from tests.support.samples import checked, prepared, reasons
from tests.support.shared_stack import stop_in_order
from tests.support.stack import Stack
from worker.training.checkpoints.checkpoint import verify


def test_an_idle_worker_ends_on_sigterm_while_redis_is_away(stack: Stack) -> None:
    # Killed: Redis, for good, then SIGTERM to an idle worker. Must hold: it ends (docker stop, `longhaul local`).
    store = Store(connect(stack.redis.url))
    stack.wait_for(lambda: any(each.stage == "check" for each in store.workers.all()) or None, "its heartbeat")
    stack.redis.stop()
    assert stack.stop("check", timeout=300) == 0


def test_a_worker_at_work_ends_on_sigterm_while_redis_is_away(stack: Stack, queued: MakeJob) -> None:
    # Killed: Redis (AOF) in the middle of a run, then SIGTERM to the train worker. Must hold: the trainer saves, the
    # worker ends well before a grace period is over, the file says `queued`, and so does Redis once it is back. (That
    # such a job continues, bit for bit, is test_signals.py's; here it would first wait for the lease to run out.)
    run = queued()
    trainer = freeze(stack, run, stepping(5, 15))
    stack.redis.stop()
    worker = stack.processes.pop("train")
    worker.send_signal(signal.SIGTERM)
    continue_once_asked(stack, trainer)
    try:
        assert worker.wait(300) == 0
    finally:
        worker.kill()
    record = run.record()
    assert (record.status, record.last_reason) == (Status.QUEUED, "interrupted")
    assert 5 <= record.progress_step < 16 and record.checkpoint is not None
    assert verify(run.path / record.checkpoint).step == record.progress_step
    stack.redis.start()
    store = Store(connect(stack.redis.url))
    stack.wait_for(lambda: store.number(run.id) == record.number or None, "the projection")
    assert store.get(run.id).record == record
    cancelled = stack.post(run, "cancel").json()
    assert (cancelled["status"], run.record().checkpoint) == ("cancelled", record.checkpoint)


def test_a_job_that_ends_while_redis_is_away(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # kill -9 of Redis (AOF) in the middle of a run; it is back when the job has ended. Must hold: meanwhile a POST
    # is 503 and leaves nothing on disk; later everybody hears of every event, once; the worker takes the next job.
    run = queued()
    with LiveReader(stack, run) as follower:
        trainer = freeze(stack, run, stepping(2, 14))
        stack.wait_for(lambda: 5 in follower.numbers or None, "attempt.started")
        stack.redis.stop()
        thaw(trainer)
        stack.wait_for_event(run, "job.succeeded", "job.failed")
        before = sorted(os.listdir(stack.runs))
        assert requests.post(f"{stack.url}/jobs", json=small_job(), timeout=60).status_code == 503
        assert sorted(os.listdir(stack.runs)) == before
        stack.redis.start()
        assert_all_is_told(stack, run, follower)
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["done"]
    stack.wait_for_event(queued(), "job.succeeded")


def test_redis_hangs(stack: Stack, undisturbed: Undisturbed, queued: MakeJob) -> None:
    # SIGSTOP of Redis in the middle of a run, until the job has ended: connections stay open, nobody answers.
    # Must hold: one attempt, no step and no event missing or twice.
    run = queued()
    with LiveReader(stack, run) as follower:
        trainer = freeze(stack, run, stepping(2, 14))
        os.kill(stack.redis.pid, signal.SIGSTOP)
        try:
            thaw(trainer)
            stack.wait_for_event(run, "job.succeeded", "job.failed")
        finally:
            os.kill(stack.redis.pid, signal.SIGCONT)
        assert_all_is_told(stack, run, follower)
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["done"]


def test_redis_wiped_mid_run(stack: Stack, undisturbed: Undisturbed) -> None:
    # FLUSHALL in the middle of a run; then, at once, the POST that made the job, 50 times in parallel, and another body
    # under its key. Must hold: it is the same job (the key is in its directory), 409; the run has one attempt, no gap.
    def post(**body: object) -> requests.Response:
        return requests.post(
            f"{stack.url}/jobs", json=small_job(**body), headers={"Idempotency-Key": "mid-run"}, timeout=60
        )

    run = RunDir(stack.runs / post().json()["id"])
    with LiveReader(stack, run) as follower:
        trainer = freeze(stack, run, stepping(2, 14))
        stack.redis.flush()
        with ThreadPoolExecutor(50) as pool:
            answers = set(pool.map(lambda _: (post().status_code, post().json()["id"]), range(25)))
        assert answers == {(202, run.id)}
        assert post(name="other").status_code == 409
        thaw(trainer)
        assert_as_if_nothing_had_happened(stack, run, undisturbed)
        assert_all_is_told(stack, run, follower)
    assert reasons(run) == ["done"]


def test_redis_restarted_and_wiped_mid_queue(stack: Stack, undisturbed: Undisturbed, tmp_path: Path) -> None:
    # kill -9 of Redis (AOF), then FLUSHALL, while jobs of several priorities wait. Must hold: positions, records and
    # events are as before, each time; the jobs are then taken in that order.
    stop_in_order(stack, "train")
    store = Store(connect(stack.redis.url))
    plan, runs = undisturbed.run.plan(), {}
    for name, priority in (("second", 0), ("third", 0), ("first", 5), ("last", -3)):
        spec = parse_spec(small_job(name=name, priority=priority, integrations={"wandb": None}))
        first = JobSubmitted(name=name, model="m", spec_sha256=spec.sha256(), priority=priority, wandb=False)
        runs[name], _ = create(stack.runs, f"job-waits-{name}", spec, first)
        # With a model that is there and is none, each of them is taken by a trainer, and refused. (Were a file gone,
        # *prepare* would fetch the model again.)
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").touch()
        model = plan.model.model_copy(update={"folder": str(tmp_path)})
        runs[name].write_plan(plan.model_copy(update={"model": model}))
        store.append(runs[name], [checked(), prepared(1), JobQueued()])
    order = ["first", "second", "third", "last"]

    def known() -> list[tuple[StoredJob, list[Event]]] | None:
        if store.maintenance.wiped() or any(store.number(run.id) != 4 for run in runs.values()):
            return None
        waiting = [store.get(runs[name].id) for name in order]
        # Workers that ended a moment ago, and when the jobs may start on them, are not of the queue.
        alike = [replace(job, trainers=(), estimated_start=None, estimated_finish=None) for job in waiting]
        return [(job, store.events(job.record.id)) for job in alike]

    before = known()
    assert before is not None and [job.position for job, _ in before] == list(range(4))
    stack.redis.stop()
    stack.redis.start()
    assert known() == before
    stack.redis.flush()
    assert stack.wait_for(known, "the rebuilding") == before

    stack.start("train")
    for run in runs.values():
        stack.wait_for_event(run, "job.failed")
    starts = {
        name: next(event.at for event in run.events() if event.type == "attempt.started") for name, run in runs.items()
    }
    assert sorted(starts, key=starts.__getitem__) == order
    assert store.waiting(Stage.TRAIN) == 0
