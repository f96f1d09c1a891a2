"""What a person sees of a sweep in the channel, told by its real directory through the feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.sweeps import directory
from jobs.sweeps.directory import SweepDir
from jobs.sweeps.events import Outcome, SweepEnded, SweepSubmitted, TrialEnded, TrialStarted
from jobs.sweeps.spec import parse_sweep
from jobs.trainer_facts import Fault
from tests.sinks.driving import publishing, until
from tests.support.fakes import FakeDiscord
from tests.support.machine import Clock
from worker.feed import SweepFeed, read_cursor
from worker.sinks.discord.limits import DiscordOptions
from worker.sinks.discord.sink import DiscordSink
from worker.sinks.discord.webhook import SUPPRESS_NOTIFICATIONS, TOO_MANY_EDITS, Webhook

OUT_OF_MEMORY = Fault(code="out_of_memory", message="the GPU is full", hint="use a smaller batch")
DONE = SweepEnded(reason="done", best=1, importances={"training.batch_size": 1.0})


class KilledBeforeSaving(BaseException):
    """As kill -9 would end the process."""


def submit(runs: Path, **job: Any) -> SweepDir:
    given = {"name": "tickets", "space": {"training.batch_size": [4, 8, 16]}, "sampler": "grid"}
    spec = parse_sweep({**given, "job": {"data": {"train": "rows.jsonl"}, **job}})
    runs.mkdir()
    return directory.create(runs, "sweep-1", spec, SweepSubmitted(name=spec.name, spec_sha256="0" * 64, version="1"))


def trial(number: int, value: float | None, outcome: Outcome = "succeeded") -> list[TrialStarted | TrialEnded]:
    started = TrialStarted(trial=number, settings={"training.batch_size": 4 * 2**number}, jobs=[f"job-{number}"])
    error = OUT_OF_MEMORY if outcome == "failed" else None
    return [started, TrialEnded(trial=number, outcome=outcome, value=value, error=error)]


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return submit(tmp_path / "runs")


def feed_of(discord: FakeDiscord, sweep: SweepDir, clock: Clock, **options: Any) -> SweepFeed:
    webhook = Webhook(discord.url, clock, timeout_s=(5.0, 2.0))
    return SweepFeed(DiscordSink(webhook, clock, options=DiscordOptions(**options)), sweep, clock)


def kill_before_saving(feed: SweepFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> bool:
        raise KilledBeforeSaving

    with monkeypatch.context() as patched:
        patched.setattr("worker.feed.write_cursor", killed)
        with pytest.raises(KilledBeforeSaving):
            feed.turn()


def fields(payload: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in payload["embeds"][0]["fields"]}


def test_a_sweep_is_one_message_from_its_start_to_its_end(discord: FakeDiscord, sweep: SweepDir, clock: Clock) -> None:
    feed = feed_of(discord, sweep, clock, public_url="https://longhaul.example")
    feed.turn()
    (begun,) = discord.messages
    assert begun.title == "tickets: sweep runs" and "0 of 3 trials ended" in begun.text
    assert begun.payload["flags"] == SUPPRESS_NOTIFICATIONS

    sweep.append([*trial(0, 0.5), *trial(1, 0.25)])
    clock.now += 15
    feed.turn()
    assert discord.messages == [begun] and "2 of 3 trials ended" in begun.text
    assert fields(begun.payload) == {
        "Best so far": "Validation loss 0.2500 (trial 1)",
        "Its settings": "```\ntraining.batch_size = 8\n```",
    }

    sweep.append([*trial(2, None, "failed"), DONE])
    feed.turn()
    (end,) = discord.messages
    assert end is not begun and "flags" not in end.payload, "a phone rings for the end"
    assert end.title == "tickets: sweep succeeded" and end.footer == "sweep-1 · event 8"
    assert end.payload["embeds"][0]["url"] == "https://longhaul.example/sweeps/sweep-1"
    assert "All trials have ended." in end.text and "2 succeeded · 1 failed" in end.text
    assert fields(end.payload) == {
        "Best trial": "Validation loss 0.2500 (trial 1)",
        "Its settings": "```\ntraining.batch_size = 8\n```",
        "Its model": "[its page](https://longhaul.example/jobs/job-1), or `longhaul download job-1`",
        "Failed": "1 × `out_of_memory`: the GPU is full",
        "Importance of the parameters": "training.batch_size 100 %",
    }
    assert feed.closed
    asked = len(discord.requests)
    feed_of(discord, sweep, clock).turn()
    assert len(discord.requests) == asked, "nor after a restart"


def test_a_sweep_that_failed_says_why_and_calls(discord: FakeDiscord, sweep: SweepDir, clock: Clock) -> None:
    sweep.append([*trial(0, None, "failed"), SweepEnded(reason="failures", error=OUT_OF_MEMORY)])
    feed_of(discord, sweep, clock, mention="<@7>").turn()
    (end,) = discord.messages
    assert end.title == "tickets: sweep failed" and end.payload["content"] == "<@7>"
    assert fields(end.payload)["What helps"] == "Use a smaller batch"


def test_trials_that_end_soon_after_each_other_are_one_edit(
    discord: FakeDiscord, sweep: SweepDir, clock: Clock
) -> None:
    feed = feed_of(discord, sweep, clock)
    for number in range(3):
        feed.turn()
        sweep.append(trial(number, 0.5))
    feed.turn()
    assert len(discord.requests) == 1 and feed.due == clock.now + 15
    clock.now += 15
    feed.turn()
    assert len(discord.requests) == 2 and "3 of 3 trials ended" in discord.messages[0].text


@pytest.mark.parametrize("at_the_end", [False, True])
def test_killed_between_sending_and_saving_it_repeats_one_message(
    discord: FakeDiscord, sweep: SweepDir, clock: Clock, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    last = [*trial(0, 0.5), *trial(1, 0.25), *trial(2, 0.75), DONE]
    if at_the_end:
        feed_of(discord, sweep, clock).turn()
        sweep.append(last)

    kill_before_saving(feed_of(discord, sweep, clock), monkeypatch)
    feed = feed_of(discord, sweep, clock)
    feed.turn()
    assert len({message.footer for message in discord.messages}) == 1, "by its footer a person sees that it is the same"
    if not at_the_end:
        sweep.append(last)
        clock.now += 15
        feed.turn()
    assert feed.closed
    assert len(discord.messages) == 2 and discord.titles[-1] == "tickets: sweep succeeded"


def test_killed_between_editing_and_saving_it_edits_again(
    discord: FakeDiscord, sweep: SweepDir, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_of(discord, sweep, clock).turn()
    sweep.append(trial(0, 0.5))
    clock.now += 15

    kill_before_saving(feed_of(discord, sweep, clock), monkeypatch)
    feed_of(discord, sweep, clock).turn()
    (message,) = discord.messages
    assert len(message.versions) == 3 and "1 of 3 trials ended" in message.text


def test_the_old_message_goes_when_the_rate_limit_lets_it(discord: FakeDiscord, sweep: SweepDir, clock: Clock) -> None:
    feed = feed_of(discord, sweep, clock)
    feed.turn()
    sweep.append([*trial(0, 0.5), SweepEnded(reason="max_hours", best=0)])
    discord.limit = (0, 2.0)
    clock.now += 1
    feed.turn()
    assert discord.titles == ["tickets: sweep runs", "tickets: sweep succeeded"] and not feed.closed
    clock.now += 2
    feed_of(discord, sweep, clock).turn()  # after a restart
    assert discord.titles == ["tickets: sweep succeeded"]
    assert read_cursor(sweep, "discord").closed == "sweep.ended"


def test_a_message_that_takes_no_more_edits_is_replaced(discord: FakeDiscord, sweep: SweepDir, clock: Clock) -> None:
    feed = feed_of(discord, sweep, clock)
    feed.turn()
    sweep.append(trial(0, 0.5))
    clock.now += 15
    discord.answer_next(400, code=TOO_MANY_EDITS)
    feed.turn()
    (message,) = discord.messages
    assert "1 of 3 trials ended" in message.text and message.payload["flags"] == SUPPRESS_NOTIFICATIONS


@pytest.mark.parametrize(("kinds", "sent"), [({"done"}, ["POST"]), ({"progress"}, ["POST", "PATCH"]), ({"failed"}, [])])
def test_kinds_of_messages_that_are_wanted(
    kinds: set[str], sent: list[str], discord: FakeDiscord, sweep: SweepDir, clock: Clock
) -> None:
    feed = feed_of(discord, sweep, clock, kinds=frozenset(kinds))
    feed.turn()
    sweep.append([*trial(0, 0.5), SweepEnded(reason="max_hours", best=0)])
    feed.turn()
    assert [request.method for request in discord.requests] == sent and feed.closed


def test_a_sweep_that_wants_no_discord_is_not_told(discord: FakeDiscord, tmp_path: Path, clock: Clock) -> None:
    sweep = submit(tmp_path / "runs", integrations={"discord": False})
    sweep.append([*trial(0, 0.5), SweepEnded(reason="max_hours", best=0)])
    feed = feed_of(discord, sweep, clock)
    feed.turn()
    assert feed.closed and not discord.requests


def test_a_webhook_that_came_later_does_not_dig_out_what_ended_before(
    discord: FakeDiscord, sweep: SweepDir, clock: Clock
) -> None:
    sweep.append([*trial(0, 0.5), SweepEnded(reason="max_hours", best=0)])
    SweepFeed(DiscordSink(None), sweep, clock).turn()
    feed_of(discord, sweep, clock).turn()
    assert not discord.requests


def test_publish_finds_sweeps_and_says_how_far_behind_it_is(discord: FakeDiscord, sweep: SweepDir) -> None:
    discord.answer_next(500)
    with publishing(sweep.path.parents[1], DiscordSink(Webhook(discord.url))) as (thread,):
        until(lambda: thread.lag.jobs_behind == 1)
        until(lambda: discord.titles == ["tickets: sweep runs"] and thread.lag.jobs_behind == 0)
        sweep.append([*trial(0, 0.5), SweepEnded(reason="max_hours", best=0)])
        until(lambda: discord.titles == ["tickets: sweep succeeded"])
