"""W&B goes away: at init, in mid-run, at the end, and with a process killed. Nobody waits long, and no row is lost.

Online runs of the real library against the fake server; what is left over goes through the real `wandb sync`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted, JobPaused, JobPauseRequested, JobResumed
from tests.sinks import story
from tests.sinks.driving import closed, publishing, until
from tests.sinks.wandb_runs import child, expected, history, offline_files, publish_in_a_process, sync, wandb_children
from tests.support.fakes import WANDB_KEY, FakeWandb
from tests.support.processes import alive
from worker.feed import read_cursor
from worker.sinks.wandb.sink import WandbSink


def online(server: FakeWandb, finish_s: float = 20.0) -> WandbSink:
    return WandbSink(child, WANDB_KEY, server.url, flush_s=0.2, finish_s=finish_s)


def folders(run: RunDir) -> list[Path]:
    return sorted((run.path / "wandb").glob("*run-*"))


def test_a_server_that_takes_the_call_and_says_nothing_gets_an_offline_run(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 100)
    with FakeWandb() as server:
        server.hang()
        with publishing(tmp_path, online(server)):
            server.wait_for(lambda: server.requests)
            until(lambda: read_cursor(run, "wandb").step == 100)
            server.release()
            story.succeed(run)
            until(lambda: closed(run, "wandb"))
        (file,) = offline_files(run)
        assert history(file, "train/loss") == expected(10, 100)
        sync(server, file.parent)
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "train/loss") == expected(10, 100)
        assert (seen.group, seen.exit_code, len(seen.tables("eval/samples"))) == ("job-1", 0, 1)


@pytest.mark.parametrize("how", ["silent", "500"])
def test_away_from_mid_run_to_the_end_is_complete_after_sync(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    with FakeWandb() as server:
        with publishing(tmp_path, online(server, finish_s=2.0)):
            story.train(run, 10, 100)
            until(lambda: read_cursor(run, "wandb").step == 100)
            if how == "silent":
                server.hang()
            else:
                server.failing = 500
            for step in range(110, 410, 10):
                story.train(run, step, step)
            until(lambda: read_cursor(run, "wandb").step == 400)
            story.succeed(run)
            until(lambda: closed(run, "wandb"))
        assert not server.runs["job-1"].complete
        server.failing = None
        server.release()
        (folder,) = folders(run)
        assert f"wandb sync --include-online {folder}" in caplog.text
        sync(server, folder)
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "train/loss") == expected(10, 400)
        assert seen.rows("train/step", "eval/loss") == [(0, 2.31), (400, 0.91)]
        assert [step for step, _ in seen.tables("eval/samples")] == [400]
        assert (seen.complete, seen.exit_code, seen.summary["status"]) == (True, 0, "succeeded")


def test_offline_with_a_pause_and_two_restarts_is_one_run_after_sync(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 100)
    with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
        until(lambda: read_cursor(run, "wandb").step == 100)
    story.train(run, 110, 200)
    with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
        until(lambda: read_cursor(run, "wandb").step == 200)
        run.append([JobPauseRequested(), AttemptEnded(reason="interrupted", step=200), JobPaused()])
        until(lambda: read_cursor(run, "wandb").event == run.record().number)
        run.append([JobResumed(), AttemptStarted(worker="box-1", device="cpu")])
        story.train(run, 210, 300, attempt=2)
        until(lambda: read_cursor(run, "wandb").step == 300)
    story.train(run, 310, 400, attempt=2)
    story.succeed(run)
    with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
        until(lambda: closed(run, "wandb"))
    assert len(folders(run)) == 4, "a file for each time that the run was opened"
    with FakeWandb() as server:
        sync(server, *folders(run))
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "train/loss") == expected(10, 400), "each row once, in order"
        assert seen.rows("train/step", "eval/loss") == [(0, 2.31), (400, 0.91)]
        assert (seen.complete, seen.exit_code, seen.summary["status"]) == (True, 0, "succeeded")
        sync(server, *folders(run))
        assert (len(server.runs), seen.lines) == (1, 42), "another sync sends nothing again"


@pytest.mark.parametrize("killed", [False, True])
def test_what_comes_after_a_sync_during_training_is_sent_by_the_next_one(killed: bool, tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 100)
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
            until(lambda: read_cursor(run, "wandb").step == 100)
            sync(server, *folders(run))
            (seen,) = server.runs.values()
            assert seen.rows("train/step", "train/loss") == expected(10, 100)
            story.train(run, 110, 200)
            until(lambda: read_cursor(run, "wandb").step == 200)
            if killed:
                os.kill(wandb_children()[0], signal.SIGKILL)
            story.succeed(run)
            until(lambda: closed(run, "wandb"))
        sync(server, *folders(run))
        assert seen.rows("train/step", "train/loss") == expected(10, 200)
        assert (seen.exit_code, seen.summary["status"]) == (0, "succeeded")


def test_offline_at_first_and_online_later_is_one_run(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 200)
    with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
        until(lambda: read_cursor(run, "wandb").step == 200)
    story.train(run, 210, 400)
    story.succeed(run)
    with FakeWandb() as server:
        with publishing(tmp_path, online(server)):
            until(lambda: closed(run, "wandb"))
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "train/loss") == expected(10, 400)
        assert seen.complete
        assert all(list(folder.glob("*.synced")) for folder in folders(run)), "nothing is left to sync"


def test_killed_while_the_server_was_away_the_next_start_sends_what_was_left_and_goes_on(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 100)
    with FakeWandb() as server:
        process = publish_in_a_process(tmp_path, WANDB_KEY, server.url)
        until(lambda: read_cursor(run, "wandb").step == 100)
        server.failing = 500
        story.train(run, 110, 200)
        until(lambda: read_cursor(run, "wandb").step == 200)
        (pid,) = wandb_children(process.pid)
        process.kill()
        process.wait()
        until(lambda: not alive(pid))
        server.failing = None
        story.train(run, 210, 400)
        story.succeed(run)
        with publishing(tmp_path, online(server)):
            until(lambda: closed(run, "wandb"))
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "train/loss") == expected(10, 400), "one run, each row once, in order"
        assert seen.rows("train/step", "eval/loss") == [(0, 2.31), (400, 0.91)]
        assert all(list(folder.glob("*.synced")) for folder in folders(run)), "nothing is left to sync"
