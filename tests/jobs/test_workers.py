"""Heartbeats: who is heard of, who holds what, and what is no heartbeat."""

from __future__ import annotations

import json
import time

import pytest
import redis

from jobs.heartbeat import SinkLag
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.redis.workers import Workers, lease_token
from jobs.state import Stage
from tests.support.redis_server import RedisServer
from tests.support.samples import H200, heartbeat


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


def test_whoever_reported_in_the_last_minute_is_there_by_name(client: redis.Redis) -> None:
    workers = Workers(client)
    assert workers.all() == []
    before = time.time()
    for name in ("train-b", "check-a"):
        workers.report(heartbeat(name, gpu=H200))
    found = workers.all()
    assert [each.name for each in found] == ["check-a", "train-b"]
    assert found[1].gpu == H200
    assert before - 0.001 <= found[1].last_seen_at <= time.time()
    assert 0 <= found[1].heartbeat_age_s < 60
    assert (found[1].job, found[1].job_since) == (None, None)
    workers.forget("train-b")
    assert [each.name for each in workers.all()] == ["check-a"]


def test_the_silent_are_forgotten(client: redis.Redis) -> None:
    workers = Workers(client)
    workers.report(heartbeat("train-a"))
    client.zadd("longhaul:workers", {"train-a": time.time() * 1000 - 61_000})
    assert workers.all() == []
    workers.report(heartbeat("train-b"))
    assert client.zrange("longhaul:workers", 0, -1) == [b"train-b"], "the next to report takes them out of the index"


def test_a_lease_says_who_holds_a_job_and_since_when(client: redis.Redis) -> None:
    store = Store(client)
    for name in ("train-a", "train-b"):
        store.workers.report(heartbeat(name))
    client.hset("longhaul:job:job-1", mapping={"number": 1, "status": "queued", "stage": "train", "score": 1})
    client.zadd("longhaul:order:train", {"job-1": 1})
    before = int(time.time())
    token = lease_token("train-b")
    assert store.claim(Stage.TRAIN, token) == "job-1"
    idle, busy = store.workers.all()
    assert idle.job is None
    assert busy.job == "job-1"
    assert busy.job_since is not None and before <= busy.job_since <= time.time()
    store.release("job-1", token)
    assert [each.job for each in store.workers.all()] == [None, None]


@pytest.mark.parametrize("token", ["", "f00", "/", "train-a/x/y", "/1/2", "train-a/" + "9" * 5000 + "/f00"])
def test_a_token_that_names_nobody_is_nobodys(client: redis.Redis, token: str) -> None:
    store = Store(client)
    store.workers.report(heartbeat("train-a"))
    client.hset("longhaul:job:job-1", "lease", token)
    client.zadd("longhaul:leases", {"job-1": 1})
    assert [each.job for each in store.workers.all()] == [None]


def test_what_others_keep_in_redis_costs_nothing(redis_server: RedisServer) -> None:
    """Commands that the server runs for a list of workers, whatever else is stored: one script, no walk over keys."""
    client = connect(redis_server.url)
    workers = Workers(client)
    workers.report(heartbeat("train-a"))
    workers.all()

    def calls() -> dict[str, int]:
        stats = client.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}

    counts = []
    for stored in (0, 1000):
        client.mset({f"longhaul:job:job-{number}:other": 1 for number in range(stored + 1)})
        before = calls()
        workers.all()
        after = calls()
        counts.append({name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)})
    assert counts[0] == counts[1]
    assert counts[0].keys() <= {"evalsha", "time", "zrangebyscore", "zrange", "get", "info"}
    assert "scan" not in counts[0]


def test_a_worker_of_another_version_may_say_more_or_less(client: redis.Redis) -> None:
    workers = Workers(client)
    more = {"gpu": H200.model_dump() | {"slots": 2}, "sinks": {"log": {"jobs_behind": 1, "oldest_s": 2, "rows": 3}}}
    for name, said in (("train-a", {"mood": "good", **more}), ("train-b", {})):
        workers.report(heartbeat(name))
        facts = {"name": name, "stage": "train", "healthy": True, "why": None, **said}
        client.set(f"longhaul:worker:{name}", json.dumps(facts))
    newer, older = workers.all()
    assert newer.gpu is not None and newer.sinks is not None
    assert newer.model_extra == {"mood": "good"} and newer.gpu.model_extra == {"slots": 2}
    assert newer.sinks["log"] == SinkLag(jobs_behind=1, oldest_s=2.0)
    assert (older.gpu, older.sinks, older.pid) == (None, None, None)
