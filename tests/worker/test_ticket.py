"""What somebody who can write to Redis can put in the place of a ticket: refused before anything of it is used."""

from __future__ import annotations

import json
import pickle
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.suspension import is_suspended, suspend

from jobs.redis.connection import TICKET_FUNCTION, Tickets, connect, queue_name
from jobs.state import Stage
from worker.heartbeat import first_heartbeat
from worker.settings import from_environment
from worker.stage_worker import MOST_BYTES, NotOurs, StageWorker, Ticket


class Evil:
    """Unpickling it leaves a file."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        import os

        return os.mkdir, (str(self._proof),)


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    """Of the attacker."""
    return connect(redis_url)


@pytest.fixture
def worker(redis_url: str, tmp_path: Path) -> StageWorker:
    """A worker for check that does not run yet."""
    settings = from_environment(
        {"LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_DEVICE": "cpu", "LONGHAUL_RUNS": str(tmp_path / "runs")}
    )
    return StageWorker(Stage.CHECK, settings, first_heartbeat("check", settings))


def put(client: redis.Redis, name: str = "evil", **changes: Any) -> str:
    """A ticket like ours but for `changes` (of its hash), at the end of the queue of check."""
    ours: dict[str, Any] = {
        "created_at": "2026-01-01T00:00:00.000000Z",
        "data": zlib.compress(json.dumps([TICKET_FUNCTION, None, ["check"], {}]).encode()),
        "origin": queue_name(Stage.CHECK),
        "timeout": "-1",
        "status": "queued",
    }
    client.hset(f"rq:job:{name}", mapping=ours | changes)
    client.rpush(f"rq:queue:{queue_name(Stage.CHECK)}", name)
    return name


def call(*words: object) -> bytes:
    """The data of a job that calls something."""
    return zlib.compress(json.dumps(words).encode())


HOSTILE: dict[str, dict[str, Any]] = {
    "another function": {"data": call("os.system", None, ["true"], {})},
    "a method": {"data": call(TICKET_FUNCTION, "text", ["check"], {})},
    "keywords": {"data": call(TICKET_FUNCTION, None, ["check"], {"stage": "train"})},
    "a pickle": {"data": zlib.compress(pickle.dumps((TICKET_FUNCTION, None, ("check",), {})))},
    "no JSON": {"data": b"{{{"},
    "another form": {"data": call(1)},
    "a number for a function": {"data": call(7, None, ["check"], {})},
    "a time limit": {"timeout": "1"},
    "a callback": {"success_callback_name": "os.mkdir"},
    "a callback of failure": {"failure_callback_name": "os.mkdir"},
    "a callback of stopping": {"stopped_callback_name": "os.mkdir"},
    "a webhook": {"webhooks": json.dumps([{"url": "http://127.0.0.1:1/", "job_status": "finished"}])},
    "a dependency": {"dependency_ids": json.dumps(["other"])},
    "repeats": {"repeats_left": "1000"},
    "retries": {"retries_left": "1000"},
    "a bomb": {"data": zlib.compress(b" " * (1 << 26))},
    "a bomb of words": {"exc_info": zlib.compress(b" " * (1 << 26))},
    "very much": {"description": "x" * (MOST_BYTES + 1)},
    "no date": {"created_at": "yesterday"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_ticket_is_refused_and_the_next_one_is_taken(
    client: redis.Redis, worker: StageWorker, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, **HOSTILE[what])
    Tickets(client).add(Stage.CHECK)
    job, _ = worker.dequeue_job_and_maintain_ttl(1)
    assert job.id != "evil" and job.func_name == TICKET_FUNCTION
    assert "ticket 'evil' is refused" in caplog.text
    assert not client.exists("rq:job:evil")


def test_our_own_tickets_are_taken(client: redis.Redis) -> None:
    for stage in Stage:
        Tickets(client).add(stage)
        [name] = Queue(queue_name(stage), connection=client).job_ids
        assert list(Ticket.fetch(name, client, JSONSerializer).args) == [stage.value]
    # And what the other tests change is not refused by itself.
    assert Ticket.fetch(put(client), client, JSONSerializer).args == ["check"]


def test_a_ticket_of_another_stage_is_refused(client: redis.Redis, worker: StageWorker) -> None:
    job = Ticket.fetch(put(client, data=call(TICKET_FUNCTION, None, ["train"], {})), client, JSONSerializer)
    worker.execute_job(job, worker.queues[0])
    assert not client.exists("rq:job:evil")


def test_maintenance_runs_no_callback_of_a_ticket_that_nobody_took(
    client: redis.Redis, worker: StageWorker, tmp_path: Path
) -> None:
    # RQ runs the callback of failure of what is overdue in its registry, in the worker itself, whatever was queued.
    proof = tmp_path / "proof"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(proof)!r})\ndef callback(*anything): pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        put(client, failure_callback_name="evil.callback")
        client.delete(f"rq:queue:{queue_name(Stage.CHECK)}")
        wip = f"rq:wip:{queue_name(Stage.CHECK)}"
        client.zadd(wip, {"evil:1": time.time() - 3600})
        worker.run_maintenance_tasks()
        assert not proof.exists() and not client.exists(wip)
        # So it would be without our eyes on it.
        client.zadd(wip, {"evil:1": time.time() - 3600})
        StartedJobRegistry(queue_name(Stage.CHECK), client, job_class=Job, serializer=JSONSerializer).cleanup()
        assert proof.exists()


def test_no_pickle_is_ever_opened(client: redis.Redis, worker: StageWorker, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    evil = pickle.dumps(Evil(proof))
    put(client, data=zlib.compress(evil), meta=evil, result=evil)
    put(client, "other", meta=evil, result=evil)
    Tickets(client).add(Stage.CHECK)
    taken = {worker.dequeue_job_and_maintain_ttl(1)[0].id for _ in range(2)}
    client.sadd("rq:groups", "g")
    client.sadd("rq:group:g", "other")
    client.zadd(f"rq:wip:{queue_name(Stage.CHECK)}", {"other:1": time.time() - 3600})
    worker.run_maintenance_tasks()
    assert "evil" not in taken and not proof.exists()
    pickle.loads(evil)  # the attack is a real one
    assert proof.exists()


def test_orders_over_redis_reach_no_worker(client: redis.Redis, worker: StageWorker) -> None:
    # RQ's own worker listens on a channel for: shut down, kill the horse, stop this job; and stands still by a key.
    worker.subscribe()
    assert client.pubsub_channels("*") == []
    assert client.publish(worker.pubsub_channel_name, '{"command": "shutdown"}') == 0, "nobody listens"
    suspend(client)
    worker.check_for_suspension(burst=False)  # returns
    assert is_suspended(client)


def test_a_refusal_does_not_let_somebody_write_lines_of_the_log(
    client: redis.Redis, worker: StageWorker, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, "evil\nERROR forged\x1b[2J", data=call("os.system\nERROR forged\x1b[2J", None, ["check"], {}))
    Tickets(client).add(Stage.CHECK)
    worker.dequeue_job_and_maintain_ttl(1)
    assert "is refused" in caplog.text
    assert all("\n" not in record.getMessage() and "\x1b" not in record.getMessage() for record in caplog.records)


def test_not_ours_is_an_error_of_its_own(client: redis.Redis) -> None:
    with pytest.raises(NotOurs, match=r"asks for 'os\.system'"):
        Ticket.fetch(put(client, **HOSTILE["another function"]), client, JSONSerializer)
