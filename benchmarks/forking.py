"""Python programs forked from a process that has imported torch already, in place of new interpreters.

Importing torch and transformers takes ten seconds of a processor, more than most benchmarks at their smallest size. So
`benchmarks.smoke` imports once and forks (`Forks`). A benchmark that it forks has a `sys.executable` which sends
`python -m MODULE …` back to it: a shell script, which runs this file as the client. The client hands its standard
files, environment and folder over, passes signals on, and ends as the fork does; whoever kills it kills the fork. All
else is run by the real interpreter, and so are programs of another folder or of another network namespace.

What is forked from here has the pid of the fork, and its parent that of the client: figures about processes, such as
their memory, are right in a benchmark that is run by itself only.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

PARENT_PID = "LONGHAUL_PARENT_PID"
"""As in jobs/process/lifeline.py; the client does without what that imports."""
ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 1 << 20
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Ended(NamedTuple):
    """A fork that has ended."""

    code: int
    """Of a signal negative."""
    cpu_s: float
    """With its own children, not with what they had forked here."""


class Fork(NamedTuple):
    """One that runs."""

    pid: int
    handle: int
    """A descriptor, readable once it has ended."""
    group: str
    """The benchmark that it is a part of."""
    told: Callable[[Ended], None]


class Forks:
    """Everything that was forked. One thread; `serve` does all the work, a moment at a time."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the socket and the interpreters are, new."""
        self._folder, self._selector = folder, selectors.PollSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(folder / "forks"))
        self._listener.listen(64)
        self._running: dict[int, Fork] = {}
        self.cpu_s: dict[str, float] = {}
        """Seconds of a processor by benchmark, of what has ended."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def begin(
        self, group: str, words: Sequence[str], files: Sequence[int], environment: Mapping[str, str],
        told: Callable[[Ended], None],
    ) -> int:  # fmt: skip
        """Fork `python -m WORDS` with these standard files. Returns its pid; `told` is called at its end."""
        interpreter = self._interpreter(group)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                for key in list(self._selector.get_map().values()):
                    os.close(key.fd)
                become(words, files, environment, interpreter)
            finally:
                os._exit(70)
        fork = Fork(pid, os.pidfd_open(pid), group, told)
        self._running[pid] = fork
        self._selector.register(fork.handle, selectors.EVENT_READ, lambda: self._reap(fork))
        return pid

    def serve(self, seconds: float) -> None:
        """Answer clients and notice what ends, for at most so long; returns after the first such thing."""
        for key, _ in self._selector.select(seconds)[:1]:  # what is done of one may take another away
            key.data()

    def send(self, group: str, number: signal.Signals) -> None:
        """To everything that a benchmark has forked, and the benchmark."""
        for fork in [each for each in self._running.values() if each.group == group]:
            signal.pidfd_send_signal(fork.handle, number)

    def close(self) -> None:
        """Nothing of it stays."""
        for fork in self._running.values():
            signal.pidfd_send_signal(fork.handle, signal.SIGKILL)
        self._selector.close()
        self._listener.close()

    def _interpreter(self, group: str) -> Path:
        """What a benchmark takes for Python."""
        file = self._folder / group / "python"
        if not file.exists():
            file.parent.mkdir()
            for program in Path(sys.executable).parent.iterdir():  # some are looked for beside the interpreter
                if not program.name.startswith("python"):
                    (file.parent / program.name).symlink_to(program)
            client = [sys.executable, "-I", "-S", __file__, os.fspath(self._folder / "forks"), group, sys.executable]
            file.write_text(
                f'#!/bin/sh\n[ "$1" = -m ] && [ "$2" != jobs.process.lifeline ] && exec {" ".join(client)} "$@"\n'
                f'exec {sys.executable} "$@"\n'
            )
            file.chmod(0o755)
        return file

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._selector.register(client, selectors.EVENT_READ, lambda: self._hear(client))

    def _hear(self, client: socket.socket) -> None:
        """What a client asks for; later, that it is gone."""
        message, files, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
        if not message:
            self._forget(client)
            return
        asked = json.loads(message)

        def told(end: Ended) -> None:
            if client.fileno() != -1:
                client.send(json.dumps({"code": end.code}).encode())
                self._forget(client)

        pid = self.begin(asked["group"], asked["words"], files, asked["environment"], told)
        for each in files:
            os.close(each)
        client.send(json.dumps({"pid": pid}).encode())
        handle = self._running[pid].handle

        def gone() -> None:
            self._forget(client)
            signal.pidfd_send_signal(handle, signal.SIGKILL)

        self._selector.modify(client, selectors.EVENT_READ, gone)

    def _forget(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()

    def _reap(self, fork: Fork) -> None:
        self._selector.unregister(fork.handle)
        os.close(fork.handle)
        _, status, used = os.wait4(fork.pid, 0)
        del self._running[fork.pid]
        end = Ended(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)
        self.cpu_s[fork.group] = self.cpu_s.get(fork.group, 0.0) + end.cpu_s
        fork.told(end)


def become(words: Sequence[str], files: Sequence[int], environment: Mapping[str, str], interpreter: Path) -> NoReturn:
    """In a fork: run a module as a new interpreter would."""
    import random
    import runpy
    import warnings

    os.setpgid(0, 0)
    for file, standard in zip(files, (0, 1, 2), strict=True):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(ROOT)
    given = dict(environment)
    os.environ.clear()
    os.environ.update(given)
    if PARENT_PID in given:  # the client is tied to that one, and this process to the client
        os.environ[PARENT_PID] = str(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.executable = os.fspath(interpreter)
    sys.argv = ["", *words[1:]]
    sys.path.insert(0, os.fspath(ROOT))
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # it was imported before the fork
    code: object = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    end(code if isinstance(code, int) else int(code is not None))


def end(code: int) -> NoReturn:
    """As an interpreter ends, but for freeing what was imported."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- the client ----------------------------------------------------------------------------------------------


def client(where: str, group: str, python: str, words: Sequence[str]) -> int:
    """`python -m MODULE …`: have it forked, and end as it does."""
    parent = os.environ.get(PARENT_PID)
    if parent is not None:
        tie_to(int(parent))
    forks = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forks.connect(where)
    ours = pid_of_peer(forks)
    if Path.cwd() != ROOT or os.readlink("/proc/self/ns/net") != os.readlink(f"/proc/{ours}/ns/net"):
        os.execv(python, [python, *words])
    asked = {"group": group, "words": words[1:], "environment": dict(os.environ)}
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it is known to whom
    socket.send_fds(forks, [json.dumps(asked).encode()], [0, 1, 2])
    told = json.loads(forks.recv(100) or "{}")
    if "pid" not in told:
        return 1
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(told["pid"], number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    code = int(json.loads(forks.recv(100) or '{"code": -9}')["code"])
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def pid_of_peer(connected: socket.socket) -> int:
    """Of the process at the other end."""
    return int.from_bytes(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


def tie_to(parent: int) -> None:
    """End when the parent does."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(client(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
