"""W&B through real child processes and the real library: online against a fake server, offline read back from disk."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    Fault,
    JobFailed,
    JobPaused,
    JobQueued,
    JobRequested,
    JobResumed,
    OomRecovered,
)
from jobs.lifeline import tied
from jobs.rundir import RunDir
from tests.fakes import WANDB_KEY, FakeDiscord, FakeWandb
from tests.sinks import story
from tests.sinks.driving import closed, publishing, until
from worker.feed import read_cursor
from worker.sinks.base import Sink
from worker.sinks.discord import DiscordSink
from worker.sinks.wandb import WandbSink
from worker.sinks.webhook import Webhook

LEET = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]


def child() -> list[str]:
    return tied(sys.executable, "-m", "worker.sinks.wandb_child")


def offline_files(run: RunDir) -> list[Path]:
    return sorted((run.path / "wandb").glob("*run-*/*.wandb"), key=lambda file: file.stat().st_mtime)


@functools.cache
def records(file: Path) -> list[dict[str, Any]]:
    done = subprocess.run([*LEET, str(file)], capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(file: Path, key: str) -> list[tuple[int, Any]]:
    """(train/step, value) of the rows that have this key."""
    rows = [record["history"] for record in records(file) if record["type"] == "history"]
    rows = [row.get("item", row) for row in rows]
    return [(int(row["train/step"]), row[key]) for row in rows if key in row]


def tables(file: Path) -> list[tuple[int, list[list[Any]]]]:
    """(train/step, rows of the table) of each table of samples that a run's file points to."""
    return [
        (step, json.loads((file.parent / "files" / value).read_text())["data"])
        for step, value in history(file, "eval/samples.path")
    ]


def expected(first: int, last: int) -> list[tuple[int, float]]:
    return [(step, story.row(step).loss) for step in range(first, last + 1, 10)]


def test_online_one_run_per_job_across_restarts_and_attempts(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    with FakeWandb() as server:
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            story.start(run)
            story.train(run, 10, 100)
            until(lambda: read_cursor(run, "wandb").step == 100)
        assert server.runs["job-1"].complete, "finished in good order when publish stops"
        # Attempt 1 had gone on to step 120 when it crashed; attempt 2 repeats from its checkpoint at step 50.
        story.train(run, 110, 120)
        crash = Fault(code="crash", message="Segmentation fault")
        run.append([AttemptEnded(reason="crash", step=120, error=crash), JobQueued()])
        run.append([AttemptStarted(worker="b", device="cpu")])
        story.train(run, 60, 400, attempt=2)
        story.succeed(run, text="Boil ½ cup of rice.")
        with publishing(tmp_path, WandbSink(child, WANDB_KEY, server.url, flush_s=0.2)):
            until(lambda: closed(run, "wandb"))
        (seen,) = server.runs.values()
        assert seen.rows("train/step", "train/loss") == expected(10, 400)
        assert seen.rows("train/step", "eval/loss", "eval/event") == [(0, 2.31, 7), (400, 0.91, 11)]
        assert seen.rows("train/tokens_per_s", "train/mfu", "train/padding_fraction")[0] == (14_700.0, 0.6014, 0.04)
        assert seen.rows("gpu/utilisation", "gpu/power_w", "host/memory_used_bytes")[0] == (0.97, 412.5, 21 * 2**30)
        assert {key.split("/")[0] for row in seen.history for key in row if "/" in key} == {
            "train",
            "eval",
            "gpu",
            "host",
        }
        assert seen.tables("eval/samples") == [(400, [[400, *["Boil ½ cup of rice."] * 3]] * 2)]
        assert seen.alerts == [
            ("WARN", "chef: attempt 1 failed, trying again", "The trainer crashed: Segmentation fault")
        ]
        assert (seen.starts, seen.exit_code, seen.group, seen.name) == (2, 0, "job-1", "chef")
        assert (seen.summary["status"], seen.summary["attempts"]) == ("succeeded", 2)
        assert seen.config["schedule"]["value"]["batch_size"] == 128
        assert server.keys == {WANDB_KEY}
    written = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    assert WANDB_KEY.encode() not in written


def test_offline_history_row_by_row_and_one_directory_per_start(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        story.start(run)
        story.train(run, 10, 100)
        until(lambda: read_cursor(run, "wandb").step == 100)
        pids = children()
        assert pids
        arguments = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert b"worker.sinks.wandb_child" in arguments
    story.train(run, 110, 400)
    run.append([story.evaluation(400, 0.93, samples=1, text="Boil ½ cup of rice.")])
    run.append([OomRecovered(step=401, micro_batch_before=8, micro_batch_after=4, message="no", milliseconds_lost=9.0)])
    error = Fault(code="non_finite", message="the loss is NaN at step 401", hint="lower schedule.learning_rate")
    run.append([AttemptEnded(reason="non_finite", step=401, error=error), JobFailed(error=error)])
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        until(lambda: closed(run, "wandb"))
    assert not children(), "nobody outlives publish"
    first, second = offline_files(run)
    assert history(first, "train/loss") == expected(10, 100)
    assert history(first, "eval/loss") == [(0, 2.31)]
    assert history(second, "train/loss") == expected(110, 400)
    assert tables(second) == [(400, [[400, *["Boil ½ cup of rice."] * 3]])]
    alerts = [(record["alert"]["level"], record["alert"]["title"]) for record in records(second) if "alert" in record]
    assert alerts == [("WARN", "chef: out of memory, recovered"), ("ERROR", "chef: failed")]
    runs = [record["run"] for file in (first, second) for record in records(file) if record["type"] == "run"]
    assert {each["run_group"] for each in runs} == {"job-1"}
    assert len({each["run_id"] for each in runs}) == 2
    (end,) = [record["exit"] for record in records(second) if record["type"] == "exit"]
    assert end["exit_code"] == 1


def test_unreachable_becomes_offline_and_complete_and_no_one_waits(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 400)
    story.succeed(run)
    with FakeDiscord() as discord:
        discord.hang()
        begun = time.monotonic()
        sinks: list[Sink] = [
            WandbSink(child, WANDB_KEY, "http://127.0.0.1:9", flush_s=0.2),
            DiscordSink(Webhook(discord.url)),
        ]
        with publishing(tmp_path, *sinks):
            until(lambda: closed(run, "wandb"))
            assert time.monotonic() - begun < 20
            discord.release()
    (file,) = offline_files(run)
    assert file.parent.name.startswith("offline-run-")
    assert history(file, "train/loss") == expected(10, 400)
    assert history(file, "eval/loss") == [(0, 2.31), (400, 0.91)]


PUBLISH = """
import sys, threading
from pathlib import Path
from jobs.lifeline import tied
from worker.publish import Line, publish
from worker.sinks.wandb import WandbSink
stop = threading.Event()
sink = WandbSink(lambda: tied(sys.executable, "-m", "worker.sinks.wandb_child"), mode="offline", flush_s=0.2)
publish(Path(sys.argv[1]), [Line(sink)], lambda _: stop.wait(0.02), stop)
"""


def test_publish_killed_and_its_child_killed_no_row_is_missing(tmp_path: Path) -> None:
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 100)
    process = subprocess.Popen([sys.executable, "-c", PUBLISH, str(tmp_path)])
    until(lambda: read_cursor(run, "wandb").step == 100)
    (pid,) = children(process.pid)
    process.kill()
    process.wait()
    until(lambda: not alive(pid))
    story.train(run, 110, 200)
    with publishing(tmp_path, WandbSink(child, mode="offline", flush_s=0.2)):
        until(lambda: read_cursor(run, "wandb").step == 200)
        story.train(run, 210, 300)
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        until(lambda: read_cursor(run, "wandb").step == 300)
    first, second, third = offline_files(run)
    assert history(first, "train/loss") == expected(10, 100), "what the cursor counts as sent is on disk"
    assert history(second, "train/loss")[:10] == expected(110, 200)
    assert history(third, "train/loss") == expected(210, 300)


def test_a_paused_job_holds_no_process_and_a_refused_one_no_run(tmp_path: Path) -> None:
    paused, refused = story.submit(tmp_path, "job-1"), story.submit(tmp_path, "job-2")
    story.start(paused)
    paused.append([JobRequested(request="pause"), AttemptEnded(reason="interrupted", step=0), JobPaused()])
    refused.append([JobFailed(error=Fault(code="no_such_file", message="no"))])
    with publishing(tmp_path, WandbSink(child, flush_s=0.2)):
        until(lambda: closed(refused, "wandb") and read_cursor(paused, "wandb").event == paused.record().number)
        assert not children()
        paused.append([JobResumed()])
        until(lambda: read_cursor(paused, "wandb").event == paused.record().number)
        assert not children()
    assert not (refused.path / "wandb").exists()
    assert len(offline_files(paused)) == 1


def children(parent: int | str = "self") -> list[int]:
    """Process ids of the W&B children of a process."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            for pid in (task / "children").read_text().split():
                if b"wandb_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and waits to be reaped does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
