"""Redis goes away: workers can still be stopped, and a training job goes on as if nothing had happened."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from jobs.store import Store, connect
from tests.stack import Stack, tiny_job


def test_an_idle_worker_ends_on_sigterm_while_redis_is_away(tmp_path: Path, data: Path) -> None:
    # Killed: Redis, for good, then SIGTERM to an idle worker. Must hold: it ends (docker stop, `longhaul local`).
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("check")
        store = Store(connect(stack.redis.url))
        stack.wait_for(lambda: store.workers() or None, "the worker's heartbeat")
        stack.redis.stop()
        worker = stack.processes["check"]
        worker.send_signal(signal.SIGTERM)
        try:
            assert worker.wait(10) == 0
        except subprocess.TimeoutExpired:
            worker.kill()
            raise


def test_redis_killed_and_wiped_mid_run_costs_nothing(tmp_path: Path, data: Path) -> None:
    # kill -9 of Redis (AOF) at step 2, back once step 6 is done; FLUSHALL at once. Must hold: one attempt, no gap.
    job = tiny_job(log={"every_steps": 1}, schedule={"epochs": 2, "batch_size": 8, "learning_rate": 0.003})
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare", "train", "publish")
        run = stack.submit(job)
        stack.wait_for(lambda: run.metrics()[1:] or None, "step 2")
        stack.redis.stop()
        stack.wait_for(lambda: run.metrics()[5:] or None, "step 6 without Redis")
        stack.redis.start()
        stack.redis.flush()
        ended = stack.wait_for_event(run, "job.succeeded", "job.failed")
        assert (ended.type, ended.attempt) == ("job.succeeded", 1)
        assert [event.number for event in run.events()] == list(range(1, ended.number + 1))
        assert [row.step for row in run.metrics()] == list(range(1, 17))
