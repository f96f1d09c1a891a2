"""`python -m worker check prepare`: several workers in one container. Needs no Docker."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.process.lifeline import tied_to_parent
from jobs.redis.connection import connect
from jobs.redis.store import Store


@contextmanager
def workers(redis_url: str, runs: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int], dict[str, str]]]:
    """The parent, the pid of each role's child, and their environment."""
    environment = os.environ | {"LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(runs), "LONGHAUL_DEVICE": "cpu"}
    store = Store(connect(redis_url))

    def children() -> dict[str, int]:
        here = f"-{platform.node()}-"  # a name is stage, host, pid, and perhaps more
        return {each.stage: int(each.name.split(here)[1].split("-")[0]) for each in store.workers.all()}

    with subprocess.Popen(
        tied_to_parent(sys.executable, "-m", "worker", "check", "prepare"), env=environment
    ) as parent:
        try:
            wait_for(lambda: set(children()) == {"check", "prepare"})
            yield parent, children(), environment
        finally:
            parent.kill()


def wait_for(look: Callable[[], bool], timeout: float = 20) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + timeout
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether no process has this number any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def healthy(environment: dict[str, str], *roles: str) -> tuple[int, str]:
    """Exit code and words of the health check."""
    words = [sys.executable, "-m", "worker", "--healthy", *roles]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()


def test_sigterm_ends_all_in_good_order(redis_url: str, tmp_path: Path) -> None:
    with workers(redis_url, tmp_path) as (parent, pids, environment):
        assert healthy(environment, "check", "prepare") == (0, "")
        assert healthy(environment, "check", "train") == (1, "train: no heartbeat in the last minute")
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(20) == 0
        assert all(map(is_gone, pids.values()))
        assert Store(connect(redis_url)).workers.all() == []  # both signed off


def test_when_one_ends_by_itself_all_end_and_the_exit_code_says_so(redis_url: str, tmp_path: Path) -> None:
    with workers(redis_url, tmp_path) as (parent, pids, _):
        os.kill(pids["check"], signal.SIGKILL)
        assert parent.wait(20) == 1
        assert is_gone(pids["prepare"])


def test_when_the_parent_is_killed_nobody_is_left(redis_url: str, tmp_path: Path) -> None:
    with workers(redis_url, tmp_path) as (parent, pids, _):
        parent.kill()
        wait_for(lambda: all(map(is_gone, pids.values())))


def test_the_health_check_says_when_redis_is_away(redis_url: str) -> None:
    code, said = healthy(os.environ | {"LONGHAUL_REDIS_URL": "redis://127.0.0.1:1/0"}, "train")
    assert code == 1 and said.startswith("no heartbeat can be read")
