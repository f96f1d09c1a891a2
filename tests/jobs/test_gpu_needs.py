"""Which GPU takes which job: what a job needs, decided alike in Python and in Redis, and the order each GPU keeps."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir, create
from jobs.events import AnyFact, AttemptEnded, JobPriorityChanged, JobQueued, JobSubmitted, JobSucceeded
from jobs.frozen import Empty
from jobs.gpu_needs import GpuNeeds
from jobs.gpus import DRIVER_BYTES, REFERENCE, GpuFacts
from jobs.heartbeat import Gpu, TrainWorker, TrainWorkerGpu
from jobs.memory_plan import HostPlan
from jobs.redis.connection import connect
from jobs.redis.store import ANY_CPU, Store
from jobs.redis.workers import lease_token
from jobs.spec import JobSpec, ResourcesSpec, parse_spec
from jobs.state import Stage
from jobs.text.units import GIB
from tests.support.samples import STARTED, checked, heartbeat, memory_plan, prepared, time_summary
from worker.supervise import planned_gpu

SMALL = GpuFacts("NVIDIA GeForce RTX 4090", 24_564 * 2**20)
LARGE = REFERENCE
TURING = GpuFacts("Quadro RTX 6000", 24_220 * 2**20, native_bf16=False)
HUGE = GpuFacts("NVIDIA H100 80GB HBM3", 81_559 * 2**20)


@pytest.fixture
def store(redis_url: str) -> Store:
    return Store(connect(redis_url))


def needing(resources: dict[str, Any] | None = None) -> JobSpec:
    return parse_spec({"data": {"train": "rows.jsonl"}, "resources": resources or {}})


def queue(
    store: Store,
    runs: Path,
    job: str,
    resources: dict[str, Any] | None = None,
    least: int | None = None,
    dtype: str = "bfloat16",
    host: int | None = None,
    gpus: int = 1,
    **more: Any,
) -> RunDir:
    """A job that waits to train; `least`: bytes that its plan takes at the least, None: it was planned on a CPU.

    `host`: bytes of optimizer states in the host's memory."""
    run, _ = create(runs, job, needing(resources), JobSubmitted(name=job, model="m", spec_sha256="s", **more))
    store.project(run, run.record(), run.events())
    device = "cpu" if least is None else "cuda"
    on_host = None if host is None else HostPlan(optimizer_bytes=host, copy_bytes=1, available_bytes=1, fits=True)
    memory = memory_plan(device=device, least_bytes=least, dtype=dtype, host=on_host, gpus=gpus).summary()
    store.append(run, [checked(), prepared(9, time=time_summary(hours_expected=1.0), memory=memory), JobQueued()])
    return run


def report(store: Store, name: str, gpu: GpuFacts | None, **more: Any) -> None:
    """A train worker's heartbeat."""
    has = gpu and Gpu(
        uuid=f"GPU-{name}", name=gpu.name, memory_bytes=gpu.memory_bytes, driver="580",
        native_bf16=gpu.native_bf16, count=gpu.count, host_memory_bytes=gpu.host_memory_bytes,
    )  # fmt: skip
    store.workers.report(heartbeat(name, stage="train", device="cuda" if gpu else "cpu", gpu=has, **more))


def on(name: str, gpu: GpuFacts, slot: int = 0, engine: str | None = None) -> TrainWorker:
    """A train worker whose GPU is named after it."""
    has = TrainWorkerGpu(
        uuid=f"GPU-{name}", name=gpu.name, memory_bytes=gpu.memory_bytes, native_bf16=gpu.native_bf16,
        count=gpu.count, host_memory_bytes=gpu.host_memory_bytes,
    )  # fmt: skip
    return TrainWorker(device="cuda", gpu=has, slot=slot, engine=engine)


def take(store: Store, worker: str, gpu: GpuFacts | None) -> str | None:
    return store.claim(Stage.TRAIN, lease_token(worker), on(worker, gpu) if gpu else ANY_CPU)


# -- one job and one GPU ----------------------------------------------------------------------------------------------


def test_memory_counts_in_whole_gib_and_names_in_any_case() -> None:
    assert (SMALL.whole_gib, LARGE.whole_gib, HUGE.whole_gib) == (24, 32, 80), "as they are sold"
    for asked, unmet in ((24, None), (32, None), (33, "has 32.0 GiB, and resources.gpu_memory_gib asks for 33.0 GiB")):
        why = GpuNeeds(memory_gib=asked).unmet(LARGE)
        assert why is None if unmet is None else why == f"{LARGE.name} {unmet}"
    assert GpuNeeds(name="h100").unmet(HUGE) is None and GpuNeeds(name="RTX 4090").unmet(SMALL) is None
    assert GpuNeeds(name="h100").unmet(LARGE) == "NVIDIA GeForce RTX 5090 is not 'h100'"
    assert (
        GpuNeeds(name="h100").unmet(None)
        == GpuNeeds(memory_gib=1).unmet(None)
        == "the job asks for a GPU, and this worker trains on the CPU"
    )
    assert GpuNeeds(least_bytes=10**15).unmet(None) is None


def test_the_smallest_setting_decides_and_in_earlier_plans_the_peak() -> None:
    usable = LARGE.memory_bytes - DRIVER_BYTES
    assert LARGE.limit_bytes == usable - int(0.03 * usable)
    assert GpuNeeds(least_bytes=LARGE.limit_bytes).unmet(LARGE) is None
    assert GpuNeeds(least_bytes=LARGE.limit_bytes + 1).unmet(LARGE) is not None
    assert GpuNeeds(least_bytes=25 * GIB).unmet(SMALL) == (
        "NVIDIA GeForce RTX 4090 has 22.8 GiB for a job, and this one needs at least 25.0 GiB"
    )
    plan = checked().plan
    for memory, least in (
        (memory_plan(least_bytes=7 * GIB), 7 * GIB),
        (memory_plan(), 26 * GIB),
        (memory_plan(device="cpu"), None),
    ):
        planned = plan.model_copy(update={"memory": memory.summary()})
        assert GpuNeeds.of(ResourcesSpec(), planned).least_bytes == least
    assert GpuNeeds.of(ResourcesSpec(gpu_memory_gib=30, gpu_name="5090"), Empty()) == GpuNeeds(30, "5090")


def test_none_can_take_it_only_if_all_are_known_and_none_does() -> None:
    needs = GpuNeeds(memory_gib=48)
    gpus = {
        name: heartbeat(
            name, device="cuda", gpu=Gpu(uuid=name, name=gpu.name, memory_bytes=gpu.memory_bytes, driver="580")
        )
        for name, gpu in (("train-small", SMALL), ("train-large", LARGE), ("train-huge", HUGE))
    }
    small, large, huge = gpus.values()
    assert needs.unmet_by_all([]) is None, "nobody knows which GPUs there are"
    assert needs.unmet_by_all([small, huge]) is None
    assert needs.unmet_by_all([small, heartbeat("train-looks", why="no driver", device="cuda")]) is None
    assert needs.unmet_by_all([small, large, small]) == (
        "no GPU here can take the job: NVIDIA GeForce RTX 4090 has 24.0 GiB, and resources.gpu_memory_gib asks for "
        "48.0 GiB; NVIDIA GeForce RTX 5090 has 32.0 GiB, and resources.gpu_memory_gib asks for 48.0 GiB"
    )
    cpu = heartbeat("train-cpu", device="cpu")
    assert (
        needs.unmet_by_all([cpu])
        == "no GPU here can take the job: the job asks for a GPU, and this worker trains on the CPU"
    )
    assert GpuNeeds(least_bytes=10**15).unmet_by_all([cpu]) is None


@pytest.mark.parametrize(
    "resources",
    [
        {"gpu_memory_gib": 0},
        {"gpu_memory_gib": 1025},
        {"gpu_memory_gib": "24"},
        {"gpu_name": ""},
        {"gpu_name": "é"},
        {"gpus": 0},
        {"gpus": 17},
        {"gpus": None},
    ],
)
def test_what_is_no_requirement_is_refused(resources: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"resources\.gpu"):
        needing(resources)


def test_a_job_for_several_gpus_needs_a_group_of_as_many(store: Store, tmp_path: Path) -> None:
    two = dataclasses.replace(LARGE, count=2)
    queue(store, tmp_path, "three", {"gpus": 3})
    queue(store, tmp_path, "two", {"gpus": 2})
    queue(store, tmp_path, "one")
    assert take(store, "train-1", LARGE) == "one"
    assert take(store, "train-2", two) == "two"
    assert take(store, "train-3", two) is None
    assert GpuNeeds(gpus=3).unmet(two) == (
        "a worker has 2 GPUs (NVIDIA GeForce RTX 5090), and the job needs 3 (resources.gpus)"
    )
    assert GpuNeeds(gpus=2).unmet(two) is None
    assert take(store, "train-cpu", None) == "three", "where there is no GPU, so many processes train"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"memory": {"optimizer": "adamw_offload"}}, "`resources.gpus: 2` goes with every optimizer but"),
        ({"kind": "evaluate"}, "a job of kind evaluate runs on one GPU"),
        ({"training": {"batch_size": 1}}, "needs a `training.batch_size` of at least 2, a row for each GPU: it is 1"),
    ],
)
def test_what_several_gpus_cannot_do_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_spec({"data": {"train": "rows.jsonl"}, "resources": {"gpus": 2}, **parts})


# -- the order --------------------------------------------------------------------------------------------------------


def test_a_large_job_at_the_head_waits_for_the_large_gpu_and_blocks_no_other(store: Store, tmp_path: Path) -> None:
    queue(store, tmp_path, "large-1", least=25 * GIB)
    queue(store, tmp_path, "large-2", {"gpu_memory_gib": 32})
    queue(store, tmp_path, "small-1", least=5 * GIB)
    queue(store, tmp_path, "small-2", {"gpu_name": "rtx 4090"})
    queue(store, tmp_path, "small-3")
    assert take(store, "train-s", SMALL) == "small-1"
    assert take(store, "train-l", LARGE) == "large-1"
    assert take(store, "train-s2", SMALL) == "small-2"
    assert take(store, "train-l2", LARGE) == "large-2", "before small-3, whose turn comes later"
    assert take(store, "train-cpu", None) == "small-3"
    assert take(store, "train-l3", LARGE) is None


def test_states_on_the_host_wait_for_a_host_that_can_hold_them(store: Store, tmp_path: Path) -> None:
    queue(store, tmp_path, "offloaded", least=5 * GIB, host=32 * GIB)
    queue(store, tmp_path, "other", least=5 * GIB)
    little, much = (dataclasses.replace(SMALL, host_memory_bytes=gib * GIB) for gib in (33, 34))
    assert take(store, "train-little", little) == "other"
    assert take(store, "train-little-2", little) is None
    report(store, "train-little-2", little)
    assert store.useful_tickets(Stage.TRAIN) == 0
    [(_, needs)] = store.waiting_to_train()
    assert needs.unmet(little) == (
        "the host of NVIDIA GeForce RTX 4090 has 31.0 GiB for optimizer states, and this job keeps 32.0 GiB there"
    )
    assert needs.unmet(much) is None and needs.unmet(SMALL) is None, "what is not known of a host is no obstacle"
    assert take(store, "train-much", much) == "offloaded"


def test_a_cpu_takes_what_asks_for_no_gpu_and_other_stages_ask_for_none(store: Store, tmp_path: Path) -> None:
    queue(store, tmp_path, "asks", {"gpu_name": "h100"})
    queue(store, tmp_path, "any", least=25 * GIB)
    assert take(store, "train-cpu", None) == "any"
    assert take(store, "train-cpu", None) is None
    run, _ = create(tmp_path, "new", needing({"gpu_name": "h100"}), JobSubmitted(name="n", model="m", spec_sha256="s"))
    store.project(run, run.record(), run.events())
    assert store.claim(Stage.CHECK, lease_token("check-0")) == "new"


def test_what_a_job_needs_is_known_again_to_a_redis_that_was_emptied(store: Store, tmp_path: Path) -> None:
    asked = {"gpu_name": "H100", "gpu_memory_gib": 40.5, "gpus": 2, "engine": "cluster"}
    run = queue(store, tmp_path, "a", asked, least=25 * GIB, host=32 * GIB)
    before = store.waiting_to_train()
    needs = GpuNeeds(40.5, "h100", 25 * GIB, native_bf16=True, gpus=2, engine="cluster", host_bytes=32 * GIB)
    assert before == [("a", needs)]
    store.forget("a")
    store.project(run, run.record(), run.events())
    assert store.waiting_to_train() == before


@dataclass
class Box:
    """Random jobs and GPUs, moved by random steps; `waiting` is the order, by rules that are written here again."""

    store: Store
    runs: Path
    chance: random.Random

    def __post_init__(self) -> None:
        self.waiting: dict[str, tuple[int, int, GpuNeeds]] = {}
        self.gpus = {
            f"train-{number}": GpuFacts(
                self.chance.choice(["NVIDIA A", "NVIDIA B"]),
                self.chance.choice([8, 16, 24]) * GIB,
                host_memory_bytes=self.chance.choice([None, 32 * GIB, 64 * GIB]),
                count=self.chance.choice([1, 1, 2, 4]),
            )
            for number in range(self.chance.randint(1, 4))
        }
        self.engines = {worker: self.chance.choice([None, None, "cluster"]) for worker in self.gpus}
        self.busy: dict[str, tuple[str, str]] = {}
        self.places = count()

    def submit(self) -> None:
        place = next(self.places)
        job = f"job-{place:03}"
        gib = self.chance.choice([None, None, 8, 15.5, 24, 30])
        name = self.chance.choice([None, None, None, "a", "nvidia b", "C"])
        gpus = self.chance.choice([1, 1, 1, 2, 3])
        engine = self.chance.choice([None, None, "cluster"])
        resources = {"gpu_memory_gib": gib, "gpu_name": name, "gpus": gpus, "engine": engine}
        least = self.chance.choice([None, GIB, 7 * GIB, 8 * GIB, 15 * GIB, 23 * GIB])
        priority = self.chance.choice([0, 0, 5])
        host = None if least is None else self.chance.choice([None, None, 40 * GIB, 70 * GIB])
        queue(self.store, self.runs, job, resources, least, host=host, gpus=gpus, priority=priority)
        self.waiting[job] = -priority, place, GpuNeeds(gib, name, least, gpus=gpus, engine=engine, host_bytes=host)

    def trainer(self, worker: str) -> TrainWorker:
        return on(worker, self.gpus[worker], engine=self.engines[worker])

    def take(self, worker: str) -> None:
        """It gets the first that suits it, or finds that none does."""
        token = lease_token(worker)
        taken = self.store.claim(Stage.TRAIN, token, self.trainer(worker))
        suited = [job for job, (*_, needs) in self.waiting.items() if needs.unmet_by(self.trainer(worker)) is None]
        assert taken == min(suited, key=lambda job: self.waiting[job][:2], default=None)
        if taken is not None:
            del self.waiting[taken]
            self.busy[worker] = taken, token
            self.store.append(RunDir(self.runs / taken), [STARTED])

    def finish(self, worker: str) -> None:
        job, token = self.busy.pop(worker)
        facts: list[AnyFact] = [AttemptEnded(reason="done"), JobSucceeded(model="model", step=9, loss=None)]
        self.store.append(RunDir(self.runs / job), facts, release=token)

    def step(self) -> None:
        """One of those that are possible."""
        idle, busy = sorted(set(self.gpus) - set(self.busy)), sorted(self.busy)
        steps: list[Callable[[], None]] = [self.submit]
        steps += [partial(self.take, worker) for worker in idle]
        steps += [partial(self.finish, worker) for worker in busy]
        steps += [self.move] if self.waiting else []
        self.chance.choice(steps)()

    def move(self) -> None:
        job = self.chance.choice(sorted(self.waiting))
        _, place, needs = self.waiting[job]
        self.store.append(RunDir(self.runs / job), [JobPriorityChanged(priority=9)])
        self.waiting[job] = -9, place, needs


@pytest.mark.parametrize("seed", range(12))
def test_each_gpu_takes_the_first_that_suits_it_and_in_the_end_all_that_suit_one_are_done(
    store: Store, tmp_path: Path, seed: int
) -> None:
    box = Box(store, tmp_path, random.Random(seed))
    for worker, gpu in box.gpus.items():
        report(store, worker, gpu, engine=box.engines[worker])
    for _ in range(40):
        box.step()
        idle, order = set(box.gpus) - set(box.busy), sorted(box.waiting, key=lambda job: box.waiting[job][:2])
        found = set[str]()
        for trainer in map(box.trainer, sorted(idle)):
            suited = (job for job in order if job not in found and box.waiting[job][2].unmet_by(trainer) is None)
            found |= set(islice(suited, 1))
        assert store.useful_tickets(Stage.TRAIN) == (len(found) if idle else len(order))
    trainers = list(map(box.trainer, box.gpus))
    while any(needs.unmet_by(each) is None for *_, needs in box.waiting.values() for each in trainers) or box.busy:
        for worker in sorted(box.gpus):
            if worker in box.busy:
                box.finish(worker)
            box.take(worker)
    assert [job for job, _ in store.waiting_to_train()] == sorted(box.waiting, key=lambda job: box.waiting[job][:2])


def test_an_engine_trains_the_jobs_that_name_it_and_no_others(store: Store, tmp_path: Path) -> None:
    queue(store, tmp_path, "ours")
    queue(store, tmp_path, "theirs", {"engine": "cluster"})
    queue(store, tmp_path, "nobody's", {"engine": "cloud"})
    cluster = TrainWorker(device="cpu", engine="cluster")
    assert store.claim(Stage.TRAIN, lease_token("train-c"), cluster) == "theirs"
    assert store.claim(Stage.TRAIN, lease_token("train-d"), cluster) is None
    assert take(store, "train-0", LARGE) == "ours" and take(store, "train-1", LARGE) is None
    home = on("train-0", LARGE)
    assert GpuNeeds().unmet_by(cluster) == "the engine cluster trains only jobs that name it (resources.engine)"
    assert GpuNeeds(engine="cluster").unmet_by(cluster) is None
    assert GpuNeeds(engine="cloud").unmet_by_all([cluster, home]) == (
        "no GPU here can take the job: the job is for the engine cloud, and a worker trains on its own machine; "
        "the job is for the engine cloud, and a worker trains on the engine cluster"
    )


# -- tickets and estimates --------------------------------------------------------------------------------------------


def test_a_ticket_is_useful_if_an_idle_worker_can_take_the_job(store: Store, tmp_path: Path) -> None:
    queue(store, tmp_path, "large", least=25 * GIB)
    queue(store, tmp_path, "large-too", least=25 * GIB)
    queue(store, tmp_path, "small")
    assert store.useful_tickets(Stage.TRAIN) == 3, "nobody is known: they wait for whoever comes"
    report(store, "train-s", SMALL)
    assert store.useful_tickets(Stage.TRAIN) == 1
    report(store, "train-l", LARGE, why="lost")
    assert store.useful_tickets(Stage.TRAIN) == 1
    report(store, "train-l", LARGE)
    assert store.useful_tickets(Stage.TRAIN) == 2, "a third would find nobody idle"
    assert take(store, "train-l", LARGE) == "large"
    assert store.useful_tickets(Stage.TRAIN) == 1, "it works now"
    assert take(store, "train-s", SMALL) == "small"
    assert store.useful_tickets(Stage.TRAIN) == 1, "all work: nobody would take it in vain"


def test_a_job_is_expected_to_start_on_the_first_free_gpu_that_suits_it(store: Store, tmp_path: Path) -> None:
    report(store, "train-s", SMALL)
    report(store, "train-l", LARGE)
    queue(store, tmp_path, "large-1", least=25 * GIB)
    assert take(store, "train-l", LARGE) == "large-1"
    store.append(RunDir(tmp_path / "large-1"), [STARTED])
    queue(store, tmp_path, "large-2", least=25 * GIB)
    queue(store, tmp_path, "never", {"gpu_name": "h100"})
    for number in range(3):
        queue(store, tmp_path, f"small-{number}")
    jobs = {job.id: job.parsed() for job in store.page(limit=9)[0]}
    now = jobs["large-1"].record.attempt_started_at
    assert now is not None
    hours = {
        job: None if stored.estimated_start is None else round((stored.estimated_start - now) / 3600)
        for job, stored in jobs.items()
    }
    assert hours == {"large-1": None, "large-2": 1, "never": None, "small-0": 0, "small-1": 1, "small-2": 2}
    assert jobs["never"].gpu_needs.unmet_by_all(jobs["never"].trainers) == (
        "no GPU here can take the job: NVIDIA GeForce RTX 4090 is not 'h100'; NVIDIA GeForce RTX 5090 is not 'h100'"
    )


def test_a_name_stands_for_whole_words(store: Store, tmp_path: Path) -> None:
    a100, a10 = GpuFacts("NVIDIA A100-SXM4-80GB", 80 * GIB), GpuFacts("NVIDIA A10", 23 * GIB)
    assert GpuNeeds(name="a10").unmet(a100) and GpuNeeds(name="A10").unmet(a10) is None
    assert GpuNeeds(name="a100-sxm4").unmet(a100) is None
    queue(store, tmp_path / "runs", "job-1", {"gpu_name": "A10"})
    queue(store, tmp_path / "runs", "job-2", {"gpu_name": "A100-SXM4"})
    assert take(store, "train-a", a100) == "job-2"
    assert take(store, "train-b", a10) == "job-1"


def test_of_a_job_that_an_earlier_version_queued_the_peak_counts(store: Store, redis_url: str, tmp_path: Path) -> None:
    queue(store, tmp_path / "runs", "job-1", least=30 * GIB)
    connect(redis_url).hdel("longhaul:job:job-1", "least_bytes", "gpu_memory_gib", "gpu_name")
    assert take(store, "train-a", SMALL) is None
    assert take(store, "train-b", LARGE) == "job-1"


def test_a_gpu_without_bf16_takes_what_is_planned_in_float16_alone(
    store: Store, redis_url: str, tmp_path: Path
) -> None:
    queue(store, tmp_path, "bf16", least=GIB)
    queue(store, tmp_path, "fp16", least=GIB, dtype="float16")
    report(store, "train-t", TURING, busy=False)
    assert store.useful_tickets(Stage.TRAIN) == 1
    needs = dict(store.waiting_to_train())
    assert needs["fp16"].unmet(TURING) is None
    assert needs["bf16"].unmet(TURING) == ("Quadro RTX 6000 has no native bf16, and the job is planned in bfloat16")
    assert take(store, "train-t", TURING) == "fp16"
    assert take(store, "train-t2", TURING) is None
    connect(redis_url).hdel("longhaul:job:bf16", "native_bf16")
    assert take(store, "train-t3", TURING) is None, "an earlier version queued it: it knew nothing else"
    assert take(store, "train-s", SMALL) == "bf16"
    queue(store, tmp_path, "again", least=GIB, dtype="float16")
    assert take(store, "train-s2", SMALL) == "again"


def test_a_worker_that_found_nothing_adds_no_ticket_for_itself(store: Store, tmp_path: Path) -> None:
    queue(store, tmp_path / "runs", "job-1", {"gpu_name": "H100"})
    report(store, "train-a", SMALL, healthy=False, why="the runs directory is not writable")
    assert store.useful_tickets(Stage.TRAIN) == 1
    assert store.useful_tickets(Stage.TRAIN, in_vain=True) == 0


def test_a_job_is_not_planned_for_the_smaller_gpu_while_another_is_away(store: Store) -> None:
    report(store, "train-a", SMALL)
    assert planned_gpu(store, needing()) == SMALL
    why = "LONGHAUL_DEVICE=cuda, but 'GPU-x' names no GPU here"
    store.workers.report(heartbeat("train-b", stage="train", device="cuda", gpu=None, healthy=False, why=why))
    assert planned_gpu(store, needing()) is None


@pytest.mark.parametrize("key", ["memory_bytes", "count", "host_memory_bytes", "slot"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "nan", "1e300"])
def test_a_heartbeat_with_a_number_that_json_does_not_have_hides_no_job(
    store: Store, redis_url: str, tmp_path: Path, key: str, number: str
) -> None:
    queue(store, tmp_path, "job")
    report(store, "train-a", SMALL, slot=0)
    client = connect(redis_url)
    [name] = list(client.scan_iter("longhaul:worker:*"))
    beat = str(client.get(name), "utf-8")  # type: ignore[arg-type]  # the client is not told that it is bytes
    changed = re.sub(rf'"{key}": (\d+|null)', f'"{key}":{number}', beat)
    assert changed != beat
    client.set(name, changed)
    [shown], _ = store.page(limit=1)
    assert shown.parsed().record.id == "job"


def test_heartbeats_that_change_no_gpu_leave_a_job_as_it_was(store: Store, tmp_path: Path) -> None:
    report(store, "train-s", SMALL, busy=False)
    report(store, "train-l", LARGE, busy=False)
    queue(store, tmp_path, "job")
    assert take(store, "train-l", LARGE) == "job"
    before = store.page(limit=1)
    assert {(each.device, each.gpu and each.gpu.facts) for each in before[0][0].parsed().trainers} == {
        ("cuda", SMALL),
        ("cuda", LARGE),
    }
    report(store, "train-s", SMALL, busy=True, pid=9)
    assert store.page(limit=1) == before, "an answer is kept by these bytes"
    report(store, "train-s", HUGE)
    assert store.page(limit=1) != before
