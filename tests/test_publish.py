"""publish over real run directories: nothing lost, at most one repeat, and no sink waits for another."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from jobs.disk.rundir import list_runs, truncate_metrics
from jobs.events import Event, JobSubmitted
from jobs.heartbeat import SinkLag
from jobs.process.logs import JsonLines, TextLines
from jobs.trainer_facts import Fault
from tests.sinks import story
from tests.sinks.driving import Listener, closed, publishing, until, whole
from tests.support.fakes import FakeDiscord
from worker import publish as publish_module
from worker.feed import SinkFeed
from worker.sinks.base import DONE, Later, Outcome, Sink, SinkSettings
from worker.sinks.curve import CurveSink
from worker.sinks.discord import sink as discord_module
from worker.sinks.discord.sink import DiscordSink
from worker.sinks.discord.webhook import Webhook
from worker.sinks.log import LogSink
from worker.sinks.registry import sinks_of


def test_events_and_rows_arrive_in_order_while_they_are_written(tmp_path: Path) -> None:
    listener = Listener()
    (tmp_path / "runs").mkdir()
    with publishing(tmp_path / "runs", listener):
        run = story.submit(tmp_path / "runs")  # appears after the first listing
        until(lambda: listener.events == [("job-1", 1)])
        story.start(run)
        for step in range(10, 60, 10):
            story.train(run, step, step)
        until(lambda: listener.steps == [10, 20, 30, 40, 50])
        story.succeed(run)
        until(lambda: closed(run, "listener"))
    assert listener.events == [("job-1", number) for number in range(1, 11)]
    assert listener.closed == ["job-1"]


def test_all_rows_come_before_the_terminal_event(tmp_path: Path) -> None:
    listener = Listener()
    SinkFeed(listener, whole(tmp_path)).turn()
    assert listener.order[-2:] == ["rows", "job.succeeded"]
    assert listener.steps == list(range(10, 401, 10))


def test_a_torn_last_line_is_waited_for(tmp_path: Path) -> None:
    listener = Listener()
    run = story.submit(tmp_path)
    feed = SinkFeed(listener, run)
    story.start(run)
    line = story.row(10).model_dump_json().encode() + b"\n"
    with open(run.metrics_file, "ab", buffering=0) as file:
        file.write(line[:50])
        feed.turn()
        assert listener.steps == []
        file.write(line[50:])
        feed.turn()
    assert listener.steps == [10]


@pytest.mark.parametrize("restarted", [False, True], ids=["one publish", "publish is restarted meanwhile"])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "cut in place"])
@pytest.mark.parametrize("read_until", [30, 50, 100], ids=str)
@pytest.mark.parametrize("redone_until", [50, 60, 150], ids=str)
def test_each_row_comes_once_when_an_attempt_begins_at_an_earlier_step(
    tmp_path: Path, restarted: bool, replaced: bool, read_until: int, redone_until: int
) -> None:
    """Attempt 1 is read so far, and has reached step 100. Attempt 2 begins at step 50 and gets so far until the next
    look: its rows may end before, at and behind where the reader stood."""
    run, listener = story.submit(tmp_path), Listener()
    story.start(run)
    feed = SinkFeed(listener, run)
    story.train(run, 10, read_until)
    feed.turn()
    story.train(run, read_until + 10, 100)
    kept = b"".join(run.metrics_file.read_bytes().splitlines(keepends=True)[:5])
    if replaced:
        truncate_metrics(run.metrics_file, 50)
        assert run.metrics_file.read_bytes() == kept
    else:
        os.truncate(run.metrics_file, len(kept))
    story.train(run, 60, redone_until, attempt=2)
    if restarted:
        feed = SinkFeed(listener, run)
    feed.turn()
    redone = list(range(60, redone_until + 1, 10))
    assert listener.steps == [*range(10, max(read_until, 50) + 1, 10), *redone]
    story.train(run, redone_until + 10, 170, attempt=2)
    feed.turn()
    assert listener.steps == [*range(10, max(read_until, 50) + 1, 10), *range(60, 171, 10)]


def test_a_restart_goes_on_from_the_cursor(tmp_path: Path) -> None:
    run = whole(tmp_path)
    first = Listener(answer=lambda event: Later(60, "full") if event.number >= 6 else DONE)
    feed = SinkFeed(first, run)
    feed.turn()
    second = Listener()
    again = SinkFeed(second, run)
    again.turn()
    assert [number for _, number in first.events + second.events] == list(range(1, 11))
    assert first.steps + second.steps == list(range(10, 401, 10))
    third = SinkFeed(Listener(), run)
    assert third.closed, "a directory whose cursor stands at the terminal event is skipped"


def test_with_a_damaged_cursor_everything_is_sent_again(tmp_path: Path) -> None:
    # Before: the sink heard of that job never again.
    run = whole(tmp_path)
    SinkFeed(Listener(answer=lambda event: Later(60, "full") if event.number >= 6 else DONE), run).turn()
    (cursor,) = run.sinks.iterdir()
    cursor.write_bytes(b"")
    listener = Listener()
    SinkFeed(listener, run).turn()
    assert [number for _, number in listener.events] == list(range(1, 11))


def test_a_damaged_row_of_metrics_holds_up_nothing(tmp_path: Path) -> None:
    run = whole(tmp_path)
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(b"".join([lines[0], b"\0\0\n", *lines[2:]]))
    listener = Listener()
    SinkFeed(listener, run).turn()
    assert listener.steps == [10, *range(30, 401, 10)]
    assert [number for _, number in listener.events] == list(range(1, 11))


def test_a_crash_between_sending_and_saving_repeats_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = whole(tmp_path)
    listener = Listener()

    class Killed(BaseException):
        pass

    save = SinkFeed._save

    def killed(feed: SinkFeed) -> None:
        if feed._cursor.event == 7:
            raise Killed
        save(feed)

    with monkeypatch.context() as patch:
        patch.setattr(SinkFeed, "_save", killed)
        with pytest.raises(Killed):
            SinkFeed(listener, run).turn()
    SinkFeed(listener, run).turn()
    assert [number for _, number in listener.events] == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10]


def test_an_unexpected_error_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[float] = []

    def trip(event: Event) -> Outcome:
        if event.number == 3 and len(attempts) < 3:
            attempts.append(now[0])
            raise RuntimeError("a fault of ours")
        return DONE

    now = [100.0]
    listener = Listener(answer=trip)
    feed = SinkFeed(listener, whole(tmp_path), clock=lambda: now[0])
    while not feed.closed:
        feed.turn()
        now[0] = min(feed.due, now[0] + 60)
    assert attempts == [100, 101, 103]
    assert listener.events == [("job-1", number) for number in range(1, 11)]
    assert caplog.text.count("Traceback") == 3
    assert "a fault of ours" in caplog.text


def test_a_full_disk_does_not_repeat_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker.feed.write_atomically", full)
    listener = Listener()
    feed = SinkFeed(listener, whole(tmp_path))
    for _ in range(3):
        feed.turn()
    assert listener.events == [("job-1", number) for number in range(1, 11)]


def test_a_hanging_sink_delays_no_other(tmp_path: Path) -> None:
    released = threading.Event()

    def hang(event: Event) -> Outcome:
        released.wait(600)
        return DONE

    stuck, lively = Listener("stuck", answer=hang), Listener("lively")
    run = whole(tmp_path)
    with publishing(tmp_path, stuck, lively, LogSink(), CurveSink()):
        until(lambda: closed(run, "lively") and closed(run, "log") and closed(run, "curve"))
        assert stuck.events == []
        released.set()
        until(lambda: closed(run, "stuck"))
    assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_hanging_discord_delays_no_other(tmp_path: Path) -> None:
    with FakeDiscord() as discord:
        discord.hang()
        run = whole(tmp_path)
        lively = Listener("lively")
        with publishing(tmp_path, DiscordSink(Webhook(discord.url, timeout_s=(1.0, 1.0))), lively):
            until(lambda: closed(run, "lively"))
            assert not closed(run, "discord")
            discord.release()
            until(lambda: closed(run, "discord"))
        assert discord.titles == ["chef: attempt 1 ended", "chef: done"]


def test_a_sink_configured_later_leaves_old_jobs_alone(tmp_path: Path) -> None:
    old, running = whole(tmp_path, "job-1"), story.submit(tmp_path, "job-2")
    with publishing(tmp_path, DiscordSink(None)):
        until(lambda: closed(old, "discord"))
    with FakeDiscord() as discord:
        with publishing(tmp_path, DiscordSink(Webhook(discord.url))):
            story.start(running)
            discord.wait_for(lambda: discord.messages)
        assert all("job-2" in message.footer for message in discord.messages)


def test_a_deleted_run_directory_is_let_go(tmp_path: Path) -> None:
    listener = Listener()
    run = story.submit(tmp_path)
    with publishing(tmp_path, listener):
        until(lambda: listener.events)
        os.rename(run.path, tmp_path / "tmp-gone")
        until(lambda: listener.closed == ["job-1"])


def test_a_wrong_webhook_takes_only_discord_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"DISCORD_WEBHOOK": "https://example.org/api/webhooks/1/s3cr3t", "WANDB_MODE": "disabled"}
    sinks = sinks_of(SinkSettings(tmp_path, wrong))
    assert [sink.name for sink in sinks] == ["log", "curve", "wandb", "discord"]
    submitted = JobSubmitted(name="chef", model="m", spec_sha256="0")
    assert [sink.accepts(submitted) for sink in sinks] == [True, True, False, False]
    assert "https://discord.com/api/webhooks/<id>/<token>" in caplog.text
    assert "s3cr3t" not in caplog.text + repr(sinks)


def test_a_wrong_option_of_a_sink_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LONGHAUL_DISCORD_EVENTS"):
        sinks_of(SinkSettings(tmp_path, {"LONGHAUL_DISCORD_EVENTS": "all"}))


def test_a_webhook_that_was_gone_is_not_asked_by_the_next_publish(tmp_path: Path) -> None:
    def discord_sink() -> Sink:
        return discord_module.make(SinkSettings(tmp_path / "runs", {"DISCORD_WEBHOOK": discord.url}))

    first, second = whole(tmp_path / "runs", "job-1"), whole(tmp_path / "runs", "job-2")
    with FakeDiscord() as discord:
        discord.answer_next(404)
        for run in (first, second):
            SinkFeed(discord_sink(), run).turn()
        assert [seen.status for seen in discord.requests] == [404]
        assert [run.id for run in list_runs(tmp_path / "runs")] == ["job-1", "job-2"], "the memory is no run"
        discord.token = "new"
        SinkFeed(discord_sink(), whole(tmp_path / "runs", "job-3")).turn()
        assert discord.titles == ["chef: attempt 1 ended", "chef: done"]


def test_the_log_has_one_line_for_each_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longhaul.events")
    run = whole(tmp_path)
    SinkFeed(LogSink(), run).turn()
    records = [record for record in caplog.records if record.name == "longhaul.events"]
    lines = [json.loads(JsonLines().format(record)) for record in records]
    assert [(line["event"], line["type"]) for line in lines] == [(event.number, event.type) for event in run.events()]
    assert lines[-1]["fact"]["loss"] == 0.91
    text = TextLines().format(records[-1])
    assert "job-1 event 10, attempt 1: job.succeeded (model=model, step=400, loss=0.91" in text and "{" not in text


def test_a_secret_in_an_event_is_in_no_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longhaul.events")
    run = story.submit(tmp_path)
    story.start(run)
    secret = "hf_" + "a1B2" * 9
    story.fail(run, Fault(code="rejected", message=f"one line\nanother with {secret}"))
    SinkFeed(LogSink(), run).turn()
    for record in (record for record in caplog.records if record.name == "longhaul.events"):
        for form in (JsonLines(), TextLines()):
            line = form.format(record)
            assert secret not in line and "\n" not in line


KILLED = """
import sys, threading
from pathlib import Path
from worker.publish import SinkThread, publish
from worker.sinks.discord.sink import DiscordSink
from worker.sinks.discord.webhook import Webhook
stop = threading.Event()
publish(Path(sys.argv[1]), [SinkThread(DiscordSink(Webhook(sys.argv[2])))], lambda _: stop.wait(0.02), stop)
"""


def test_killed_again_and_again_discord_hears_everything(tmp_path: Path) -> None:
    """kill -9 at four moments: every event that makes a message is there, and each kill repeats at most one."""
    run = story.submit(tmp_path)
    story.start(run)
    story.train(run, 10, 400)
    story.succeed(run)
    with FakeDiscord() as discord:

        def asked(times: int) -> bool:
            return len(discord.requests) >= times

        for seen in (1, 2, 3, 4):
            process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), discord.url])
            try:
                discord.wait_for(partial(asked, seen))
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        with publishing(tmp_path, DiscordSink(Webhook(discord.url))):
            until(lambda: closed(run, "discord"))
        posts = [seen for seen in discord.requests if seen.method == "POST"]
        assert len(posts) <= 2 + 4
        ends = [message for message in discord.messages if message.title == "chef: done"]
        assert 1 <= len(ends) <= 2
        assert {message.footer for message in ends} == {"job-1 · attempt 1 · event 10"}
        assert "chef: attempt 1 ended" in discord.titles


def test_publish_imports_neither_torch_nor_a_web_framework() -> None:
    code = "import sys, worker.publish; print({'torch', 'fastapi', 'wandb', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "set()"
    assert publish_module.POLL_S <= 2


def test_publish_says_how_far_each_sink_is_behind(tmp_path: Path) -> None:
    """A hanging sink reads no files any more: what it has not taken is told all the same, of every job."""
    released = threading.Event()

    def hang(event: Event) -> Outcome:
        released.wait(600)
        return DONE

    stuck, lively = Listener("stuck", answer=hang), Listener("lively")
    first = whole(tmp_path, "job-1")
    with publishing(tmp_path, stuck, lively) as lines:
        until(lambda: closed(first, "lively"))
        second = story.submit(tmp_path, "job-2")
        until(lambda: ("job-2", 1) in lively.events)
        lag = {line.sink: line.lag for line in lines}
        assert lag["lively"] == SinkLag(jobs_behind=0, oldest_s=0.0)
        assert lag["stuck"].jobs_behind == 1, "it has not heard of the second"
        oldest = first.events()[0].at
        assert 0 < lag["stuck"].oldest_s <= time.time() - oldest
        story.start(second)
        until(lambda: lively.events.count(("job-2", 2)) == 1)
        released.set()
        until(lambda: closed(first, "stuck") and [line.lag.jobs_behind for line in lines] == [0, 0])


def test_a_sink_that_takes_no_such_job_is_not_behind(tmp_path: Path) -> None:
    run = whole(tmp_path)
    feed = SinkFeed(DiscordSink(None), run)
    assert feed.behind_since == run.events()[0].at, "nobody has looked yet"
    feed.turn()
    assert feed.behind_since is None


def test_what_is_put_off_counts_from_its_first_event(tmp_path: Path) -> None:
    run = whole(tmp_path)
    feed = SinkFeed(Listener(answer=lambda event: Later(60, "full") if event.number >= 6 else DONE), run)
    feed.turn()
    assert feed.behind_since == run.events()[5].at
