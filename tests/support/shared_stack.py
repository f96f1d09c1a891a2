"""A stack that tests share: started once, mended before each, with other variables while a test needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from jobs.disk.rundir import RunDir, list_runs
from jobs.redis.connection import connect
from jobs.redis.store import Store
from tests.support.processes import alive, thaw, trainers
from tests.support.recipes import ROWS, write_recipes
from tests.support.stack import ROLES, Stack


def rows(home: Path) -> Path:
    """A data directory: 64 recipes, 12 others, 8 with no word of the 64, and labelled tickets."""
    lines = (write_recipes(home) / "held_out.jsonl").read_text().splitlines()
    unseen = [{**json.loads(line), "directions": [f"QXZ #{number} ZX%"]} for number, line in enumerate(lines[:8])]
    (home / "unseen.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in unseen))
    (home / "tickets.jsonl").write_bytes(ROWS.with_name("tickets.jsonl").read_bytes())
    return home


@contextmanager
def shared_stack(home: Path) -> Iterator[Stack]:
    """A stack in this folder, where its data are, too."""
    with Stack(home / "home", data=rows(home)) as stack:
        yield stack


def data_of(stack: Stack) -> Path:
    """Its data directory."""
    return Path(stack.environment["LONGHAUL_DATA"])


def mended(stack: Stack) -> Stack:
    """Redis and every role, running, and no job: what the test before has killed, or left when it failed, is mended."""
    stack.redis.start_if_gone()
    for role in [role for role, process in stack.processes.items() if process.poll() is not None]:
        del stack.processes[role]
    stack.start_if_gone("service")
    left = [run for run in list_runs(stack.runs) if not run.record().status.terminal] if stack.runs.exists() else []
    for run in left:
        answer = stack.post(run, "cancel")
        assert answer.ok or run.record().status.terminal, f"a test has left {run.id}: {answer.text}"
    stack.start_if_gone(*ROLES)
    workers = Store(connect(stack.redis.url)).workers
    for worker in workers.all():
        if not alive(worker.pid or 0):  # Redis would take it for a healthy one for another minute
            workers.forget(worker.name)
    for run in left:
        for pid in trainers(run):
            thaw(pid)
        stack.wait_for_event(run, "job.cancelled", "job.succeeded", "job.failed")
    return stack


def emptied(stack: Stack) -> Stack:
    """Without a job that has ended, either."""
    for run in list_runs(stack.runs):
        requests.delete(f"{stack.url}/jobs/{run.id}", timeout=60)
    return stack


@contextmanager
def restarted(stack: Stack, *roles: str, **variables: str | None) -> Iterator[None]:
    """Within, these roles run with such variables (None: without it). At the end they are stopped: `mended` starts them
    as they were.
    """
    before = dict(stack.environment)
    stop(stack, *roles)
    for name, value in variables.items():
        if value is None:
            del stack.environment[name]
        else:
            stack.environment[name] = value
    try:
        stack.start(*roles)
        yield
    finally:
        stack.environment = before
        stop(stack, *roles)


def stop(stack: Stack, *roles: str) -> None:
    """Those of these that run."""
    for role in roles:
        if role in stack.processes:
            stack.stop(role)


def stop_in_order(stack: Stack, role: str) -> None:
    """Once it listens to signals, which it does before it reports itself, it ends with 0."""
    workers, pid = Store(connect(stack.redis.url)).workers, stack.processes[role].pid
    stack.wait_for(lambda: any(each.pid == pid for each in workers.all()) or None, f"the heartbeat of {role}")
    assert stack.stop(role) == 0


def succeeds(stack: Stack, *runs: RunDir) -> None:
    """Wait until they have."""
    for run in runs:
        assert stack.wait_for_event(run, "job.succeeded", "job.failed").type == "job.succeeded", stack.logs()


def dry_run(stack: Stack, job: dict[str, object]) -> RunDir:
    """A job that ends after check."""
    answer = requests.post(f"{stack.url}/jobs?dry_run=true", json=job, timeout=60)
    assert answer.status_code == 202, answer.text
    return RunDir(stack.runs / answer.json()["id"])
