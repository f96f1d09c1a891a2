"""One control plane for a runs directory: its publish holds a lock that says who it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import worker.runs_lock
from jobs.redis.connection import connect
from jobs.redis.store import Store
from tests.support.samples import heartbeat
from tests.support.stack import ROOT, Stack
from worker.runs_lock import Holder, RunsDirectoryInUse, RunsLock


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.runs_lock, "RETRY_S", 0.01)
    monkeypatch.setattr(worker.runs_lock, "UNKNOWN_S", 0.03)


def test_the_same_control_plane_waits_and_another_is_refused(redis_url: str, tmp_path: Path) -> None:
    ours, theirs = Store(connect(redis_url)), Store(connect(redis_url.replace("/0", "/1")))
    stop = threading.Event()
    first = RunsLock(tmp_path, ours, name="publish-a", redis="redis://…@one:6379/0")
    second = RunsLock(tmp_path, ours, name="publish-b", redis="redis://…@one:6379/0")
    other = RunsLock(tmp_path, theirs, name="publish-c", redis="redis://…@one:6379/0")
    with first, second, other:
        assert first.wait_or_join(stop)
        ours.workers.report(heartbeat("publish-a"))
        assert not second.wait_or_join(stop)
        with pytest.raises(
            RunsDirectoryInUse, match=rf"process {os.getpid()} on .* \(Redis redis://…@one:6379/0\) since 20"
        ):
            other.wait_or_join(stop)
        first.__exit__(None, None, None)
        assert second.wait_or_join(stop)


def test_one_that_hung_for_a_minute_is_not_said_to_be_of_another_and_is_known_again_when_it_goes_on(
    redis_url: str, tmp_path: Path
) -> None:
    store, stop = Store(connect(redis_url)), threading.Event()
    with (
        RunsLock(tmp_path, store, name="publish-hung", redis="r") as first,
        RunsLock(tmp_path, store, name="publish-next", redis="r") as second,
    ):
        assert first.wait_or_join(stop)
        store.workers.forget("publish-hung")  # as Redis does after a minute of silence
        with pytest.raises(
            RunsDirectoryInUse, match=r"it belongs to another control plane, or hangs\. End that process"
        ):
            second.wait_or_join(stop)
        store.workers.report(heartbeat("publish-hung"))
        assert not second.wait_or_join(stop)
        first.__exit__(None, None, None)
        assert second.wait_or_join(stop)


def test_without_redis_nobody_can_tell_and_all_wait(redis_url: str, tmp_path: Path) -> None:
    stop = threading.Event()
    with (
        RunsLock(tmp_path, Store(connect(redis_url)), name="publish-a", redis="r") as first,
        RunsLock(tmp_path, Store(connect("redis://127.0.0.1:1/0")), name="publish-b", redis="r") as second,
    ):
        assert first.take()
        waits = threading.Thread(target=second.wait_or_join, args=(stop,))
        waits.start()
        first.__exit__(None, None, None)
        waits.join(20)
        assert not waits.is_alive()
        holder = second.holder()
        assert holder is not None and holder.name == "publish-b"


def test_another_publish_ends_with_the_holders_name_and_a_killed_one_leaves_no_lock(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        lock = stack.runs / ".locks" / "publish.lock"

        def holder(role: str) -> bool | None:
            file = lock.read_text() if lock.exists() else ""
            return (bool(file) and Holder.model_validate_json(file).pid == stack.processes[role].pid) or None

        stack.start("publish")
        stack.wait_for(lambda: holder("publish"), "the lock")
        environment = stack.environment | {"LONGHAUL_REDIS_URL": stack.redis.url.replace("/0", "/1")}
        refused = subprocess.run(
            [sys.executable, "-m", "worker", "publish"], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=90, check=False,
        )  # fmt: skip
        assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
        assert f"process {stack.processes['publish'].pid} on " in refused.stderr
        stack.kill("publish")
        stack.environment = environment
        stack.start("publish")
        stack.wait_for(lambda: holder("publish"), "the lock")
