"""A run directory is deleted, damaged or copied by hand, while its job waits or runs; every other job must continue."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jobs.attempt import Heartbeat
from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, create, list_runs
from jobs.events import AttemptStarted, JobQueued, JobSubmitted
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.spec import parse_spec
from jobs.state import Stage
from tests.support.samples import checked, prepared, write_plan
from tests.support.shared_stack import stop_in_order
from tests.support.stack import Stack
from worker.reconcile import Reconciler


def deleted(run: RunDir) -> None:
    shutil.rmtree(run.path.rename(run.path.parent.with_name(f"deleted-{run.id}")))  # sinks may just be writing in it


def garbage(run: RunDir) -> None:
    with open(run.events_file, "ab") as file:
        file.write(b"\0\0 not an event\n")


def doubled(run: RunDir) -> None:
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    run.events_file.write_bytes(b"".join([*lines, lines[-1]]))


def waiting(runs: Path, store: Store, job: str) -> RunDir:
    """A queued job, as the service and the workers leave it."""
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    run, _ = create(runs, job, spec, JobSubmitted(name=job, model="m", spec_sha256="s"))
    store.append(run, [checked(), prepared(10), JobQueued()])
    return run


def test_waiting_jobs_that_cannot_be_read_do_not_block_those_behind_them(stack: Stack) -> None:
    # Harmed: the first of the order of train, before a worker looks at them. Must hold: the next job's attempt starts.
    stop_in_order(stack, "train")
    store = Store(connect(stack.redis.url))
    *heads, behind = (waiting(stack.runs, store, f"job-{name}") for name in ("deleted", "garbage", "doubled", "whole"))
    for harm, head in zip((deleted, garbage, doubled), heads, strict=True):
        harm(head)
        Tickets(connect(stack.redis.url)).add(Stage.TRAIN)
    stack.start("train")
    stack.wait_for_event(behind, "attempt.ended")  # it has no plan
    for run in (*heads, behind):
        shutil.rmtree(run.path, ignore_errors=True)


def test_reconcile_passes_over_a_job_whose_events_do_not_add_up(redis_url: str, tmp_path: Path) -> None:
    # Harmed: events.jsonl of one job (a line twice), Redis wiped. Must hold: the other job is rebuilt.
    client = connect(redis_url)
    store = Store(client)
    first, second = waiting(tmp_path, store, "job-a"), waiting(tmp_path, store, "job-b")
    doubled(first)
    client.flushall()
    Reconciler(tmp_path, store, Tickets(client), lease_s=0.0).run_once()
    assert store.number(second.id) == second.record().number


def test_reconcile_takes_over_a_job_whose_attempt_file_is_damaged(redis_url: str, tmp_path: Path) -> None:
    # Harmed: attempts/1.jsonl has a line that is none, and its supervisor is gone. Must hold: it is queued again.
    client = connect(redis_url)
    store = Store(client)
    run = waiting(tmp_path, store, "job-a")
    write_plan(run)
    store.append(run, [AttemptStarted(worker="w", device="cpu")])
    append_line(run.attempt_file(1), Heartbeat(at=1.0, phase="step", step=3))
    with open(run.attempt_file(1), "ab") as file:
        file.write(b"\0\0\0\n")
    Reconciler(tmp_path, store, Tickets(client), lease_s=0.0).run_once()
    assert [event.type for event in run.events()][-2:] == ["attempt.ended", "job.queued"]


def test_a_copy_of_a_run_directory_is_no_second_job(redis_url: str, tmp_path: Path) -> None:
    # `cp -r runs/job-a runs/job-a-backup` while job-a waits. Must hold: one job waits, not two.
    client = connect(redis_url)
    store = Store(client)
    run = waiting(tmp_path, store, "job-a")
    shutil.copytree(run.path, tmp_path / "job-a-backup")
    Reconciler(tmp_path, store, Tickets(client), lease_s=0.0).run_once()
    assert store.waiting(Stage.TRAIN) == 1


def test_a_folder_that_may_not_be_entered_is_passed_over(tmp_path: Path) -> None:
    # runs/ is a disk of its own, with a lost+found of root in it. Must hold: the jobs beside it are listed.
    (tmp_path / "lost+found").mkdir(mode=0o700)
    (tmp_path / "lost+found").chmod(0)
    (tmp_path / "job-a").mkdir()
    (tmp_path / "job-a" / "events.jsonl").touch()
    for folder in (tmp_path, *tmp_path.parents):
        if os.geteuid() == 0 and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        assert [run.id for run in list_runs(tmp_path)] == ["job-a"]
    finally:
        if root:
            os.seteuid(0)
