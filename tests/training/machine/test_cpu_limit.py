"""Limits of processor time hold also where no Python runs: the kernel ends the process, and its end is understood."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from jobs.reasons import Reason
from worker.training.machine import host

# Lists that hold each other twice, 60 deep: to compare two of them is one instruction of Python's, without an end.
_ENDLESS = """
import signal
from worker.training.machine import host
one, other = [1], [1]
for _ in range(60):
    one, other = [one, one], [other, other]
"""
_ROW = """
host.KILLED_AFTER_S = 0.1
with host.cpu_limit(0.1, or_killed=True):
    one == other
"""
_STAGE = """
host.limit_process(0.1)
one == other
"""


@pytest.mark.parametrize(
    ("code", "by", "said"),
    [
        (_ROW, signal.SIGPROF, ("chat_template", "model: the chat template computes for more than 10 s for one row")),
        (_STAGE, signal.SIGXCPU, ("cpu_limit", "check has computed for 3 min without an end")),
    ],
)
def test_what_never_comes_back_to_python_is_ended_by_the_kernel(
    code: str, by: signal.Signals, said: tuple[str, str]
) -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDLESS + code], timeout=60).returncode
    assert ended == -by
    limit = host.ended_by_limit(ended, check=True)
    assert limit is not None and (limit.detail_code, str(limit)) == said
    assert limit.reason is Reason.REJECTED, "nothing is tried again"


def test_a_limit_that_was_kept_leaves_nothing_behind() -> None:
    with host.cpu_limit(60, or_killed=True):
        pass
    assert signal.getitimer(signal.ITIMER_PROF) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert host.ended_by_limit(-signal.SIGKILL) is host.ended_by_limit(1) is None
    assert host.ended_by_limit(-signal.SIGXCPU) is None, "that is a limit of the machine"


def test_a_limit_of_the_process_leaves_no_core() -> None:
    code = "from worker.training.machine.host import limit_process as limit; limit(9); import resource as r; "
    shown = subprocess.check_output([sys.executable, "-c", code + "print(r.getrlimit(r.RLIMIT_CORE)[0])"], text=True)
    assert shown == "0\n"
