"""So much processor time, and no more, for what comes from outside and may never end: a pattern, a template, a file.

A handler of Python's runs between two of its instructions, and one comparison of lists may take for ever. So the kernel
keeps the limits behind which a process has to end: its signal ends the process, whatever that is in, and
`ended_by_limit` says to its supervisor what the exit code means.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jobs.errors import Rejected
from jobs.text.units import format_duration

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
        hint="put another chat template into the model's tokenizer_config.json or chat_template.jinja, or take another "
        "model",
    )
