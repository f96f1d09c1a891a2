"""No process outlives its parent: a child asks the kernel to be killed with the thread that spawned it (Linux).

    python -m jobs.process.lifeline PARENT_PID command …     tie any program (the tie survives exec)

Spawn children from a thread that outlives them, such as the main one: the signal fires when the spawning *thread* ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
