"""One trainer process as its supervisor sees it: started, listened to, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jobs.attempt import Activity, Finished, Heartbeat, Noted, Phase, parse_line
from jobs.disk.files import regular
from jobs.disk.rundir import RunDir
from jobs.errors import StageError
from jobs.events import AnyFact
from jobs.process.lifeline import PARENT_PID
from jobs.process.logs import last_error
from jobs.reasons import Reason
from jobs.state import Stage
from jobs.text.units import bytes_alike
from jobs.trainer_facts import Fault
from worker.training.machine.host import ended_by_limit, ended_for_memory, host_memory, oom_kills, resident_bytes
from worker.warm import FORKED_WITHIN_S, OwnProcess, Process, fork

SLOW_PHASES: frozenset[Phase] = frozenset({"load", "compile", "save"})
SLOW_SILENCE_S = 15 * 60.0
SILENCE_S = 5 * 60.0
SILENCE_INTERVALS = 20.0
AWAY_S = 10.0
"""A look that took longer, or came later, waited for the folder, as its trainer did: or the machine stood still."""
LOOK_AT_HOST_S = 1.0
"""At most so often is the host looked at."""
_IMPORT_ERRORS = (": ModuleNotFoundError: ", ": ImportError: ")


Starter = Callable[[Sequence[str], int], Process]
"""Starts `python -m worker.training` with these arguments, its output to this descriptor."""


def here(environment: Mapping[str, str], warm: str | None = None, *, within_s: float = FORKED_WITHIN_S) -> Starter:
    """Trainers on this machine, forked by the process that listens at the socket `warm`, or started.

    Start them from a thread that outlives them (`lifeline`). `within_s` is that of `fork`.
    """

    def start(arguments: Sequence[str], output: int) -> Process:
        forked = None if warm is None else fork(warm, arguments, environment, output, within_s=within_s)
        return forked or OwnProcess(
            [sys.executable, "-m", "worker.training", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            env={**environment, PARENT_PID: str(os.getpid())},
        )

    return start


@dataclass(frozen=True)
class HostLook:
    """The host, while a trainer was alive."""

    at: float
    """By the monotonic clock."""
    oom_kills: int | None
    """As `host.oom_kills`."""
    held: int | None
    """Bytes of the host's memory that the trainer's process had; None: it is not known here."""
    total: int
    """Bytes that all processes here may have."""

    @classmethod
    def now(cls, pid: int | None) -> HostLook:
        """A third of a millisecond."""
        held = None if pid is None else resident_bytes(pid)
        return cls(time.monotonic(), oom_kills(), held, host_memory().total)


class Trainer:
    """A running `python -m worker.training STAGE RUN_DIR`."""

    def __init__(self, run: RunDir, stage: Stage, attempt: int | None, start: Starter) -> None:
        self.run = run
        self._stage, self._attempt = stage, attempt
        self._file = run.attempt_file(stage.value if attempt is None else attempt)
        self._offset = 0
        self._beat: Heartbeat | None = None
        self._phase_since = 0.0
        self._heard = self._looked = time.monotonic()
        self._alive = self._host = HostLook.now(None)
        self.killed_for: str | None = None
        self._asked = False
        self._file.unlink(missing_ok=True)
        arguments = [stage.value, os.fspath(run.path)]
        if attempt is not None:
            arguments += ["--attempt", str(attempt)]
        with open(run.trainer_log, "ab") as log:
            self._process = start(arguments, log.fileno())
        self._log_start = run.trainer_log.stat().st_size

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after at most so long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def read_lines(self) -> list[Noted | Finished]:
        """The lines it has written since the last call, without heartbeats."""
        try:
            with open(self._file, "rb", opener=regular) as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            new = b""
        before, self._looked = self._looked, time.monotonic()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [parsed for line in whole.splitlines() if (parsed := parse_line(line, self._file)) is not None]
        if lines or self._process.waiting or self._looked - before > AWAY_S:
            self._heard = self._looked
        if lines:
            self._look_at_host()
        for line in lines:
            if isinstance(line, Heartbeat):
                if self._beat is None or self._beat.phase != line.phase:
                    self._phase_since = line.at
                self._beat = line
        return [line for line in lines if not isinstance(line, Heartbeat)]

    def facts(self) -> list[AnyFact]:
        """What became of its process since the last call, besides what it wrote."""
        return self._process.facts()

    @property
    def activity(self) -> Activity | None:
        """What it does now; None: it has not said so yet."""
        beat = self._beat
        return None if beat is None else Activity.of(beat, self._phase_since, self._stage, self._attempt)

    @property
    def step(self) -> int:
        """The step of its last heartbeat."""
        return self._beat.step if self._beat else 0

    @property
    def stalled(self) -> bool:
        """Whether it has been silent for longer than its phase allows."""
        beat = self._beat
        if beat is None or beat.phase in SLOW_PHASES:
            allowed = SLOW_SILENCE_S
        else:
            allowed = max(SILENCE_S, SILENCE_INTERVALS * (beat.interval_s or 0.0))
        return not self._process.waiting and time.monotonic() - self._heard > allowed

    def ask_to_stop(self) -> None:
        """SIGTERM, once: finish the step, checkpoint, leave."""
        if not self._asked and self._process.poll() is None:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)

    def kill(self, why: str) -> None:
        """SIGKILL, and remember why."""
        self.killed_for = why
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def end(self) -> Finished:
        """The reason of its end, if it could not write one itself."""
        code = self._process.wait()
        place = f" (phase {self._phase}, step {self.step})"
        if (of_rank := self._end_of_a_rank()) is not None:
            return of_rank
        if self.killed_for == "stalled":
            return self._ended(Reason.STALLED, place)
        if (cause := self._process.cause) is not None and cause.reason is not Reason.INTERRUPTED:
            return self._ended(cause.reason, cause.details or place)
        if code == -signal.SIGTERM and (self._asked or cause is not None):  # before it could listen
            return Finished(at=time.time(), reason=Reason.INTERRUPTED, step=self.step)
        if (limit := self._limit(code)) is not None:
            return Finished(at=time.time(), reason=limit.reason, step=self.step, error=Fault.raised(limit))
        if (meant := Reason.of_exit_code(code)) is not None:
            return self._ended(meant, f" (exit code {code})")
        if code == -signal.SIGKILL:
            return self._killed()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = self._last_output()
        if said.startswith(_IMPORT_ERRORS):  # the next attempt would end in the same way
            return self._ended(Reason.IMPORT_FAILED, said)
        return self._ended(Reason.CRASH, f" ({how}){said}")

    def _look_at_host(self) -> None:
        """It has written since the last look, and so was alive then: what ended it came later."""
        self._alive = self._host
        if time.monotonic() - self._host.at >= LOOK_AT_HOST_S:
            self._host = HostLook.now(self._process.pid)

    def _killed(self) -> Finished:
        """By SIGKILL, which is the kernel's where it counts one process more that it ended for want of memory."""
        counted = ended_for_memory(self._alive.oom_kills)
        held = next((f"; the trainer had {held} of the {total} that all processes here may have"
                     for look in (self._host, self._alive) if look.held
                     for held, total in [bytes_alike(look.held, look.total)]), "")  # fmt: skip
        place = f"phase {self._phase}, step {self.step}"
        if counted:
            return self._ended(Reason.HOST_OUT_OF_MEMORY, f" ({place}){held}")
        who = "; the kernel ended no process for want of memory meanwhile, so a person or another program did it"
        if counted is None:
            who = "; whether the kernel did it for want of memory cannot be seen here"
        return self._ended(Reason.KILLED, f" (signal SIGKILL, {place}){who}{held}")

    def _end_of_a_rank(self) -> Finished | None:
        """What ended another rank of this attempt, which rank 0 waited for in vain."""
        own = (Reason.CRASH, Reason.KILLED, Reason.STALLED, Reason.INTERRUPTED)  # or the end of rank 0 was the cause
        for file in sorted(self._file.parent.glob(f"{self._file.stem}-rank-*.jsonl")):
            end = next(iter(self.run.attempt_lines(file.stem)[-1:]), None)
            if isinstance(end, Finished) and end.error is not None and end.reason not in own:
                message = f"{file.stem.partition('-')[2].replace('-', ' ')}: {end.error.message}"
                error = end.error.model_copy(update={"message": message})
                return Finished(at=time.time(), reason=end.reason, step=self.step, error=error)
        return None

    @property
    def ended_by_signal(self) -> bool:
        """Whether something outside ended it, and not a limit of its own."""
        code = self._process.poll() or 0
        return code < 0 and self._limit(code) is None

    def _limit(self, code: int) -> StageError | None:
        """Of check and prepare, what they have run into (`ended_by_limit`); a machine may have limits of its own."""
        return None if self._stage is Stage.TRAIN else ended_by_limit(code, check=self._stage is Stage.CHECK)

    @property
    def _phase(self) -> str:
        return self._beat.phase if self._beat else "start"

    def _ended(self, reason: Reason, details: str) -> Finished:
        error = Fault.of(reason, details, hint=Reason.CRASH.hint)
        return Finished(at=time.time(), reason=reason, step=self.step, error=error)

    def _last_output(self) -> str:
        try:
            with open(self.run.trainer_log, "rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - 4096))
                error = last_error(file.read().decode(errors="replace"))
        except OSError:  # the log was removed
            return ""
        return f": {error[:300]}" if error else ""
