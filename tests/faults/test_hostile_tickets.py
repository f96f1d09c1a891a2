"""Somebody who can write to Redis puts in tickets of his own: nothing but our function is run, and nobody dies."""

from __future__ import annotations

from pathlib import Path

import requests
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer

from jobs.disk.rundir import RunDir
from jobs.redis.connection import connect
from jobs.redis.queue import TICKET_FUNCTION, queue_name
from jobs.state import Stage
from tests.stack import Stack, tiny_job


def dry_run(stack: Stack) -> RunDir:
    """A job that ends after check."""
    answer = requests.post(f"{stack.url}/jobs?dry_run=true", json=tiny_job(), timeout=10)
    return RunDir(stack.runs / answer.json()["id"])


def test_a_legal_ticket_with_a_callback_is_refused(tmp_path: Path, data: Path) -> None:
    # The function is ours, the callback is not. Must hold: the callback's module is not even imported.
    (tmp_path / "home").mkdir()
    trace = tmp_path / "imported"
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\ndef callback(*anything): pass\n")
    with Stack(tmp_path / "home", data=data, environment={"PYTHONPATH": str(evil)}) as stack:
        client = connect(stack.redis.url)
        queue = Queue(queue_name(Stage.CHECK), connection=client, serializer=JSONSerializer)
        job = Job.create(TICKET_FUNCTION, args=["check"], connection=client, serializer=JSONSerializer, timeout=-1)
        job._success_callback_name = "evil.callback"
        job.origin = queue.name
        queue.enqueue_job(job)
        stack.start("service", "check")
        stack.wait_for_event(dry_run(stack), "job.validated", "job.failed")  # the hostile one came first
        assert not trace.exists()


def test_a_ticket_that_cannot_be_read_does_not_end_the_worker(tmp_path: Path, data: Path) -> None:
    # Must hold: the worker that meets it lives on and takes the next ticket.
    with Stack(tmp_path / "home", data=data) as stack:
        client = connect(stack.redis.url)
        client.hset("rq:job:odd", mapping={"created_at": "yesterday", "data": "[]", "origin": queue_name(Stage.CHECK)})
        client.rpush(f"rq:queue:{queue_name(Stage.CHECK)}", "odd")
        stack.start("service", "check")
        stack.wait_for_event(dry_run(stack), "job.validated", "job.failed")
