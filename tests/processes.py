"""Finding, freezing and seeing off the processes of a stack, by pid: whom to kill, and who is left. For fault tests."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jobs.attempt import Finished, Heartbeat
from jobs.disk.rundir import RunDir
from jobs.text.units import format_duration
from tests.stack import Stack

LOOK_S = 0.002
Moment = Callable[[RunDir], bool]


def pids() -> Iterator[int]:
    """Of all processes that run now."""
    return (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())


def trainers(run: RunDir) -> list[int]:
    """Processes at work on a run directory, in whatever stage."""
    found = []
    for pid in pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            output = Path(f"/proc/{pid}/fd/1").readlink()
        except OSError:
            continue
        if b"worker.training" in words and (os.fsencode(run.path) in words or output == run.trainer_log):
            found.append(pid)
    return found


def of_stack(stack: Stack) -> list[int]:
    """Every process that was started with this stack's folder of runs, whoever started it; not Redis."""
    mark = b"LONGHAUL_RUNS=" + os.fsencode(stack.runs)
    found = []
    for pid in pids():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


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


def freeze(stack: Stack, run: RunDir, moment: Moment) -> int:
    """SIGSTOP the process at work on a run at such a moment (which is still so, once it stands). Returns its pid."""
    deadline = time.monotonic() + 90
    while True:
        assert time.monotonic() < deadline, f"the moment did not come\n{stack.logs()}"
        if moment(run):
            for pid in trainers(run):
                os.kill(pid, signal.SIGSTOP)
                while not _stands(pid):
                    time.sleep(LOOK_S)
                if moment(run):
                    return pid
                os.kill(pid, signal.SIGCONT)
        time.sleep(LOOK_S)


def thaw(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def _stands(pid: int) -> bool:
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    assert "Z" not in states, f"process {pid} has ended"
    return set(states) <= {"T", "t"}


def signalled(pid: int, number: signal.Signals) -> bool:
    """Whether that signal waits for a frozen process to continue."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (number - 1) & 1)


# -- moments ---------------------------------------------------------------------------------------------------------


def loading(run: RunDir) -> bool:
    """The attempt has announced itself; its model is not there yet."""
    return phase(run) == "load" and "model.loaded" not in _said(run)


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


def _said(run: RunDir) -> set[str]:
    """Types of the facts of the newest attempt."""
    lines = run.attempt_lines(run.record().attempt)
    return {line.fact.type for line in lines if not isinstance(line, Heartbeat | Finished)}


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
