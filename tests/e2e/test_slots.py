"""A CPU with two slots: two trials train at once, other jobs one by one, and each as it would alone, bit for bit."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted
from jobs.redis.connection import connect
from jobs.redis.store import Store
from tests.e2e.test_sweeps import SWEEP, ended, submit, trial_of, weights
from tests.support.processes import freeze, resumable, thaw
from tests.support.samples import facts_of
from tests.support.shared_stack import restarted, succeeds
from tests.support.stack import Stack


def spans(run: RunDir) -> list[tuple[float, float]]:
    """When each attempt of a job that has ended began and ended; one that was lost, when the next event came."""
    events = run.events()
    starts = [number for number, event in enumerate(events) if isinstance(event.fact, AttemptStarted)]
    last = [next(e.at for e in events[number + 1 :] if e.type == "attempt.ended") for number in starts]
    return [(events[number].at, end) for number, end in zip(starts, last, strict=True)]


def overlap(one: RunDir, other: RunDir) -> bool:
    return any(a < d and c < b for a, b in spans(one) for c, d in spans(other))


def test_trials_share_a_cpu_and_one_slot_may_be_killed(stack: Stack) -> None:
    with restarted(stack, "train", OMP_NUM_THREADS=None, LONGHAUL_TRIALS_AT_ONCE="2"):
        sweep = submit(stack, SWEEP)
        trials = [trial_of(stack, sweep, number) for number in range(2)]
        with ThreadPoolExecutor() as pool:  # once each has a checkpoint, and trains
            pids = list(pool.map(partial(freeze, stack, moment=resumable), trials))
        trainers = {trial.id: pid for trial, pid in zip(trials, pids, strict=True)}
        found = {each.slot: each for each in Store(connect(stack.redis.url)).workers.all() if each.job in trainers}
        workers = [found[0], found[1]]
        runs = [RunDir(stack.runs / (worker.job or "")) for worker in workers]
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2)).encode()
        for worker in workers:
            environment = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
            assert b"OMP_NUM_THREADS=" + threads in environment
        jobs = [stack.submit(run.spec().model_dump(mode="json")) for run in runs]
        os.kill(workers[1].pid or 0, signal.SIGKILL)
        thaw(trainers[runs[0].id])
        record = ended(stack, sweep)
        succeeds(stack, *jobs)

    assert record.counts == {"succeeded": 2} and overlap(*runs)
    assert [len(facts_of(run, AttemptStarted)) for run in runs] == [1, 2], "only the one in the killed slot began again"
    assert {fact.worker for job in jobs for fact in facts_of(job, AttemptStarted)} == {workers[0].name}
    assert not overlap(*jobs)
    for trial in record.trials:
        [alone] = (job for run, job in zip(runs, jobs, strict=True) if run.id == trial.jobs[0])
        assert (alone.model / "model.safetensors").read_bytes() == weights(stack, trial), f"trial {trial.number}"
