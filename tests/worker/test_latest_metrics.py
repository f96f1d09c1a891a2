"""The newest row of metrics, as the supervisor shows it to the service."""

from __future__ import annotations

from pathlib import Path

from jobs.disk.rundir import truncate_metrics
from jobs.redis.connection import connect
from jobs.redis.store import Store
from tests.sinks import story
from worker.supervise import show_latest


def test_progress_follows_an_attempt_back_to_the_step_where_it_begins(redis_url: str, tmp_path: Path) -> None:
    store, run = Store(connect(redis_url)), story.submit(tmp_path)
    store.project(run, run.record(), run.events())

    def shown(seen: int) -> tuple[int, int | None]:
        seen, latest = show_latest(store, run, seen, scratch_attempt=0), store.get(run.id).latest
        return seen, None if latest is None else latest.step

    assert shown(0) == (0, None), "there is no file yet"
    story.train(run, 10, 100)
    seen, step = shown(0)
    assert step == 100
    truncate_metrics(run.metrics_file, 50)
    seen, step = shown(seen)
    assert step == 50
    truncate_metrics(run.metrics_file, 0)
    assert shown(seen) == (0, None)


def test_damaged_rows_are_passed_over_by_all_who_read_metrics(redis_url: str, tmp_path: Path) -> None:
    # Before: NULs in the last line ended the supervisor, its trainer and every later attempt.
    store, run = Store(connect(redis_url)), story.submit(tmp_path)
    store.project(run, run.record(), run.events())
    story.train(run, 10, 100)
    steps = [row.step for row in run.metrics()]
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    lines[1], lines[-1] = b"\0" * 40 + b"\n", b'{"step": 1}\n'
    run.metrics_file.write_bytes(b"".join(lines))
    show_latest(store, run, 0, scratch_attempt=0)
    latest = store.get(run.id).latest
    assert latest is not None and latest.step == steps[-2]
    assert [row.step for row in run.metrics()] == [steps[0], *steps[2:-1]]
