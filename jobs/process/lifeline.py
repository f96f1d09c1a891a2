"""No process outlives its parent: a child asks the kernel to be killed with the thread that spawned it (Linux).

    python -m jobs.process.lifeline PARENT_PID command …     tie any program (the tie survives exec)

Spawn children from a thread that outlives them, such as the main one: the signal fires when the spawning *thread* ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

PARENT_PID = "LONGHAUL_PARENT_PID"
WARM = "LONGHAUL_WARM"
"""Variable: the socket of the process that forks trainers, which a parent keeps for its children."""
_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int) -> None:
    """Have SIGKILL sent to this process when its parent goes; leave at once if it has already gone.

    It is in the background of its parent's terminal, if there is one, and may write there whatever `stty tostop` says.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent died before the call: the signal would never come
        os._exit(1)


def tied_to_parent(*command: str) -> list[str]:
    """The command line that runs `command` tied to the calling process."""
    return [sys.executable, "-m", "jobs.process.lifeline", str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    """Tie this process to the given parent, then become the command."""
    parent, *command = argv
    tie_to_parent(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])


# -- stopping ----------------------------------------------------------------------------------------------------------
# A command that SIGINT or SIGTERM stops cleanly, and its child with it.


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
