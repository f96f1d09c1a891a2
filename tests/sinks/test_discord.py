"""What a person sees in the channel, told by real run directories through the feed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import pytest

from jobs.disk.event_log import event_line
from jobs.disk.rundir import RunDir, repair
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPauseRequested,
    JobQueued,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    JobValidated,
    TaskStarted,
    TaskSubmitted,
    TaskWaiting,
)
from jobs.reasons import Reason
from jobs.trainer_facts import CheckpointSaved, DeviceWaiting, DiskLow, Fault, OomRecovered
from jobs.verdict import BaseDifference, ConfidenceInterval, Verdict
from tests.sinks import story
from tests.sinks.driving import closed
from tests.support.fakes import FakeDiscord, Message
from tests.support.machine import Clock
from tests.support.samples import checked, memory_plan, prepared, time_summary
from worker.feed import SinkFeed
from worker.sinks.discord import embeds
from worker.sinks.discord.limits import DiscordOptions
from worker.sinks.discord.sink import DiscordSink
from worker.sinks.discord.webhook import SUPPRESS_NOTIFICATIONS, TOO_MANY_EDITS, Webhook

PNG = b"\x89PNG\r\n\x1a\n"


class JobChannel(FakeDiscord):
    """A Discord, and a job of which it hears: its run directory, its feed, and the clock by which both go."""

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self.clock = Clock(1_000_000.0)
        self.run = story.submit(runs)

    def __enter__(self) -> Self:
        super().__enter__()
        self.sink = DiscordSink(Webhook(self.url, self.clock, timeout_s=(5.0, 2.0)), self.clock)
        self.listen()
        return self

    def listen(self, sink: DiscordSink | None = None) -> None:
        """As publish begins to, with this sink or the usual one."""
        self.feed = SinkFeed(sink or self.sink, self.run, self.clock)

    def wants(self, **texts: str) -> None:
        """Listen with these options."""
        given = {"events": None, "mention": None, "url": None, **texts}
        webhook = Webhook(self.url, self.clock, timeout_s=(5.0, 2.0))
        self.listen(DiscordSink(webhook, self.clock, options=DiscordOptions.of(**given)))

    def turn(self, after_s: float = 0.0) -> None:
        """What publish does with a job each time, so many seconds later."""
        self.clock.now += after_s
        self.feed.turn()

    def tell(self, *facts: AnyFact) -> None:
        """These happen to the job together, and publish sees it."""
        self.run.append(list(facts))
        self.turn()

    def hears_to_the_end_of(self, other: RunDir) -> bool:
        """Whether nothing is left to tell of another job after one turn."""
        feed = SinkFeed(self.sink, other, self.clock)
        feed.turn()
        return feed.closed


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[JobChannel]:
    with JobChannel(tmp_path / "runs") as each:
        yield each


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are any picture: that they are drawn is shown by other tests."""
    monkeypatch.setattr("worker.sinks.discord.sink.draw_job", lambda job: PNG)


def oom(step: int, message: str = "CUDA out of memory") -> OomRecovered:
    return OomRecovered(step=step, micro_batch_before=8, micro_batch_after=4, message=message, milliseconds_lost=812.5)


def test_a_good_run_is_two_messages_and_a_picture(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    (start,) = channel.messages
    assert start.title == "chef: training"
    assert start.footer == "job-1 · attempt 1 · event 6", "edited when the model was loaded"
    assert "training begins" in start.text
    story.train(channel.run, 10, 200)
    channel.turn(after_s=20)
    assert "step 200 of 400" in start.text
    assert "50 %" in start.text
    assert "██████████░░░░░░░░░░" in start.text
    assert "training begins" not in start.text, "it has"
    assert {each["name"]: each["value"] for each in start.payload["embeds"][0]["fields"]} == {
        "Loss": f"{story.row(200).loss:.4f}",
        "Validation loss": "2.3100",
        "Time left": "11 min 10 s",
        "Rows per second": "38.2",
        "Tokens per second": "14,700",
        "MFU": "60.1 %",
        "Memory": "27.0 GiB",
        "Learning rate": "5e-5",
        "GPU": "97 % busy · 30.0 GiB in use · 71 °C · 412 W",
    }
    story.train(channel.run, 210, 400)
    story.succeed(channel.run)
    channel.turn()
    assert channel.titles == ["chef: attempt 1 ended", "chef: done"]
    done = channel.messages[1]
    colours = [each.payload["embeds"][0]["color"] for each in channel.messages]
    assert colours == [embeds.QUIET, embeds.GOOD], "one of them is green"
    assert done.attachments["loss.png"].startswith(PNG)
    assert done.payload["embeds"][0]["image"] == {"url": "attachment://loss.png"}
    assert done.footer == "job-1 · attempt 1 · event 10"
    assert "2.3100 → 0.9100" in done.text and "%" not in done.text
    assert "Fetch it with `longhaul download job-1`." in done.text
    assert channel.feed.closed


@pytest.mark.parametrize(
    ("change", "all_empty", "title", "colour"),
    [
        (BaseDifference(difference=12.3, low=10.1, high=14.6), 0, "chef: done, better than before", embeds.GOOD),
        (BaseDifference(difference=0.0, low=-1.0, high=1.0), 0, "chef: done, no better than before", embeds.WARNING),
        (BaseDifference(difference=-2.0, low=-3.0, high=-1.0), 0, "chef: done, worse than before", embeds.WARNING),
        (None, 0, "chef: done", embeds.GOOD),
        (None, 64, "chef: done, but it writes nothing", embeds.WARNING),
    ],
)
def test_a_finished_job_says_whether_its_model_is_better(
    channel: JobChannel, change: BaseDifference | None, all_empty: int, title: str, colour: int
) -> None:
    compared = {} if change is None else {"chrf": change}
    verdict = Verdict.of("chrf", 41.2, ConfidenceInterval(low=38.9, high=43.6), compared, all_empty=all_empty)
    story.start(channel.run)
    story.train(channel.run, 10, 20)
    story.succeed(channel.run, verdict=verdict)
    channel.turn()
    done = channel.messages[-1].payload["embeds"][0]
    assert (done["title"], done["color"]) == (title, colour)
    assert done["fields"][0] == {"name": "Quality", "value": verdict.text, "inline": False}


def test_a_better_step_whose_checkpoint_is_missing_is_told(channel: JobChannel) -> None:
    story.start(channel.run)
    story.succeed(channel.run, better_step=20)
    channel.turn()
    assert fields(channel.messages[-1])["Chosen as"] == (
        "the best by validation loss of what was saved, 0.9100; step 20 was better, and its checkpoint is missing"
    )


def test_a_model_that_was_evaluated_alone_is_told_by_its_metrics(channel: JobChannel) -> None:
    story.start(channel.run)
    intervals = {"chrf": ConfidenceInterval(low=38.9, high=43.6)}
    channel.run.append([
        AttemptEnded(reason="done", step=0),
        JobSucceeded(model=None, step=0, loss=2.31, metrics={"chrf": 41.2}, intervals=intervals),
    ])  # fmt: skip
    channel.turn()
    done = channel.messages[-1]
    assert done.payload["embeds"][0]["description"] == "The model is evaluated."
    told = fields(done)
    assert (told["Validation loss"], told["ChrF"]) == ("2.3100", "41.2 (38.9 to 43.6)")
    assert not {"Kept step", "Training time", "Chosen as"} & set(told)


def test_the_progress_message_shows_a_sample_and_the_time_of_its_figures(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    (progress,) = channel.messages
    assert len(progress.payload["embeds"]) == 1
    story.train(channel.run, 10, 20)
    channel.run.append([story.evaluation(20, 1.9, samples=3, text="<@123> *Boil* the rice at <t:0:R>.")])
    channel.turn(after_s=20)
    figures, sample = progress.payload["embeds"]
    at = datetime.fromisoformat(figures["timestamp"]).timestamp()
    assert at == pytest.approx(channel.run.metrics()[-1].at, abs=1), (
        "a trainer that hangs is not taken for one that trains"
    )
    assert sample["title"] == "Sample, step 20"
    assert [(field["name"], field["value"]) for field in sample["fields"]] == [
        (name, r"\<@123\> \*Boil\* the rice at \<t:0:R\>.") for name in ("Input", "Wanted", "Written")
    ]


def test_progress_is_coalesced_and_the_latest_wins(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    before = len(channel.requests)
    for step in range(10, 310, 10):  # one row a second
        story.train(channel.run, step, step)
        channel.turn(after_s=1)
    edits = [version["embeds"][0]["description"] for version in channel.messages[0].versions[2:]]
    assert [text.split("step ")[1].split(" ")[0] for text in edits] == ["150", "300"]
    assert len(channel.requests) == before + 2


@pytest.mark.parametrize("days", [-400, -2, 2, 400])
def test_a_clock_that_is_set_holds_no_row_back(channel: JobChannel, days: int) -> None:
    wall = Clock(1_700_000_000.0)
    channel.listen(DiscordSink(Webhook(channel.url, channel.clock), wall))
    story.start(channel.run)
    story.train(channel.run, 10, 10)
    channel.turn()
    wall.now += days * 86400
    for step in (20, 30):
        story.train(channel.run, step, step)
        channel.clock.now += 80
        wall.now += 80
        channel.turn()
    (progress,) = channel.messages
    assert "step 30 of 400" in progress.text and "loss.png" in progress.attachments


def test_a_held_back_row_is_shown_when_its_time_has_come(channel: JobChannel) -> None:
    story.start(channel.run)
    story.train(channel.run, 10, 10)
    channel.turn()
    assert channel.feed.due == pytest.approx(channel.clock.now + 15)
    channel.clock.now = channel.feed.due
    channel.turn()
    assert "step 10 of 400" in channel.messages[0].text
    assert channel.feed.due == float("inf")


def silent(message: Message) -> bool:
    """Whether no phone rang when it came."""
    return bool(message.payload.get("flags", 0) & SUPPRESS_NOTIFICATIONS)


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("hours", [24, 434])
def test_a_long_run_leaves_one_progress_message_and_wakes_nobody_without_need(channel: JobChannel, hours: int) -> None:
    """With an attempt that crashes each quarter, an out-of-memory error, and all that Discord and people do to it."""
    story.start(channel.run)
    channel.turn()
    draw, attempt, ticks, begun = random.Random(hours), 1, 300, channel.clock.now
    for tick in range(1, ticks + 1):
        if tick % (ticks // 4) == ticks // 8:
            channel.run.append([oom(tick)])
            channel.run.append([AttemptEnded(reason="crash", step=tick, error=Fault(code="crash", message="Killed"))])
            channel.run.append([JobQueued(), AttemptStarted(worker="box-1", device="cuda")])
            attempt += 1
        story.train(channel.run, tick, tick, attempt=attempt)
        match draw.randrange(40):
            case 0:
                channel.answer_next(429, retry_after=2.0)
            case 1:
                channel.answer_next(500)
            case 2 if hours == 24:  # with more between two rows each is a new message, and none is edited
                channel.answer_next(400, code=TOO_MANY_EDITS)
            case 3:
                channel.messages[:] = [each for each in channel.messages if each.title != "chef: training"]
        for _ in range(4):
            channel.turn(after_s=hours * 3)
        standing = [each for each in channel.messages if each.title == "chef: training"]
        assert len(standing) == 1 and f"step {tick:,} of" in standing[0].text, tick
    story.succeed(channel.run)
    for _ in range(3):
        channel.turn(after_s=300)
    assert channel.feed.closed and channel.clock.now - begun >= hours * 3600
    assert channel.titles.count("chef: training") == 0 and channel.titles[-1] == "chef: done"
    ringing = [message.title for message in channel.messages if not silent(message)]
    assert ringing == ["chef: done"]


@pytest.mark.usefixtures("_undrawn")
def test_an_old_message_is_replaced_before_an_hour_is_up(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    seen = set()
    for minute in range(0, 120, 1):
        story.train(channel.run, minute + 1, minute + 1)
        channel.turn(after_s=60)
        (progress,) = channel.messages
        seen.add(progress.id)
        assert len(progress.versions) <= 52 and silent(progress)
    assert len(seen) == 3


@pytest.mark.parametrize(("status", "code"), [(400, 30046), (429, 30046), (404, 10008)])
def test_a_message_that_cannot_be_edited_is_replaced(channel: JobChannel, status: int, code: int) -> None:
    story.start(channel.run)
    channel.turn()
    (before,) = channel.messages
    channel.answer_next(status, code=code)
    story.train(channel.run, 10, 10)
    channel.turn(after_s=20)
    story.train(channel.run, 20, 20)
    channel.turn(after_s=20)
    (progress,) = channel.messages
    assert "step 20 of 400" in progress.text and silent(progress) and progress.id != before.id


def test_events_keep_their_order_through_429_5xx_and_silence(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.run.append([oom(3)])
    story.fail(
        channel.run, Fault(code="missing_tensor", message="lm_head.weight is missing", hint="take the whole model")
    )
    channel.answer_next(429, retry_after=0.5)
    channel.answer_next(500)
    channel.turn()
    channel.clock.now = channel.feed.due
    channel.turn()
    channel.hang()
    channel.clock.now = channel.feed.due
    channel.turn()
    channel.release()
    while not channel.feed.closed:
        channel.clock.now = channel.feed.due
        channel.turn()
    assert channel.titles == ["chef: out of memory, recovered", "chef: failed"]
    assert "lm_head.weight is missing" in channel.messages[1].text
    assert "Take the whole model" in channel.messages[1].text


def test_a_guards_refusal_shows_code_tensors_and_hint(channel: JobChannel) -> None:
    names = [f"decoder.block.{block}.layer.0.SelfAttention.{part}.weight" for block in range(24) for part in "qkvo"]
    message = f"{len(names)} tensors missing from the weights, which would train on from random values: "
    hint = "the model folder and its config.json do not belong together, or the files are damaged"
    channel.run.append([JobQueued(), AttemptStarted(worker="box-1", device="RTX 5090")])
    story.fail(channel.run, Fault(code="missing_keys", message=message + ", ".join(names), hint=hint))
    channel.turn()
    embed = channel.messages[-1].payload["embeds"][0]
    assert embed["title"] == "chef: failed"
    assert message + names[0] + ", " + names[1] in embed["description"]
    assert embed["description"].endswith("…\n```")
    assert len(embed["description"]) < 1520, "what helps is seen without scrolling"
    assert [(field["name"], field["value"]) for field in embed["fields"]] == [
        ("Code", "`missing_keys`"),
        ("What helps", hint[0].upper() + hint[1:]),
    ]


def test_a_job_that_paused_by_itself_says_why_and_what_helps(channel: JobChannel) -> None:
    story.start(channel.run)
    error = Fault(code="no_valid_checkpoint", message="checkpoints/step-00000040 is gone", hint="bring it back")
    channel.tell(AttemptEnded(reason="no_valid_checkpoint", error=error), JobPaused(error=error))
    assert channel.titles == ["chef: paused"]
    embed = channel.messages[-1].payload["embeds"][0]
    assert "checkpoints/step-00000040 is gone" in embed["description"]
    assert [(field["name"], field["value"]) for field in embed["fields"]] == [
        ("Code", "`no_valid_checkpoint`"),
        ("What helps", "Bring it back"),
    ]


def test_a_failure_says_how_far_it_came(channel: JobChannel) -> None:
    story.start(channel.run)
    story.train(channel.run, 10, 90)
    error = Fault(code="non_finite", message="the loss is NaN at step 97", hint="lower training.learning_rate")
    channel.tell(AttemptEnded(reason="non_finite", step=97, error=error), JobFailed(error=error))
    assert {"name": "Reached", "value": "step 90 of 400", "inline": True} in channel.messages[-1].payload["embeds"][0][
        "fields"
    ]


def test_gone_for_good_lets_the_cursor_move_on(channel: JobChannel) -> None:
    story.start(channel.run)
    story.train(channel.run, 10, 400)
    story.succeed(channel.run)
    channel.answer_next(404)
    channel.turn()
    assert channel.feed.closed
    assert len(channel.requests) == 1


def test_a_payload_that_discord_refuses_holds_nothing_up(channel: JobChannel) -> None:
    story.start(channel.run)
    story.succeed(channel.run)
    channel.answer_next(400)
    channel.turn()
    assert channel.titles == ["chef: done"]
    assert channel.feed.closed


def test_a_picture_that_is_too_large_is_left_out(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    story.train(channel.run, 10, 400)
    channel.tell(AttemptEnded(reason="done", step=400))
    channel.run.append([story.SUCCEEDED])
    channel.answer_next(413)
    channel.turn()
    assert channel.titles[-1] == "chef: done"
    assert channel.messages[-1].attachments == {}


def test_crashes_are_told_and_interruptions_only_shown(channel: JobChannel) -> None:
    story.start(channel.run)
    story.train(channel.run, 10, 90)
    crash = Fault(code="crash", message="Segmentation fault")
    channel.run.append([AttemptEnded(reason="crash", step=90, error=crash), JobQueued(not_before_s=10)])
    channel.run.append([AttemptStarted(worker="box-1", device="RTX 5090")])
    story.train(channel.run, 50, 120, attempt=2)
    channel.turn()
    channel.turn(after_s=20)
    assert channel.titles == ["chef: attempt 1 failed, trying again", "chef: training"]
    assert "Segmentation fault" in channel.messages[0].text
    assert "in 10 s" in channel.messages[0].text
    assert "step 120" in channel.messages[1].text
    channel.tell(AttemptEnded(reason="interrupted", step=120), JobQueued(), AttemptStarted(worker="b", device="cpu"))
    assert channel.titles == ["chef: attempt 1 failed, trying again", "chef: training"]
    assert "attempt 3" in channel.messages[1].footer


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("gap_s", [20, 36 * 3600])
def test_a_week_of_a_job_leaves_one_message_for_each_state(channel: JobChannel, gap_s: int) -> None:
    """Whether Discord still edits its messages, or each is too old for that."""
    sent: list[tuple[str, str]] = []

    def seen(*facts: AnyFact) -> None:
        before = {message.id: message.title for message in channel.messages}
        channel.run.append(list(facts))
        channel.turn(after_s=gap_s)
        sent.extend(
            (message.title.removeprefix("chef: "), "silent" if silent(message) else "rings")
            for message in channel.messages
            if before.get(message.id) != message.title
        )

    killed = Fault.of(Reason.KILLED, " (signal SIGKILL, phase step, step 150)")
    full = Fault(code="disk_full", message="the disk is full", hint="make room; then `longhaul resume job-1`")
    story.start(channel.run)
    seen()
    story.train(channel.run, 10, 100)
    seen(CheckpointSaved(step=100, path="checkpoints/step-00000100", bytes=1, seconds=0.1))
    story.train(channel.run, 110, 150)
    seen(
        AttemptEnded(reason="killed", step=150, checkpoint_step=100, error=killed),
        JobQueued(not_before_s=10),
        AttemptStarted(worker="box-1", device="cuda"),
        story.LOADED,
    )
    failed = next(message for message in channel.messages if "failed" in message.title)
    assert "The trainer was killed at step 150." in failed.text and "50 steps are trained again." in failed.text
    assert Reason.KILLED.hint and Reason.KILLED.hint[1:] in failed.text
    story.train(channel.run, 110, 200, attempt=2)
    seen(AttemptEnded(reason="disk_full", step=200, checkpoint_step=100, error=full), JobPaused(error=full))
    seen(JobResumed(), AttemptStarted(worker="box-1", device="cuda"), story.LOADED)
    story.train(channel.run, 210, 400, attempt=3)
    story.succeed(channel.run)
    seen()
    assert sent == [
        ("training", "silent"),
        *([("training", "silent")] if gap_s > 3600 else []),  # the first is deleted
        ("attempt 1 failed, trying again", "silent"),
        ("training", "silent"),
        ("paused", "rings"),
        ("training", "silent"),
        ("attempt 3 ended", "silent"),
        ("done", "rings"),
    ]
    left = ["attempt 1 failed, trying again", "paused", "attempt 3 ended", "done"]
    assert [title.removeprefix("chef: ") for title in channel.titles] == left


def test_an_attempt_that_is_continued_says_so_and_one_that_was_resumed_is_told_below_the_pause(
    channel: JobChannel,
) -> None:
    story.start(channel.run)
    channel.run.append([CheckpointSaved(step=50, path="checkpoints/step-00000050", bytes=1, seconds=0.1)])
    channel.tell(AttemptEnded(reason="worker_lost", step=70), JobQueued())
    (progress,) = channel.messages
    told = "The next attempt starts as soon as it is first in the queue. The newest checkpoint is that of step 50."
    assert (
        progress.text.splitlines()[:1] == ["chef: attempt 1 ended"] and f"The worker was lost\n{told}" in progress.text
    )
    channel.run.append([AttemptStarted(worker="box-1", device="cuda"), story.LOADED])
    channel.tell(JobPauseRequested(), AttemptEnded(reason="interrupted", step=80), JobPaused())
    assert channel.titles == ["chef: attempt 2 ended", "chef: paused"] and "next attempt" not in progress.text
    channel.tell(JobResumed(), AttemptStarted(worker="box-1", device="cuda"), story.LOADED)
    assert channel.titles == ["chef: paused", "chef: training"], "the last message is true"
    assert all(map(silent, channel.messages))


def test_warnings_are_not_repeated_without_end(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.run.append([oom(step) for step in range(1, 9)])
    channel.run.append([DiskLow(step=9, free_bytes=10**9, needed_bytes=10**10)])
    story.train(channel.run, 10, 10)
    channel.turn()
    channel.turn(after_s=20)
    assert channel.titles == ["chef: training", "chef: out of memory, recovered", "chef: the disk is nearly full"]
    assert "Memory ran out 8 times in this attempt; each time the step was repeated" in channel.messages[0].text
    assert "1 checkpoint was skipped in this attempt" in channel.messages[0].text


def test_a_disk_and_a_gpu_that_fail_for_days_wake_a_person_twice_in_434_hours(channel: JobChannel) -> None:
    story.start(channel.run)
    for step in range(1, 32):  # every 14 hours
        low = DiskLow(step=step, free_bytes=10**9, needed_bytes=10**10)
        lost: list[AnyFact] = [AttemptEnded(reason="gpu_lost", step=step), JobQueued()]
        channel.run.append(
            [low, low, *lost, *[DeviceWaiting(message=f"nvidia-smi says {number}") for number in range(6)]]
        )
        channel.listen()  # publish is started anew
        channel.turn()
        channel.run.append([AttemptStarted(worker="box-1", device="cuda"), story.LOADED])
        channel.clock.now += 14 * 3600
    ringing = [message.title for message in channel.messages if not silent(message)]
    assert ringing == ["chef: the disk is nearly full", "chef: waits for a GPU"] * 2


def test_memory_that_runs_out_again_is_counted(channel: JobChannel) -> None:
    story.start(channel.run)
    for step in range(1, 7):
        channel.tell(oom(step), oom(step))
        channel.clock.now += 1200
    recovered = "chef: out of memory, recovered"
    assert channel.titles == ["chef: training", recovered]
    channel.tell(AttemptEnded(reason="done", step=7))
    assert sorted(channel.titles) == ["chef: attempt 1 ended", recovered]
    assert "Memory ran out 12 times in this attempt" in "".join(message.text for message in channel.messages)
    channel.tell(JobQueued(), AttemptStarted(worker="box-1", device="RTX 5090"), oom(8))
    assert channel.titles.count(recovered) == 2, "the next attempt is told anew"
    assert all(map(silent, channel.messages))


def test_memory_that_runs_out_is_counted_where_warnings_are_not_wanted(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.run.append([oom(1), DeviceWaiting(message="another trainer holds GPU 1")])
    channel.wants(events="progress, done")
    channel.turn()
    assert channel.titles == ["chef: training"]
    assert "Another trainer holds GPU 1\nMemory ran out once in this attempt" in channel.messages[0].text


def test_a_task_on_an_engine_is_told_in_the_message_of_its_attempt(channel: JobChannel) -> None:
    channel.run.append([checked(steps=9), prepared(9), JobQueued()])
    told: list[AnyFact] = [
        AttemptStarted(worker="box-1", device="cuda", engine="cluster"),
        TaskSubmitted(engine="cluster", task="7"),
        TaskWaiting(task="7", message="PENDING (Priority)"),
        TaskStarted(task="7", node="node-1"),
    ]
    texts = []
    for fact in told:
        channel.tell(fact)
        texts.append(channel.messages[-1].text)
    for text, words in zip(texts, (
        "The engine cluster gets the job.", "Waits for its turn on the engine cluster, as task 7.",
        "Waits on its engine: PENDING (Priority).", "Started on node-1, as task 7 of the engine; loading the model.",
    ), strict=True):  # fmt: skip
        assert words in text
    assert channel.titles.count("chef: training") == 1


def test_what_ran_out_and_why_is_shown(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.run.append(
        [
            OomRecovered(
                step=3,
                micro_batch_before=8,
                micro_batch_after=8,
                message="CUDA out of memory (others hold 6.2 GiB by python3 (pid 4711))",
                milliseconds_lost=1300.0,
                cause="other_processes",
                bucket="input ≤ 256, target ≤ 512",
                requested_bytes=2 * 2**30,
                allocated_bytes=27 * 2**30,
                reserved_bytes=28 * 2**30,
                other_processes_bytes=6 * 2**30,
            )
        ]
    )
    channel.turn()
    assert fields(channel.messages[1]) == {
        "Step": "3",
        "Micro-batch": "8 rows, as before",
        "Time lost": "1.3 s",
        "Cause": "Other processes hold memory of the GPU",
        "Length bucket": "input ≤ 256, target ≤ 512",
        "Memory": "2.0 GiB requested · 27.0 GiB allocated · 28.0 GiB reserved · 6.0 GiB held by other processes",
        "What happened": "```\nCUDA out of memory (others hold 6.2 GiB by python3 (pid 4711))\n```",
    }
    assert "repeated as it was" in channel.messages[1].text


def fields(message: Message) -> dict[str, str]:
    """Name → value of the fields of the first embed."""
    return {each["name"]: each["value"] for each in message.payload["embeds"][0].get("fields", [])}


NEEDED = "about 5 d 11 h at the nominal peak of an RTX 5090 (about 18 d 2 h expected)"


def test_the_time_that_a_job_needs_is_told_before_it_starts_and_until_it_is_measured(channel: JobChannel) -> None:
    story.start(channel.run, NEEDED)
    channel.turn()
    assert channel.titles == ["chef: planned", "chef: training"]
    assert [fields(message)["Time needed"] for message in channel.messages] == ["A" + NEEDED[1:]] * 2
    assert "400 steps" in channel.messages[0].text
    story.train(channel.run, 10, 20)
    channel.turn(after_s=60)
    shown = fields(channel.messages[1])
    assert "Time needed" not in shown
    assert (shown["Time left"], shown["Tokens per second"], shown["MFU"]) == ("21 min 13 s", "14,700", "60.1 %")


def test_the_memory_that_a_job_needs_is_told_beside_the_time(channel: JobChannel) -> None:
    memory = memory_plan().summary()
    channel.tell(checked(), prepared(4, time=time_summary(text=NEEDED), memory=memory))
    assert fields(channel.messages[0]) == {"Time needed": "A" + NEEDED[1:], "Memory needed": "P" + memory.text[1:]}


def test_no_usable_gpu_is_told_before_the_first_attempt(channel: JobChannel) -> None:
    channel.run.append([checked(), prepared(400), JobQueued()])
    channel.tell(DeviceWaiting(message="no NVIDIA driver was found here (driver 580 or newer is needed)"))
    assert channel.titles == ["chef: waits for a GPU"]
    assert "driver 580 or newer is needed" in channel.messages[0].text
    channel.run.append([DeviceWaiting(message=f"nvidia-smi says {number}") for number in range(6)])  # a driver gone mad
    channel.turn()
    assert len(channel.messages) == 3


def test_a_host_whose_memory_others_have_is_not_taken_for_a_missing_gpu(channel: JobChannel) -> None:
    story.start(channel.run)
    error = Fault.of(Reason.HOST_MEMORY_IN_USE, ": 33.0 GiB are needed")
    channel.run.append([AttemptEnded(reason="host_memory_in_use", error=error), JobQueued(not_before_s=30.0)])
    channel.tell(DeviceWaiting(message=error.message, memory_of_host=True))
    assert channel.titles == ["chef: attempt 1 ended"] and "The host's memory is taken" in channel.messages[0].text


def test_a_gpu_that_is_there_again_wakes_nobody(channel: JobChannel) -> None:
    channel.run.append([checked(), prepared(400), JobQueued()])
    channel.run.append([DeviceWaiting(message="no GPU here can take the job")])
    channel.tell(DeviceWaiting(message="there is a GPU again: it waits for its turn", available=True))
    assert channel.titles == ["chef: waits for a GPU", "chef: waits for its turn"]
    assert [silent(message) for message in channel.messages] == [False, True]


def test_a_gpu_that_another_trainer_holds_is_a_line_in_the_attempts_message(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.tell(DeviceWaiting(message="another trainer holds GPU 1"))
    assert channel.titles == ["chef: training"]
    assert "Another trainer holds GPU 1" in channel.messages[0].text


def test_pause_and_cancel_are_told_dry_runs_and_what_check_rejects_are_not(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.tell(JobPauseRequested(), AttemptEnded(reason="interrupted", step=50), JobPaused())
    channel.tell(JobCancelled(checkpoint="checkpoints/step-00000050"))
    assert channel.titles == ["chef: attempt 1 ended", "chef: paused", "chef: cancelled"]
    assert "checkpoints/step-00000050" in channel.messages[2].text
    fault = Fault(code="no_such_file", message="recipes.jsonl is not there", param="data.train")
    rejected = story.submit(channel.run.path.parent, "job-2")
    rejected.append([JobFailed(error=fault)])
    dry = story.submit(channel.run.path.parent, "job-3", dry_run=True)
    dry.append([checked(steps=400), JobValidated()])
    damaged_rows = story.submit(channel.run.path.parent, "job-4")
    damaged_rows.append([checked(steps=400), JobFailed(error=fault)])
    for other in (rejected, dry, damaged_rows):
        assert channel.hears_to_the_end_of(other)
    assert channel.titles[3:] == ["chef: failed before training"]
    assert "`data.train`" in channel.messages[3].text


@pytest.mark.parametrize("more", [{"integrations": {"discord": False}}, {"sweep": "sweep-1"}])
def test_a_job_that_wants_no_discord_gets_none_nor_does_a_trial(
    channel: JobChannel, tmp_path: Path, more: dict[str, Any]
) -> None:
    quiet = story.submit(tmp_path / "quiet", **more)
    story.start(quiet)
    story.succeed(quiet)
    assert channel.hears_to_the_end_of(quiet)
    assert not channel.requests
    assert isinstance(quiet.events()[0].fact, JobSubmitted)


@pytest.mark.parametrize("text", ["x", "😀", "`", "```", "@everyone ", "\x00\n"])
def test_everything_long_stays_within_the_limits(channel: JobChannel, text: str, tmp_path: Path) -> None:
    """FakeDiscord checks every payload against the limits and the schema."""
    long = (text * 20_000)[:20_000]
    fault = Fault(code="rejected", message=long, hint=long, param="data.train" + "." * 300)
    for job, end in (("a" * 200, "good"), ("b" * 200, "bad")):
        wordy = story.submit(tmp_path / "runs", job, name="n" * 64)
        wordy.append([JobQueued(), AttemptStarted(worker=long, device=long), oom(1, long)])
        story.train(wordy, 10, 50)
        wordy.append([story.evaluation(50, 1.5, samples=16, text=long)])
        if end == "good":
            wordy.append([AttemptEnded(reason="done", step=50), story.SUCCEEDED])
        else:
            wordy.append([AttemptEnded(reason="crash", error=fault), JobQueued(), JobFailed(error=fault)])
        assert channel.hears_to_the_end_of(wordy)
    assert len(channel.messages) == 3 + 4 - 1, "of an attempt that is tried again there is one"
    assert not channel.problems


def test_an_event_without_words_is_told_as_it_is_and_holds_nothing_up(
    channel: JobChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sinks.discord.embeds.planned", lambda *_: [][0])
    channel.tell(checked(), prepared(9, time=time_summary(text="1 h")), JobQueued(), JobCancelled())
    raw, end = channel.messages
    assert raw.title == "chef: job.prepared" and '"steps":9' in raw.text
    assert end.title == "chef: cancelled" and channel.feed.closed


def test_where_the_next_attempt_begins_is_what_the_events_say(channel: JobChannel) -> None:
    story.start(channel.run)
    crash: list[AnyFact] = [AttemptEnded(reason="crash", step=9, checkpoint_step=8), JobQueued(not_before_s=10.0)]
    channel.run.append([AttemptEnded(reason="crash", step=9, checkpoint_step=0), crash[1]])
    channel.turn()
    told = "starts in 10 s at the earliest. There is no checkpoint yet: it begins at step 0. 9 steps are trained again."
    assert told in channel.messages[-1].text
    channel.run.append([AttemptStarted(worker="box-1", device="cpu"), story.LOADED])
    channel.tell(CheckpointSaved(step=8, path="checkpoints/step-00000008", bytes=1, seconds=0.1), *crash)
    assert "The newest checkpoint is that of step 8. 1 step is trained again." in channel.messages[-1].text
    channel.tell(JobPaused())
    assert "It waits until somebody resumes it. The newest checkpoint is that of step 8." in channel.messages[-1].text
    channel.tell(JobResumed(from_scratch=True), JobPaused())
    assert "The newest checkpoint is that of step 8." in channel.messages[-1].text, "it can still be taken back"
    channel.run.append([JobResumed(from_scratch=True)])
    channel.run.append([AttemptStarted(worker="box-1", device="cpu")])
    channel.tell(AttemptEnded(reason="interrupted"), JobPaused())
    assert "There is no checkpoint yet: it begins at step 0." in channel.messages[-1].text


def test_a_damaged_run_directory_is_told_once_and_what_follows_a_repair_is_told_again(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.tell(JobPauseRequested())
    lines = channel.run.events_file.read_bytes().splitlines(keepends=True)
    channel.run.events_file.write_bytes(b"".join([*lines[:-2], b"no event\n", lines[-1]]))
    for _ in range(3):
        channel.turn()
    channel.listen()  # publish is started anew
    channel.turn()
    (_, told) = channel.messages
    assert told.title == "chef: its run directory is damaged"
    said = str(told.payload)
    assert f"line {len(lines) - 1} of events.jsonl is not an event" in said and "longhaul repair job-1" in said
    repair(channel.run)
    channel.tell(AttemptEnded(reason="rejected"), JobFailed(error=Fault(code="rejected", message="m")))
    _, repaired, failed = channel.messages
    assert (repaired.title, failed.title) == ("chef: repaired", "chef: failed")
    assert (
        f"The last 2 lines of its events could not be read. The job is in the state after event {len(lines) - 2}."
        in repaired.text
    )
    assert closed(channel.run, "discord")


def test_events_that_cannot_be_read_for_a_while_are_not_told_twice(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    events = channel.run.events_file.rename(channel.run.path / "aside")
    channel.run.events_file.mkdir()
    channel.turn()
    channel.run.events_file.rmdir()
    events.rename(channel.run.events_file)
    told = len(channel.messages)
    assert channel.messages[-1].title == "job-1: its run directory is damaged"
    channel.listen()  # publish is started anew
    channel.turn()
    assert len(channel.messages) == told


@pytest.mark.parametrize("more", [{}, {"discord": False}, {"sweep": "sweep-1"}])
def test_a_job_of_which_not_all_is_left_is_told_of_if_it_may_be(channel: JobChannel, more: dict[str, Any]) -> None:
    if not more:
        channel.run.events_file.unlink()
    else:
        channel.run.spec_file.unlink()
        first = channel.run.events()[0]
        quiet = first.model_copy(update={"fact": first.fact.model_copy(update=more)})
        channel.run.events_file.write_bytes(event_line(quiet))
    channel.listen()
    for _ in range(2):
        channel.turn()
    assert [message.title for message in channel.messages] == ["job-1: its run directory is damaged"] * (not more)


def test_the_curve_in_the_progress_message_is_replaced_now_and_then(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    (progress,) = channel.messages
    assert not progress.attachments, "nothing is known yet"
    pictures = []
    for step in range(10, 310, 10):  # two minutes a row
        story.train(channel.run, step, step)
        channel.turn(after_s=120)
        (progress,) = channel.messages
        assert progress.attachments.keys() == {"loss.png"} and progress.attachments["loss.png"].startswith(PNG)
        pictures.append(progress.attachments["loss.png"])
    assert 6 <= len(set(pictures)) <= 9, "drawn anew every ten minutes, and for a message posted anew"


def test_a_curve_that_discord_refuses_costs_no_figure(channel: JobChannel) -> None:
    story.start(channel.run)
    channel.turn()
    story.train(channel.run, 10, 100)
    channel.clock.now += 20
    channel.answer_next(413)
    channel.turn()
    story.train(channel.run, 110, 200)
    channel.turn(after_s=20)
    (progress,) = channel.messages
    assert "step 200 of 400" in progress.text


@pytest.mark.parametrize(("mention", "who"), [("<@123>", {"users": ["123"]}), ("<@&45>", {"roles": ["45"]})])
def test_what_needs_a_person_calls_that_one_alone(channel: JobChannel, mention: str, who: dict[str, list[str]]) -> None:
    story.start(channel.run)
    channel.run.append([DiskLow(step=5, free_bytes=1, needed_bytes=2)])
    story.train(channel.run, 10, 100)
    story.succeed(channel.run)
    channel.wants(mention=mention)
    channel.turn()
    called = [message for message in channel.messages if "content" in message.payload]
    assert [message.title for message in called] == ["chef: the disk is nearly full"]
    assert called[0].payload["content"] == mention
    for message in channel.messages:
        expected: dict[str, list[str]] = {"parse": []} | (who if message in called else {})
        assert all(version["allowed_mentions"] == expected for version in message.versions)


def test_only_the_messages_that_are_wanted_are_sent(channel: JobChannel) -> None:
    story.start(channel.run, time="about 5 h")
    channel.run.append([oom(12)])
    story.train(channel.run, 10, 400)
    story.succeed(channel.run)
    channel.wants(events="done, failed")
    channel.turn()
    assert channel.titles == ["chef: done"] and channel.feed.closed


def test_titles_lead_to_the_job(channel: JobChannel) -> None:
    story.start(channel.run)
    story.train(channel.run, 10, 400)
    story.succeed(channel.run)
    channel.wants(url="https://box.example.org/")
    channel.turn()
    urls = {version["embeds"][0]["url"] for message in channel.messages for version in message.versions}
    assert urls == {"https://box.example.org/jobs/job-1"}
    report = "[all on one page](https://box.example.org/jobs/job-1/report)"
    done = [field for field in channel.messages[-1].payload["embeds"][0]["fields"] if field["name"] == "Report"]
    assert [field["value"] for field in done] == [report]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("https://wandb.ai/us/longhaul/runs/job-1\n", ["[open the run](https://wandb.ai/us/longhaul/runs/job-1)"]),
        ("https://wandb.ai/x) [free](https://example.org\n", []),
        ("\n", []),
        (None, []),
    ],
)
def test_progress_and_the_end_link_to_wandb(channel: JobChannel, written: str | None, shown: list[str]) -> None:
    if written is not None:
        (channel.run.path / "wandb").mkdir()
        (channel.run.path / "wandb/url.txt").write_text(written)
    story.start(channel.run)
    story.train(channel.run, 10, 400)
    channel.turn()
    story.succeed(channel.run)
    channel.turn()
    for message in channel.messages:
        links = [field["value"] for field in message.versions[0]["embeds"][0]["fields"] if field["name"] == "W&B"]
        assert links == shown, message.versions[0]["embeds"][0]["title"]


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("LONGHAUL_DISCORD_EVENTS", {"events": "done,finished"}),
        ("LONGHAUL_DISCORD_MENTION", {"mention": "@everyone"}),
        ("LONGHAUL_DISCORD_MENTION", {"mention": "<@1> @here"}),
        ("LONGHAUL_PUBLIC_URL", {"url": "box.example.org"}),
        ("LONGHAUL_PUBLIC_URL", {"url": "https://user:secret@box.example.org"}),
    ],
)
def test_a_wrong_option_is_named(variable: str, texts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=variable):
        DiscordOptions.of(**{"events": None, "mention": None, "url": None, **texts})


def test_no_curve_is_drawn_on_the_way_from_very_many_rows(channel: JobChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sinks.discord.sink.MOST_READ_BYTES", 1000)
    story.start(channel.run)
    story.train(channel.run, 10, 200)
    channel.turn()
    channel.turn(after_s=20)
    assert not channel.messages[0].attachments
    story.train(channel.run, 210, 400)
    story.succeed(channel.run)
    channel.turn()
    assert channel.messages[1].attachments.keys() == {"loss.png"}
