"""Somebody who can write to Redis puts in tickets of his own: nothing but our function is run, and nobody dies."""

from __future__ import annotations

from pathlib import Path

from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer

from jobs.redis.connection import TICKET_FUNCTION, connect, queue_name
from jobs.state import Stage
from tests.support.shared_stack import dry_run, restarted, stop
from tests.support.stack import Stack, tiny_job


def test_hostile_tickets_are_refused_and_the_worker_takes_the_next(stack: Stack, tmp_path: Path) -> None:
    # One is legal but for its callback, and one cannot be read. Must hold: the callback's module is not even imported,
    # and the worker that met both lives on.
    trace = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\ndef callback(*anything): pass\n")
    stop(stack, "check")
    client = connect(stack.redis.url)
    queue = Queue(queue_name(Stage.CHECK), connection=client, serializer=JSONSerializer)
    job = Job.create(TICKET_FUNCTION, args=["check"], connection=client, serializer=JSONSerializer, timeout=-1)
    job._success_callback_name = "evil.callback"
    job.origin = queue.name
    queue.enqueue_job(job)
    client.hset("rq:job:odd", mapping={"created_at": "yesterday", "data": "[]", "origin": queue.name})
    client.rpush(f"rq:queue:{queue.name}", "odd")
    run = dry_run(stack, tiny_job())
    with restarted(stack, "check", PYTHONPATH=str(tmp_path)):
        stack.wait_for_event(run, "job.validated")
        assert not trace.exists()
