"""Which GPU check and prepare plan for: the largest that a train worker reports and that the job may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

from jobs.attempt import Finished, PrepareResult
from jobs.disk.rundir import RunDir
from jobs.gpus import GpuFacts
from jobs.heartbeat import Gpu
from jobs.record import JobRecord
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.spec import JobSpec, parse_spec
from jobs.state import Stage
from tests.support.redis_server import RedisServer
from tests.support.samples import heartbeat, memory_plan, prepared, time_summary
from tests.support.stack import Stack, tiny_job
from worker.supervise import planned_device, planned_gpu, stage_outcome

ANY = parse_spec({"data": {"train": "rows.jsonl"}})


def asking(**resources: Any) -> JobSpec:
    return parse_spec({"data": {"train": "rows.jsonl"}, "resources": resources})


def report(store: Store, name: str, gpu: str | None, stage: Stage = Stage.TRAIN, memory: int = 2**35) -> None:
    """As a worker's heartbeat does."""
    has = None if gpu is None else Gpu(uuid=f"GPU-{name}", name=gpu, memory_bytes=memory, driver="580")
    store.workers.report(heartbeat(name, stage=stage.value, healthy=gpu is not None, gpu=has))


def test_the_largest_gpu_that_the_job_may_use_and_of_these_the_fastest(redis_url: str) -> None:
    store = Store(connect(redis_url))
    assert planned_gpu(store, ANY) is None
    report(store, "check-0", None, Stage.CHECK)
    report(store, "train-0", None)  # waits for a driver
    store.workers.report(heartbeat("train-9"))
    assert planned_gpu(store, ANY) is None
    report(store, "train-1", "NVIDIA T4")
    assert planned_gpu(store, ANY) == GpuFacts("NVIDIA T4", 2**35), "not in our table, but the truth"
    report(store, "train-2", "NVIDIA GeForce RTX 4090")
    report(store, "train-3", "NVIDIA H200")
    report(store, "train-4", "NVIDIA GeForce RTX 5090")
    assert planned_gpu(store, ANY) == GpuFacts("NVIDIA H200", 2**35)
    report(store, "train-5", "NVIDIA RTX A6000", memory=2**36)
    assert planned_gpu(store, ANY) == GpuFacts("NVIDIA RTX A6000", 2**36), "slower, and some jobs fit nowhere else"
    assert planned_gpu(store, asking(gpu_name="rtx 4090")) == GpuFacts("NVIDIA GeForce RTX 4090", 2**35)
    assert planned_gpu(store, asking(gpu_memory_gib=65)) is None


def test_a_job_for_several_gpus_is_planned_for_a_group_that_has_them(redis_url: str) -> None:
    store = Store(connect(redis_url))
    for name, gib, count in (("one", 48, 1), ("pair", 32, 2), ("four", 24, 4)):
        gpu = Gpu(uuid=f"GPU-{name}", name="NVIDIA L4", memory_bytes=gib * 2**30, driver="580", count=count)
        store.workers.report(heartbeat(name, stage="train", device="cuda", gpu=gpu))
    found = [planned_gpu(store, asking(gpus=gpus)) for gpus in (1, 2, 3)]
    assert [(gpu.memory_bytes // 2**30, gpu.count) for gpu in found if gpu] == [(48, 1), (32, 2), (24, 4)]


def test_a_job_for_an_engine_is_planned_for_what_its_nodes_have(redis_url: str) -> None:
    store, named = Store(connect(redis_url)), asking(engine="cluster")
    report(store, "train-1", "NVIDIA H200")
    assert (planned_device(store, named), planned_gpu(store, named)) == (None, None), "as this machine"
    gpu = Gpu(uuid="cluster/0", name="NVIDIA L4", memory_bytes=2**34, driver="")
    store.workers.report(heartbeat("train-2", stage="train", device="cuda", engine="cluster", gpu=gpu))
    store.workers.report(heartbeat("train-3", stage="train", device="cpu", engine="small", gpu=None))
    assert (planned_device(store, named), planned_gpu(store, named)) == ("cuda", GpuFacts("NVIDIA L4", 2**34))
    assert planned_device(store, asking(engine="small")) == "cpu"
    assert (planned_device(store, ANY), planned_gpu(store, ANY)) == (None, GpuFacts("NVIDIA H200", 2**35))


def test_a_gpu_without_bf16_is_planned_for_where_the_job_can_or_nothing_else_is_there(redis_url: str) -> None:
    store = Store(connect(redis_url))
    lora = parse_spec({"data": {"train": "rows.jsonl"}, "method": "lora"})
    bf16 = parse_spec({"data": {"train": "rows.jsonl"}, "method": {"type": "lora", "base_dtype": "bfloat16"}})

    def planned() -> list[str | None]:
        found = [planned_gpu(store, spec) for spec in (lora, ANY, bf16)]
        return [None if gpu is None else gpu.name for gpu in found]

    gpu = Gpu(uuid="GPU-t", name="Quadro RTX 8000", memory_bytes=2**35, driver="580", native_bf16=False)
    store.workers.report(heartbeat("train-1", stage="train", gpu=gpu))
    assert planned() == ["Quadro RTX 8000"] * 3, "check refuses the last two"
    report(store, "train-2", "NVIDIA GeForce RTX 5090")
    assert planned() == ["NVIDIA GeForce RTX 5090"] * 3, "as large, and has bf16"
    larger = gpu.model_copy(update={"memory_bytes": 2**36})
    store.workers.report(heartbeat("train-1", stage="train", gpu=larger))
    assert planned() == ["Quadro RTX 8000", "NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090"]


def test_with_redis_away_no_gpu_is_known(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        store = Store(connect(server.url))
        report(store, "train-1", "NVIDIA H200")
    assert planned_gpu(store, ANY) is None


def test_time_and_memory_go_from_the_preparer_into_the_event(tmp_path: Path) -> None:
    fact = prepared(4, time=time_summary(text="≥ 131 h"), memory=memory_plan().summary())
    result = PrepareResult.model_validate(fact.model_dump(exclude={"type"}))
    found, _ = stage_outcome(
        RunDir(tmp_path), JobRecord(id="a"), Stage.PREPARE, Finished(at=1.0, reason="done", result=result)
    )
    assert found == fact


def test_a_job_says_before_it_starts_how_long_its_gpu_needs(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare")
        report(Store(connect(stack.redis.url)), "train-1", "NVIDIA H200")
        run = stack.submit(tiny_job())
        stack.wait_for_event(run, "job.queued", "job.failed")
        shown = stack.shown(run)
        told = requests.get(f"{stack.url}/jobs/{run.id}/events", timeout=60).json()["data"]
    planned = run.plan().time
    assert planned is not None and planned.text is not None
    assert planned.text.startswith("about 0 s at the nominal peak of an H200 (about ")
    assert shown["plan"]["time"] == planned.summary().model_dump(), "as counted, not as guessed"
    assert (shown["status"], shown["progress"]["eta_s"], shown["progress"]["eta_from"]) == ("queued", None, None)
    messages = {event["type"]: event["message"] for event in told}
    assert "; about 0 s at the nominal peak of an H200 (" in messages["job.checked"]
    memory = run.plan().memory
    assert memory is not None and shown["plan"]["memory"] == memory.summary().model_dump()
    assert messages["job.prepared"].endswith(f"; {planned.text}; {memory.text}")
