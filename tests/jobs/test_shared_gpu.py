"""Trials share a GPU by what they reserve of it, in the one order; every other job has it alone (ADR 15)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from jobs.disk.rundir import RunDir, create
from jobs.events import AnyFact, AttemptEnded, AttemptStarted, JobPriorityChanged, JobQueued, JobSubmitted, JobSucceeded
from jobs.gpus import GpuFacts
from jobs.heartbeat import Gpu, TrainWorker
from jobs.memory_plan import MemoryPlan
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.redis.workers import lease_token
from jobs.spec import parse_spec
from jobs.state import Stage
from jobs.text.units import GIB
from tests.support.samples import checked, heartbeat, memory_plan, prepared, time_summary

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})
FACTS = GpuFacts("NVIDIA A", 24 * GIB)
"""22.8 GiB for jobs."""


def plan(peak: int, device: str = "cuda") -> MemoryPlan:
    """Of a job that can make do with 1 GiB."""
    made = memory_plan(device=device, least_bytes=None if device == "cpu" else GIB)
    return made.model_copy(update={"peak_bytes": peak})


@dataclass
class Host:
    """GPUs with slots, none of which runs anything but by `take`."""

    store: Store
    redis: Redis
    runs: Path
    workers: dict[str, TrainWorker] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Of the leases that workers hold, by job."""

    def add(self, device: str, slots: int) -> None:
        """A worker for each slot: `a0`, `a1`, … of the GPU `a`."""
        gpu = Gpu(uuid=f"GPU-{device}", name=FACTS.name, memory_bytes=FACTS.memory_bytes, driver="580")
        for slot in range(slots):
            self.report(f"{device}{slot}", gpu=None if device == "cpu" else gpu, slot=slot)

    def report(self, name: str, **more: Any) -> None:
        gpu = more["gpu"]
        beat = heartbeat(name, stage="train", device="cuda" if gpu else "cpu", **more)
        self.store.workers.report(beat)
        self.workers[name] = TrainWorker(device=beat.device, gpu=gpu, slot=beat.slot or 0)

    def queue(self, job: str, peak: int = 10 * GIB, *, trial: bool = True, priority: int = 0) -> RunDir:
        sweep = "sweep-1" if trial else None
        fact = JobSubmitted(name=job, model="m", spec_sha256="s", sweep=sweep, priority=priority)
        run, _ = create(self.runs, job, SPEC, fact)
        self.store.project(run, run.record(), run.events())
        ready = prepared(9, time=time_summary(hours_expected=1.0), memory=plan(peak).summary())
        self.store.append(run, [checked(), ready, JobQueued()])
        return run

    def take(self, worker: str) -> str | None:
        """What it starts."""
        token, where = lease_token(worker), self.workers[worker]
        job = self.store.claim(Stage.TRAIN, token, where)
        if job is not None:
            self.tokens[job] = token
            uuid = where.gpu.uuid if where.gpu else None
            self.store.append(RunDir(self.runs / job), [AttemptStarted(worker=worker, device="cuda", gpu=uuid)])
        return job

    def finish(self, job: str) -> None:
        facts: list[AnyFact] = [AttemptEnded(reason="done"), JobSucceeded(model="model", step=9, loss=None)]
        self.store.append(RunDir(self.runs / job), facts, release=self.tokens.pop(job))

    @property
    def useful(self) -> int:
        return self.store.useful_tickets(Stage.TRAIN, in_vain=True)


@pytest.fixture
def host(redis_url: str, tmp_path: Path) -> Host:
    client = connect(redis_url)
    return Host(Store(client), client, tmp_path)


def test_a_trial_reserves_the_budget_with_which_its_setting_just_fits() -> None:
    for peak in (GIB, 7 * GIB + 1, 10**10 + 7):
        reserved = plan(peak).reserved_bytes
        assert reserved is not None and reserved - int(0.03 * reserved) >= peak >= reserved - 1 - int(0.03 * reserved)
    assert plan(GIB, "cpu").reserved_bytes is None


def test_trials_start_beside_each_other_while_what_they_reserve_fits(host: Host) -> None:
    host.add("a", 4)
    for job, peak in (("t1", 10 * GIB), ("t2", 7 * GIB), ("t3", 6 * GIB), ("t4", GIB)):
        host.queue(job, peak)
    assert host.useful == 2
    assert [host.take(worker) for worker in ("a1", "a2")] == ["t1", "t2"]
    assert host.useful == 0
    assert [host.take(worker) for worker in ("a0", "a3")] == [None, None], "t3 waits, and t4 does not go first"
    host.finish("t2")
    assert host.useful == 2
    assert [host.take(worker) for worker in ("a0", "a3", "a2")] == ["t3", "t4", None]


def test_a_trial_that_needs_the_whole_gpu_has_it_alone(host: Host) -> None:
    host.add("a", 2)
    host.queue("large", 22 * GIB + GIB // 2)
    host.queue("small", GIB)
    assert host.take("a1") == "large"
    assert (host.take("a0"), host.useful) == (None, 0)
    host.finish("large")
    assert host.take("a1") == "small"


def test_another_job_waits_until_the_gpu_is_empty_and_none_passes_it(host: Host) -> None:
    host.add("a", 3)
    host.queue("t1", GIB)
    host.queue("t2", GIB)
    assert [host.take("a0"), host.take("a1")] == ["t1", "t2"]
    host.queue("job", trial=False)
    host.queue("t3", GIB)
    for ends in ("t1", "t2"):
        assert (host.useful, host.take("a2"), host.take("a0")) == (0, None, None)
        host.finish(ends)
    assert host.useful == 1
    assert host.take("a1") is None, "slots above 0 take trials alone, and t3 waits for its turn"
    assert host.take("a0") == "job"
    assert (host.useful, host.take("a1"), host.take("a2")) == (0, None, None)
    host.finish("job")
    assert host.useful == 1 and host.take("a2") == "t3"


def test_a_job_that_is_not_due_or_that_the_gpu_does_not_suit_holds_up_nobody(host: Host) -> None:
    host.add("a", 2)
    host.queue("t1", GIB)
    assert host.take("a1") == "t1"
    crashed = host.queue("crashed", trial=False)
    facts: list[AnyFact] = [AttemptStarted(worker="w", device="cuda"), AttemptEnded(reason="crash")]
    host.store.append(crashed, [*facts, JobQueued(not_before_s=300)])
    huge = host.queue("huge", trial=False)
    host.redis.hset(f"longhaul:job:{huge.id}", "least_bytes", 80 * GIB)
    host.queue("t2", GIB)
    assert host.useful == 1 and host.take("a0") == "t2"


def test_on_a_cpu_slots_above_0_take_trials_alone_whatever_runs(host: Host) -> None:
    host.add("cpu", 2)
    for job, trial in (("job-1", False), ("job-2", False), ("t1", True), ("t2", True)):
        host.queue(job, trial=trial)
    assert host.useful == 2
    assert [host.take("cpu1"), host.take("cpu0")] == ["t1", "job-1"]
    host.finish("t1")
    assert host.take("cpu1") == "t2"
    host.finish("job-1")
    assert host.take("cpu0") == "job-2"


def test_what_an_earlier_version_queued_or_reports_is_alone_as_ever(host: Host) -> None:
    gpu = Gpu(uuid="GPU-a", name=FACTS.name, memory_bytes=FACTS.memory_bytes, driver="580")
    host.report("old", gpu=gpu)
    host.add("a", 2)
    host.queue("t1", GIB)
    known_before = ("trial", "reserved_bytes")
    host.redis.hdel("longhaul:job:t1", *known_before)
    host.queue("t2", GIB)
    assert host.take("a1") is None, "it is known as no trial"
    assert host.take("old") == "t1"
    host.redis.hdel("longhaul:job:t1", *known_before)
    assert (host.useful, host.take("a0"), host.take("a1")) == (0, None, None)
    host.finish("t1")
    host.queue("job", trial=False)
    assert [host.take("a1"), host.take("old")] == ["t2", None]
    host.finish("t2")
    assert host.take("old") == "job", "a worker of an earlier version takes any job"


def test_what_runs_on_a_gpu_counts_though_a_new_redis_knows_no_holder(host: Host) -> None:
    host.add("a", 2)
    run = host.queue("job", trial=False)
    assert host.take("a0") == "job"
    host.redis.flushall()
    host.redis.set("longhaul:rebuilt", "yes")
    host.store.project(run, run.record(), run.events())
    host.add("a", 2)
    host.queue("t1", GIB)
    assert (host.useful, host.take("a1")) == (0, None)


def test_a_worker_that_died_keeps_its_share_until_its_lease_is_over(host: Host) -> None:
    host.add("a", 3)
    for job in ("t1", "t2", "t3"):
        host.queue(job)
    assert [host.take("a1"), host.take("a2")] == ["t1", "t2"]
    host.report("a1", gpu=host.workers["a1"].gpu, slot=1, why="was killed by signal 9")
    assert (host.useful, host.take("a0")) == (0, None)
    run = RunDir(host.runs / "t1")
    host.store.append(run, [AttemptEnded(reason="worker_lost"), JobQueued()], release=host.tokens.pop("t1"))
    assert (host.useful, host.take("a0"), host.take("a0")) == (1, "t1", None), "it keeps its place"


def test_another_job_is_expected_when_the_last_trial_on_the_gpu_is_over(host: Host) -> None:
    host.add("a", 3)
    host.queue("t1", GIB)
    assert host.take("a1") == "t1"
    host.queue("job", trial=False)
    host.queue("t2", GIB)
    shown = {each.id: each.parsed() for each in host.store.page(limit=9)[0]}
    began = shown["t1"].record.attempt_started_at or 0.0
    starts = {job: round(((stored.estimated_start or began) - began) / 3600) for job, stored in shown.items()}
    assert starts == {"t1": 0, "job": 1, "t2": 2}
    assert [len(stored.trainers) for stored in shown.values()] == [1, 1, 1], "a GPU, not its slots"


@pytest.mark.parametrize("seed", range(10))
def test_tickets_and_claims_agree_no_gpu_is_overbooked_and_in_the_end_all_is_done(host: Host, seed: int) -> None:
    chance = random.Random(seed)
    for device in "ab"[: chance.randint(1, 2)]:
        host.add(device, chance.randint(1, 4))
    running: dict[str, str] = {}
    reserved, trials, left, number = dict[str, int](), set[str](), set[str](), 0

    def check(worker: str) -> bool:
        """Whether it starts a job, which then is on its GPU as it may be."""
        job = host.take(worker)
        if job is None:
            return False
        running[worker] = job
        on = [each for other, each in running.items() if other[0] == worker[0]]
        assert job in trials or worker[1] == "0"
        assert len(on) == 1 or (trials.issuperset(on) and sum(reserved[each] for each in on) <= FACTS.limit_bytes)
        return True

    def finish(worker: str) -> None:
        host.finish(job := running.pop(worker))
        left.discard(job)

    for _ in range(60):
        idle = sorted(set(host.workers) - set(running))
        match chance.choice(["queue", "queue", "take", "take", "finish", "move"]):
            case "queue":
                job, peak, number = f"job-{number:02}", chance.choice([1, 3, 6, 10, 22]) * GIB, number + 1
                trials |= {job} if (trial := chance.random() < 0.8) else set()
                reserved[job], left = plan(peak).reserved_bytes or 0, left | {job}
                host.queue(job, peak, trial=trial, priority=chance.choice([0, 0, 3]))
            case "finish" if running:
                finish(chance.choice(sorted(running)))
            case "move" if waiting := sorted(left - set(running.values())):
                host.store.append(RunDir(host.runs / chance.choice(waiting)), [JobPriorityChanged(priority=5)])
            case "take" if idle:
                useful = host.useful
                started = [check(worker) for worker in chance.sample(idle, len(idle))]
                assert (useful > 0) == any(started) and useful <= len(idle)
    while left:
        started = [check(worker) for worker in sorted(set(host.workers) - set(running))]
        if not any(started):
            finish(chance.choice(sorted(running)))
