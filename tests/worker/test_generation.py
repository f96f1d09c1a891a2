"""Where a finished model runs: on a GPU that nobody trains on or waits for, else on the CPU, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from jobs.heartbeat import Gpu
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.redis.workers import lease_token
from jobs.state import Stage
from tests.heartbeats import H200, heartbeat
from worker.generation import NO_GPU, TRAINS, UNKNOWN, WAITS, Place, place_for
from worker.settings import WorkerSettings, from_environment

OTHER = Gpu(uuid="GPU-2", name="NVIDIA H200", memory_bytes=2**37, driver="580")


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


def settings(redis_url: str, tmp_path: Path, device: str = "cuda") -> WorkerSettings:
    return from_environment(
        {"LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_RUNS": str(tmp_path), "LONGHAUL_DEVICE": device}
    )


def on_gpu(gpu: Gpu) -> Place:
    return Place("cuda", gpu=gpu.uuid, limit=gpu.facts.limit_bytes)


def wait_to_train(client: redis.Redis) -> None:
    client.hset("longhaul:job:job-1", mapping={"number": 1, "status": "queued", "stage": "train", "score": 1})
    client.zadd("longhaul:order:train", {"job-1": 1})


def test_an_idle_gpu_is_taken_until_a_job_waits_or_trains(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    assert place_for(ours, store) == Place("cpu", NO_GPU)
    store.workers.report(heartbeat("train-a", gpu=H200))
    assert place_for(ours, store) == on_gpu(H200)
    assert on_gpu(H200).limit == H200.facts.limit_bytes < H200.memory_bytes
    wait_to_train(client)
    assert place_for(ours, store) == Place("cpu", WAITS)
    assert store.claim(Stage.TRAIN, lease_token("train-a")) == "job-1"
    assert place_for(ours, store) == Place("cpu", TRAINS)
    store.workers.report(heartbeat("train-b", gpu=OTHER))
    assert place_for(ours, store) == on_gpu(OTHER), "a job trains on one of two"


def test_a_sick_or_busy_worker_keeps_its_gpu(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    store, ours = Store(client), settings(redis_url, tmp_path)
    store.workers.report(heartbeat("train-a", why="the GPU is lost", gpu=H200))
    assert place_for(ours, store) == Place("cpu", TRAINS)
    store.workers.report(heartbeat("train-a", gpu=H200, busy=True))
    assert place_for(ours, store) == Place("cpu", TRAINS)


def test_without_redis_or_a_gpu_of_ours_it_is_the_cpu(redis_url: str, tmp_path: Path) -> None:
    nobody = Store(connect("redis://127.0.0.1:1/0"))
    assert place_for(settings(redis_url, tmp_path), nobody) == Place("cpu", UNKNOWN)
    at_home = Store(connect(redis_url))
    assert place_for(settings(redis_url, tmp_path, "cpu"), at_home) == Place("cpu", "LONGHAUL_DEVICE is cpu")
