"""A command that SIGINT or SIGTERM stops cleanly, and its child with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from jobs.process.lifeline import PARENT_PID


class Stopped(BaseException):
    """SIGINT or SIGTERM has come."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.code = 128 + signum
        """Exit code of a command that was stopped so: 130, 143."""


@contextlib.contextmanager
def stopped_once() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises Stopped inside; later ones cannot interrupt what is then cleaned up."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(signum: int, _: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    before = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of a command of ours, inside `stopped_once`. Raises Stopped once the child, sent SIGTERM, has ended.

    It has a process group of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
    """
    tied = {**environment, PARENT_PID: str(os.getpid())}
    child = subprocess.Popen(command, env=tied, process_group=0)
    try:
        return child.wait()
    except Stopped:
        child.terminate()
        child.wait()
        raise
