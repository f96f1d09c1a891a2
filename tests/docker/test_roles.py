"""`python -m worker generate push`: several workers in one container. Needs no Docker."""

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
from tests.support.processes import alive

ROLES = ("generate", "push")
"""The two that start quickest: what is said here is the same for all."""


@contextmanager
def workers(redis_url: str, runs: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int], dict[str, str]]]:
    """The parent, the pid of each role's child, and their environment."""
    environment = os.environ | {"LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(runs), "LONGHAUL_DEVICE": "cpu"}
    store = Store(connect(redis_url))

    def children() -> dict[str, int]:
        here = f"-{platform.node()}-"  # a name is stage, host, pid, and perhaps more
        return {each.stage: int(each.name.split(here)[1].split("-")[0]) for each in store.workers.all()}

    with subprocess.Popen(tied_to_parent(sys.executable, "-m", "worker", *ROLES), env=environment) as parent:
        try:
            wait_for(lambda: set(children()) == set(ROLES))
            yield parent, children(), environment
        finally:
            parent.kill()


def wait_for(look: Callable[[], bool]) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + 300
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def healthy(environment: dict[str, str], *roles: str) -> tuple[int, str]:
    """Exit code and words of the health check."""
    words = [sys.executable, "-m", "worker", "--healthy", *roles]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()


def test_sigterm_ends_all_in_good_order(redis_url: str, tmp_path: Path) -> None:
    with workers(redis_url, tmp_path) as (parent, pids, environment):
        assert healthy(environment, *ROLES) == (0, "")
        assert healthy(environment, "push", "train") == (1, "train: no heartbeat in the last minute")
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(300) == 0
        assert not any(map(alive, pids.values()))
        assert Store(connect(redis_url)).workers.all() == []  # both signed off


def test_when_one_ends_by_itself_all_end_and_the_exit_code_says_so(redis_url: str, tmp_path: Path) -> None:
    with workers(redis_url, tmp_path) as (parent, pids, _):
        os.kill(pids["push"], signal.SIGKILL)
        assert parent.wait(300) == 1
        assert not alive(pids["generate"])


def test_when_the_parent_is_killed_nobody_is_left(redis_url: str, tmp_path: Path) -> None:
    with workers(redis_url, tmp_path) as (parent, pids, _):
        parent.kill()
        wait_for(lambda: not any(map(alive, pids.values())))


def test_the_health_check_says_when_redis_is_away() -> None:
    code, said = healthy(os.environ | {"LONGHAUL_REDIS_URL": "redis://127.0.0.1:1/0"}, "train")
    assert code == 1 and said.startswith("no heartbeat can be read")
