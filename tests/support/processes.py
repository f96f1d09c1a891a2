"""Finding, freezing and seeing off the processes of a stack, by pid: whom to kill, and who is left. For fault tests."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from jobs.attempt import Finished, Heartbeat
from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted
from jobs.state import Status
from jobs.text.units import format_duration
from tests.support.samples import facts_of
from tests.support.stack import SLOWEST, Stack

LOOK_S = 0.002
NOBODY_S = 0.005
"""Between two searches of all processes for one that has not started."""
FROZEN_WITHIN_S = 90.0
Moment = Callable[[RunDir], bool]


class Logs(Protocol):
    """A stack, or a `longhaul local`."""

    def logs(self) -> str:
        """What its processes said last."""


def pids() -> Iterator[int]:
    """Of all processes that run now."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def trainers(run: RunDir) -> list[int]:
    """Processes at work on a run directory, in whatever stage."""
    found = []
    for pid in pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if b"worker.training" in words and (
                os.fsencode(run.path) in words or Path(f"/proc/{pid}/fd/1").readlink() == run.trainer_log
            ):
                found.append(pid)
        except OSError:
            continue
    return found


def of_stack(stack: Stack) -> list[int]:
    """Every process that was started with this stack's folder of runs, or has its log there; not Redis."""
    mark = b"LONGHAUL_RUNS=" + os.fsencode(stack.runs)
    found = []
    for pid in pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if mark in environment or Path(f"/proc/{pid}/fd/1").readlink().is_relative_to(stack.runs):
                found.append(pid)
        except OSError:
            continue
    return found


def worker_of(run: RunDir) -> int:
    """Pid of the worker that has the newest attempt: its name is stage, host, pid, and perhaps more."""
    [*_, started] = facts_of(run, AttemptStarted)
    return int(started.worker.split(f"-{platform.node()}-")[1].split("-")[0])


def horse_of(worker: int) -> int:
    """Pid of a worker's process that is at work on a job. It is a fork of the worker."""
    ours = Path(f"/proc/{worker}/cmdline").read_bytes()
    [horse] = [pid for pid in children(worker) if Path(f"/proc/{pid}/cmdline").read_bytes() == ours]
    return horse


def parent_of(pid: int) -> int:
    """Pid of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def end_within(seconds: float, victims: Iterable[int], kill: Callable[[], object]) -> float:
    """Do what kills, and wait until all of these have ended, at most so long. Returns the seconds that it took."""
    handles = {os.pidfd_open(pid): pid for pid in victims}
    start = time.monotonic()
    try:
        kill()
        for handle, pid in handles.items():
            ready, _, _ = select.select([handle], [], [], max(0.0, start + seconds - time.monotonic()))
            command = Path(f"/proc/{pid}/cmdline")
            assert ready, f"process {pid} still runs {format_duration(seconds)} later: {command.read_bytes()!r}"
        return time.monotonic() - start
    finally:
        for handle in handles:
            os.close(handle)


def freeze(stack: Logs, run: RunDir, moment: Moment) -> int:
    """SIGSTOP the process at work on a run at such a moment (which is still so, once it stands). Returns its pid.

    It runs for an instant at a time until then: were it let go, the moment could be over before the looker has a CPU.
    Moments are read from the run directory: where nothing was written since the last look, it is not yet so.
    """
    deadline = time.monotonic() + SLOWEST * FROZEN_WITHIN_S
    seen = None
    while True:
        for pid in trainers(run):
            while stand_still(pid):
                before, seen = seen, written(run)
                if seen != before and moment(run):
                    return pid
                thaw(pid)
                assert time.monotonic() < deadline, f"the moment did not come\n{stack.logs()}"
                time.sleep(LOOK_S)
        assert time.monotonic() < deadline, f"nobody is at work on {run.id}\n{stack.logs()}"
        time.sleep(NOBODY_S)


def written(run: RunDir) -> list[tuple[str, int, int]]:
    """Its files: path, bytes, time of the last change."""
    found = []
    for folder, _, names in os.walk(run.path):
        for file in (folder, *(os.path.join(folder, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                stat = os.stat(file)
                found.append((file, stat.st_size, stat.st_mtime_ns))
    return found


def stand_still(pid: int) -> bool:
    """SIGSTOP, and wait until it has come to that. False: it has ended."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, signal.SIGSTOP)
        while not (states := _states(pid)) <= {"T", "t"}:
            if states & {"Z", "X"}:
                return False
            time.sleep(LOOK_S / 4)
        return True
    return False


def stopped_at(stack: Stack, run: RunDir, moment: Moment, worker: str = "train") -> None:
    """SIGTERM to the worker at such a moment of its trainer, which then hears of it; wait for the worker's end."""
    trainer = freeze(stack, run, moment)
    process = stack.processes.pop(worker)
    process.send_signal(signal.SIGTERM)
    continue_once_asked(stack, trainer)
    assert process.wait(SLOWEST * FROZEN_WITHIN_S) == 0


def asked_at(stack: Stack, run: RunDir, verb: str, moment: Moment) -> None:
    """POST `cancel` or `pause` at such a moment of the job's trainer, which then hears of it; wait until it rests."""
    trainer = freeze(stack, run, moment)
    assert stack.post(run, verb).json()["requested"] == verb
    continue_once_asked(stack, trainer)
    stack.wait_for(lambda: run.record().status in (Status.PAUSED, Status.CANCELLED) or None, f"the {verb} of {run.id}")


def continue_once_asked(stack: Stack, trainer: int) -> None:
    """SIGCONT, as soon as a SIGTERM waits for it."""
    stack.wait_for(lambda: signalled(trainer, signal.SIGTERM) or None, "the request to reach the trainer")
    thaw(trainer)


def thaw(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """Of its threads."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} or {"X"}


def signalled(pid: int, number: signal.Signals) -> bool:
    """Whether that signal waits for a frozen process to continue."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (number - 1) & 1)


# -- moments ---------------------------------------------------------------------------------------------------------


def loading(run: RunDir) -> bool:
    """The attempt has announced itself; its model is not there yet."""
    return phase(run) == "load" and "model.loaded" not in said(run, run.record().attempt)


def stepping(first: int, last: int) -> Moment:
    """Between two steps, or in one, from the `first` to the `last`."""

    def moment(run: RunDir) -> bool:
        rows = run.metrics()
        return bool(rows) and first <= rows[-1].step <= last and phase(run) == "step"

    return moment


def evaluating(step: int) -> Moment:
    """In the middle of the evaluation of that step."""

    def moment(run: RunDir) -> bool:
        rows = run.metrics()
        return bool(rows) and rows[-1].step == step and phase(run) in ("evaluate", "generate")

    return moment


def resumable(run: RunDir) -> bool:
    """It has a checkpoint, and makes steps."""
    return bool(run.exists() and run.record().progress_step) and phase(run) == "step"


def saving(step: int) -> Moment:
    """In the middle of writing the checkpoint of that step."""

    def moment(run: RunDir) -> bool:
        return any(run.checkpoints.glob(f"tmp-step-{step:08}-*"))

    return moment


def phase(run: RunDir) -> str | None:
    """What the newest attempt last announced; None once it has ended."""
    lines = run.attempt_lines(run.record().attempt)
    if any(isinstance(line, Finished) for line in lines):
        return None
    return next((line.phase for line in reversed(lines) if isinstance(line, Heartbeat)), None)


def said(run: RunDir, attempt: int) -> set[str]:
    """Types of the facts of an attempt."""
    return {line.fact.type for line in run.attempt_lines(attempt) if not isinstance(line, Heartbeat | Finished)}


def highest_memory(stack: Stack) -> int:
    """Bytes that the service was resident with at most, so far."""
    status = Path(f"/proc/{stack.processes['service'].pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def children(pid: int) -> list[int]:
    """Direct children of a process, whichever of its threads started them; none if it is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def descendants(pid: int) -> list[int]:
    """All of them."""
    found = children(pid)
    return found + [each for child in found for each in descendants(child)]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
