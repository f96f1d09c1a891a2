"""The newest row of metrics, and what the trainer does, as the supervisor shows them to the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.attempt import Activity, Heartbeat
from jobs.disk.files import append_line
from jobs.disk.rundir import create, truncate_metrics
from jobs.events import AttemptEnded, JobQueued, JobSubmitted
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.spec import parse_spec
from jobs.state import Stage
from tests.sinks import story
from tests.support.samples import STARTED, checked, prepared
from worker.supervise import Lease, follow, show_activity, show_latest
from worker.trainer import Trainer
from worker.warm import OwnProcess


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


def test_what_a_trainer_does_is_shown_as_long_as_it_runs(redis_url: str, tmp_path: Path) -> None:
    store = Store(connect(redis_url))
    run, _ = create(tmp_path, "job-1", parse_spec({"data": {"train": "rows.jsonl"}}),
                    JobSubmitted(name="tiny", model="m", spec_sha256="s"))  # fmt: skip
    store.project(run, run.record(), run.events())
    store.append(run, [checked(), prepared(), JobQueued()])
    assert store.claim(Stage.TRAIN, "token") == run.id
    store.append(run, [STARTED])
    run.attempt_file(1).parent.mkdir(exist_ok=True)
    trainer = Trainer(run, Stage.TRAIN, 1, lambda *_: OwnProcess(["sleep", "600"], process_group=0))

    def shown(**beat: Any) -> Activity | None:
        append_line(run.attempt_file(1), Heartbeat(**beat))
        next(news)
        return store.get(run.id).activity

    with Lease(store, run.id, "token") as lease:
        news = follow(store, trainer, run, lease)
        compiling = Activity(stage=Stage.TRAIN, attempt=1, phase="compile", since=5.0)
        assert shown(at=5.0, phase="compile") == compiling
        assert shown(at=9.0, phase="compile", progress=0.357) == compiling.model_copy(update={"fraction": 0.36})
        assert shown(at=11.0, phase="step", step=1) == compiling.model_copy(update={"phase": "step", "since": 11.0})
        trainer.kill("cancelled")
        assert next(news).ended and store.get(run.id).activity is None
    store.set_activity(run.id, compiling)
    store.append(run, [AttemptEnded(reason="interrupted"), JobQueued()])
    assert store.get(run.id).activity is None, "of an attempt that is over"


def test_what_cannot_be_shown_is_tried_again_with_the_next_change_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, run = Store(connect("redis://127.0.0.1:1")), story.submit(tmp_path)
    loading = Activity(stage=Stage.TRAIN, attempt=1, phase="load", since=5.0)
    shown: Activity | None = None
    for _ in range(3):
        shown = show_activity(store, run, loading, shown)
    assert (shown, caplog.text.count("is not shown")) == (loading, 1)
