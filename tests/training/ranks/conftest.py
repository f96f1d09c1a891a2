"""What tests of attempts on several ranks share: processes that find the code, and a look at those of other ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _processes_begin_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def followers() -> list[int]:
    """Pids of the other ranks that this process has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"follow" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def meanwhile(condition: Callable[[], bool], then: Callable[[], object]) -> Iterator[None]:
    """While an attempt runs in this thread, another one waits for something and acts."""
    failed: list[str] = []

    def watch() -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until:
                failed.append("it did not happen")
                return
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
    assert not failed
