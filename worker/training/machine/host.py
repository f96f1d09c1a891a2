"""Memory of the host as this process may use it: the machine's, or its control group's where that allows less."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from jobs.errors import Rejected
from jobs.text.units import format_duration

# -- cpu limit ---------------------------------------------------------------------------------------------------------
# So much processor time, and no more, for what comes from outside and may never end: a pattern, a template, a file.
#
# A handler of Python's runs between two of its instructions, and one comparison of lists may take for ever. So the
# kernel keeps the limits behind which a process has to end: its signal ends the process, whatever that is in, and
# `ended_by_limit` says to its supervisor what the exit code means.

ROW_S = 10.0
"""For a chat template to write a row; stock templates take less than a millisecond."""
CHECK_S = 180.0
"""For *check*, imports included; it takes some 10 s."""
KILLED_AFTER_S = 2.0
"""Processor time, that of the kernel included, beyond a limit that nothing in the process could keep."""


class Endless(Exception):
    """It has had its time."""


@contextmanager
def cpu_limit(seconds: float, *, or_killed: bool = False) -> Iterator[None]:
    """Raises Endless inside, once this process has computed for so long there. For main threads; not to be nested.

    `or_killed`: what computes for longer nevertheless, in a single instruction of Python, ends the process by SIGPROF.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Endless(f"it has not ended after {format_duration(seconds)}")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    if or_killed:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds + KILLED_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, before)


def limit_process(seconds: float) -> None:
    """Have the kernel end this process by SIGXCPU once it has computed for so long from now on. It leaves no core."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def ended_by_limit(code: int | None, *, check: bool = False) -> Rejected | None:
    """What a process has run into that ended with this exit code (of a signal negative); None: no limit of ours.

    `check`: it is that of *check*, which alone has a limit of its whole time.
    """
    if code == -signal.SIGPROF:
        return costly_template(f"computes for more than {format_duration(ROW_S)}")
    if check and code == -signal.SIGXCPU:
        return Rejected(
            f"check has computed for {format_duration(CHECK_S)} without an end",
            code="cpu_limit",
            hint="a file of rows or the model's tokenizer is probably made in a way that takes far too long: try the "
            "job with other rows, then with another model",
        )
    return None


def costly_template(what: str) -> Rejected:
    """The error where a chat template does that."""
    return Rejected(
        f"model: the chat template {what} for one row",
        code="chat_template",
        param="model",
        hint="set another data.chat_template, or take another model",
    )


# -- host --------------------------------------------------------------------------------------------------------------

ROOT = Path("/")
LEAST = 1 << 30
"""Bytes that every stage needs to start: libraries take a third of it."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes. Page cache that can be dropped counts as available, not as used."""

    used: int
    available: int
    total: int


def host_memory(root: Path = ROOT) -> HostMemory:
    """The machine's, or that of the control group with the least room left. A third of a millisecond.

    `total`: the least that any of them has.
    """
    found = [_machine(root / "proc/meminfo"), *_groups(root)]
    least = min(found, key=lambda memory: memory.available)
    return replace(least, total=min(memory.total for memory in found))


def limit_memory(most: int, root: Path = ROOT) -> int:
    """Let this process, and each that it starts, have so many bytes of memory of its own, or what is available if that
    is less (LEAST at least); returns the limit. Beyond it, allocations fail with MemoryError."""
    limit = max(LEAST, min(most, host_memory(root).available))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit


class TooLarge(Exception):
    """It wanted more memory than it may have."""


@contextmanager
def memory_growth(most: int) -> Iterator[None]:
    """Let this process have so many bytes of memory of its own more than now; beyond that, raises TooLarge.

    Raises MemoryError where a limit that was there before leaves less.
    """
    with open("/proc/self/statm", "rb") as statm:
        limit = int(statm.read().split()[5]) * resource.getpagesize() + most
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if any(other != resource.RLIM_INFINITY and other <= limit for other in (soft, hard)):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    except MemoryError:
        raise TooLarge from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def oom_kills(root: Path = ROOT) -> int | None:
    """How often the kernel has ended a process of our control group (our container) for want of memory; where that is
    not counted, a process of the machine. None: nobody counts.

    The line `oom_kill N` of memory.events, of memory.oom_control in version 1 of the interface, or of /proc/vmstat; it
    grows before the signal is sent.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        memberships = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container without a cgroup namespace the path is the host's: only the mount's own files are there.
        for folder in (mount / path.lstrip("/"), mount):
            if (count := _oom_kills(folder / name)) is not None:
                return count
    return _oom_kills(root / "proc/vmstat")


def _oom_kills(file: Path) -> int | None:
    try:
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):  # not there, or nothing is counted there: the root of all groups
        return None


def ended_for_memory(before: int | None) -> bool | None:
    """Whether the kernel has ended a process for want of memory since `oom_kills` was `before`. None: nobody counts."""
    now = oom_kills()
    return None if now is None or before is None else now > before


def resident_bytes(pid: int) -> int | None:
    """Memory of the host that a process has, shared pages included; None: it has none, or there is no such process."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize() or None


def _machine(meminfo: Path) -> HostMemory:
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
    return HostMemory(sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemAvailable"], sizes["MemTotal"])


def _groups(root: Path) -> Iterator[HostMemory]:
    """Every control group above this process that has a limit, in version 2 of the interface or in version 1."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container without a cgroup namespace the path is the host's: only the mount's own files are there.
        folder = mount / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if (found := _group(place, *names)) is not None:
                yield found
            if place == mount:
                break


def _group(place: Path, limit_file: str, usage_file: str, *cached: str) -> HostMemory | None:
    try:
        limit = (place / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= 2**60:  # version 1 writes "no limit" as a very large number
            return None
        usage = int((place / usage_file).read_text())
        lines = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        cache = sum(int(size) for name, size in lines if name in cached)
    except (OSError, ValueError):
        return None
    used = max(0, usage - cache)
    return HostMemory(used, max(0, int(limit) - used), int(limit))
