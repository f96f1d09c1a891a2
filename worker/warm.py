"""Trainers forked from a process that has imported torch already (`worker/training/warm.py`): they start at once.

One such process serves all stages: of `longhaul local`, of a container, or of a worker that was told of none
(`LONGHAUL_WARM`). A work-horse asks it for a trainer; where it is gone, or does not answer, the trainer is started as
any program is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from jobs.events import AnyFact
from jobs.process.lifeline import PARENT_PID
from jobs.reasons import Reason

log = logging.getLogger("longhaul.worker")
FORKED_WITHIN_S = 60.0
ASKED_WITHIN_S = 5.0
"""Where somebody waits for the answer."""
"""Longer than the imports take. One that takes longer stands still."""
RESTART_AFTER_S = 60.0


class EndCause(NamedTuple):
    """Why a trainer has ended, as whoever ran it knows."""

    reason: Reason
    details: str
    """Appended to the reason's sentence."""


class Process(Protocol):
    """A trainer, wherever it runs."""

    cause: EndCause | None
    """Once it has ended: why, where its exit code does not say it."""

    # fmt: off
    @property
    def pid(self) -> int | None:
        """On this machine; None: it is on another."""
    @property
    def waiting(self) -> bool:
        """It does not run yet, is suspended, or cannot be heard: its silence says nothing."""
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...
    def facts(self) -> list[AnyFact]:
        """What became of it since the last call, besides what it writes itself."""
    # fmt: on


class OwnProcess(subprocess.Popen[bytes]):
    """A trainer that this process has started."""

    cause: EndCause | None = None
    waiting = False

    def facts(self) -> list[AnyFact]:
        """None: it says everything itself."""
        return []


class WarmProcess:
    """The process that forks trainers. Make it in a main thread: it ends with the thread (`lifeline`)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: that of the trainers; variables of ours may differ from one to the next."""
        self._folder = tempfile.TemporaryDirectory(prefix="longhaul-")  # for this user alone
        self.socket = os.path.join(self._folder.name, "socket")
        # Libraries ask CUDA for its GPUs when they are imported, and a process that has used it cannot fork.
        self._environment = {**environment, PARENT_PID: str(os.getpid()), "CUDA_VISIBLE_DEVICES": ""}
        self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker.training", "warm", self.socket],
            stdin=subprocess.DEVNULL,
            env=self._environment,
            process_group=0,
        )

    def keep_up(self) -> None:
        """Start it again if it has ended, once in a while: there may be too little memory for it."""
        if (code := self._process.poll()) is not None and time.monotonic() - self._started_at > RESTART_AFTER_S:
            log.warning("the process that forks trainers ended (%d) and starts again", code)
            self._start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """End it, and what it forked."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def fork(
    warm: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    *others: int,
    within_s: float = FORKED_WITHIN_S,
) -> ForkedProcess | None:
    """`python -m worker.training ARGUMENTS`, its output to this descriptor, forked by the process that listens at the
    socket `warm`. None: start it yourself. `others`: its stdin, and its stderr; without them it reads nothing, and
    stderr goes where its output does. `within_s`: how long it may still be importing.
    """
    asked = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(within_s)
        connection.connect(warm)
        socket.send_fds(connection, [asked], [output, *others])
        said, files, _, _ = socket.recv_fds(connection, 100, 1)
        if files:
            return ForkedProcess(json.loads(said)["pid"], files[0], connection)
        why = None if said else "it has ended"
    except OSError as error:
        why = str(error)
    connection.close()
    if why is not None:  # else libraries would have to be imported under another environment
        log.warning("no trainer was forked, so one is started: %s", why)
    return None


class ForkedProcess:
    """A trainer that is a child of somebody else. It is killed when this, or the process that has this, is gone."""

    def __init__(self, pid: int, handle: int, told: socket.socket) -> None:
        self.pid, self._handle, self._told = pid, handle, told
        self._code: int | None = None
        self.cause: EndCause | None = None
        self.waiting = False

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, of a signal negative. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            readable, _, _ = select.select([self._told], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            said = self._told.recv(100)
            if not said:  # the process that forked it is gone, and it with that
                self.cause = EndCause(Reason.WORKER_LOST, "")
            self._code = json.loads(said)["code"] if said else -signal.SIGKILL
            self._told.close()
            os.close(self._handle)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                signal.pidfd_send_signal(self._handle, sig)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def facts(self) -> list[AnyFact]:
        """None: it says everything itself."""
        return []
