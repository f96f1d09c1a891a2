"""A CPU with two slots: two trials train at once, other jobs one by one, and each as it would alone, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted
from jobs.heartbeat import Worker
from jobs.redis.connection import connect
from jobs.redis.store import Store
from tests.conftest import ROWS
from tests.e2e.test_sweeps import SWEEP, ended, submit, weights
from tests.facts import facts_of
from tests.stack import Stack


def spans(run: RunDir) -> list[tuple[float, float]]:
    """When each attempt of a job that has ended began and ended; one that was lost, when the next event came."""
    events = run.events()
    starts = [number for number, event in enumerate(events) if isinstance(event.fact, AttemptStarted)]
    last = [next(e.at for e in events[number + 1 :] if e.type == "attempt.ended") for number in starts]
    return [(events[number].at, end) for number, end in zip(starts, last, strict=True)]


def overlap(one: RunDir, other: RunDir) -> bool:
    return any(a < d and c < b for a, b in spans(one) for c, d in spans(other))


def test_trials_share_a_cpu_and_one_slot_may_be_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "tickets.jsonl").write_bytes((ROWS.parent / "tickets.jsonl").read_bytes())
    with Stack(tmp_path / "home", data=data, environment={"LONGHAUL_TRIALS_AT_ONCE": "2"}) as stack:
        del stack.environment["OMP_NUM_THREADS"]
        stack.start("service", "check", "prepare", "train", "publish")
        store = Store(connect(stack.redis.url))

        def slots() -> list[Worker] | None:
            """The workers of slot 0 and 1, once each trains."""
            found = {each.slot: each for each in store.workers.all() if each.stage == "train" and each.job}
            return [found[0], found[1]] if len(found) == 2 else None

        sweep = submit(stack, {**SWEEP, "max_trials": 2})
        workers = stack.wait_for(slots, "a trial in each slot")
        runs = [RunDir(stack.runs / (worker.job or "")) for worker in workers]
        stack.wait_for(lambda: all(run.record().progress_step for run in runs) or None, "a checkpoint of each")
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2)).encode()
        for worker in workers:
            environment = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
            assert b"OMP_NUM_THREADS=" + threads in environment
        jobs = [stack.submit(run.spec().model_dump(mode="json")) for run in runs]
        os.kill(workers[1].pid or 0, 9)
        record = ended(stack, sweep)
        for job in jobs:
            stack.wait_for_event(job, "job.succeeded", "job.failed")

    assert record.counts == {"succeeded": 2} and overlap(*runs)
    assert [len(facts_of(run, AttemptStarted)) for run in runs] == [1, 2], "only the one in the killed slot began again"
    assert {fact.worker for job in jobs for fact in facts_of(job, AttemptStarted)} == {workers[0].name}
    assert not overlap(*jobs)
    for trial in record.trials:
        [alone] = (job for run, job in zip(runs, jobs, strict=True) if run.id == trial.jobs[0])
        assert (alone.model / "model.safetensors").read_bytes() == weights(stack, trial), f"trial {trial.number}"
