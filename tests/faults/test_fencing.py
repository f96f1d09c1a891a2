"""A box that was cut off comes back after its job was taken over: nothing of the old attempt is written any more."""

from __future__ import annotations

import os
import re
import signal

import pytest
import redis

from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted
from tests.faults.conftest import MakeJob, Undisturbed, assert_as_if_nothing_had_happened, runs_again
from tests.support.boxes import forget_locks
from tests.support.processes import Moment, descendants, end_within, freeze, loading, saving, thaw
from tests.support.samples import reasons
from tests.support.stack import Stack


def delivering(run: RunDir) -> bool:
    """In the middle of writing the model."""
    return any(run.path.glob("tmp-model-*"))


MOMENTS = {"loading": loading, "saving": saving(12), "delivering": delivering}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_a_box_that_was_cut_off_writes_nothing_once_another_attempt_has_begun(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob, moment: Moment
) -> None:
    # Frozen: worker, horse and trainer of one box, in the midst of its work; its lock is forgotten, its lease runs out.
    # Must hold: the other box takes the job over; when the first continues, its trainer ends before it writes anything.
    run = queued()
    trainer = freeze(stack, run, moment)
    worker = stack.processes["train-2"] = stack.processes.pop("train")
    frozen = {worker.pid, trainer, *descendants(worker.pid)}
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    forget_locks(run)
    with redis.Redis.from_url(stack.redis.url) as client:
        client.zadd("longhaul:leases", {run.id: 0})
    stack.start("train")
    runs_again(stack, run, 2)
    said = run.attempt_file(1).read_bytes()
    # The trainer first: it has to end by itself, and not by its supervisor, which finds its lease with another.
    end_within(300, [trainer], lambda: thaw(trainer))
    for pid in frozen:
        if pid != trainer:
            thaw(pid)
    assert stack.stop("train-2") == 0
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["worker_lost", "done"]
    more = run.attempt_file(1).read_bytes().removeprefix(said)
    assert more.count(b"\n") <= 1, "the line that it had looked for already when it was stopped"
    begun = next(e.number for e in run.events() if isinstance(e.fact, AttemptStarted) and e.attempt == 2)
    assert {event.attempt for event in run.events(after=begun)} == {2}
    # Within the writing of one file it may find first that its folder is gone.
    ends = f"process {trainer} ends and writes nothing|FileNotFoundError: .*/tmp-model-"
    assert re.search(ends, run.trainer_log.read_text())
