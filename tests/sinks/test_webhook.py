"""The webhook against a real HTTP server: addresses, limits, rate limits, failures."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jobs.errors import UserError
from tests.support.fakes import FakeDiscord
from tests.support.machine import Clock
from worker.sinks.base import Disabled, Later
from worker.sinks.discord.limits import Payload
from worker.sinks.discord.webhook import GoneFile, Sent, Webhook, WebhookRejected, check_url

HELLO: Payload = {"embeds": [{"title": "hello"}]}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def webhook(discord: FakeDiscord, clock: Clock) -> Webhook:
    return Webhook(discord.url, clock, timeout_s=(5.0, 2.0))


@pytest.mark.parametrize(
    "url",
    [
        "https://discord.com/api/webhooks/123/abc-DEF_1",
        "https://discordapp.com/api/v10/webhooks/123/abc",
        "https://ptb.discord.com/api/webhooks/123/abc/",
        "https://canary.discord.com/api/webhooks/123/abc",
        "http://127.0.0.1:8080/api/webhooks/123/abc",
        "http://localhost/api/webhooks/123/abc",
        "http://[::1]:1/api/webhooks/123/abc",
    ],
)
def test_webhook_urls_are_taken(url: str) -> None:
    assert check_url(url)[1:] == ("123", url.rstrip("/").rpartition("/")[2])


@pytest.mark.parametrize(
    "url",
    [
        "http://discord.com/api/webhooks/123/s3cr3t",
        "https://discord.com.evil.example/api/webhooks/123/s3cr3t",
        "https://discord.com@evil.example/api/webhooks/123/s3cr3t",
        "https://s3cr3t@discord.com/api/webhooks/123/s3cr3t",
        "https://evil.example/?x=https://discord.com/api/webhooks/123/s3cr3t",
        "https://discord.com/api/webhooks/123/s3cr3t/slack",
        "https://discord.com/api/webhooks/123/s3cr3t?wait=false",
        "https://discord.com/api/webhooks/123",
        "http://10.0.0.1/api/webhooks/123/s3cr3t",
        "https://hooks.slack.com/services/s3cr3t",
        "123/s3cr3t",
        "https://discord.com/api/webhooks/123/s3cr3t\n",
    ],
)
def test_other_urls_are_refused_without_showing_the_token(url: str) -> None:
    with pytest.raises(UserError, match="DISCORD_WEBHOOK") as caught:
        Webhook(url)
    assert "https://discord.com/api/webhooks/<id>/<token>" in str(caught.value.hint)
    assert "s3cr3t" not in str(caught.value)


def test_post_and_edit(discord: FakeDiscord, webhook: Webhook) -> None:
    sent = webhook.post(HELLO, ("loss.png", b"\x89PNG"))
    assert isinstance(sent, Sent)
    assert webhook.edit(sent.message, {"embeds": [{"title": "changed"}]}) == sent
    (message,) = discord.messages
    assert message.title == "changed"
    assert message.attachments == {"loss.png": b"\x89PNG"}
    assert [version["allowed_mentions"] for version in message.versions] == [{"parse": []}] * 2


def test_429_in_the_body_is_kept_to_the_fraction(discord: FakeDiscord, webhook: Webhook, clock: Clock) -> None:
    discord.answer_next(429, retry_after=1.75)
    assert webhook.post(HELLO) == Later(1.75, "Discord says 429")
    clock.now += 1.5
    early = webhook.post(HELLO)
    assert isinstance(early, Later)
    assert early.seconds == pytest.approx(0.25)
    assert len(discord.requests) == 1, "nothing is asked before the time is up"
    clock.now += 0.3
    assert isinstance(webhook.post(HELLO), Sent)


def test_429_in_the_header_only(discord: FakeDiscord, webhook: Webhook) -> None:
    discord.answer_next(429, retry_after=2.5, header_only=True)
    assert webhook.post(HELLO) == Later(2.5, "Discord says 429")


def test_an_exhausted_bucket_is_not_asked_again_before_its_reset(
    discord: FakeDiscord, webhook: Webhook, clock: Clock
) -> None:
    discord.limit = (0, 3.5)
    assert isinstance(webhook.post(HELLO), Sent)
    waiting = webhook.post(HELLO)
    assert isinstance(waiting, Later)
    assert waiting.seconds == pytest.approx(3.5)
    clock.now += 3.6
    discord.limit = (4, 1.0)
    assert isinstance(webhook.post(HELLO), Sent)
    assert isinstance(webhook.post(HELLO), Sent)


def test_5xx_and_silence_back_off_and_recover(discord: FakeDiscord, webhook: Webhook, clock: Clock) -> None:
    waits = []
    for status in (500, 502, 503):
        discord.answer_next(status)
        answer = webhook.post(HELLO)
        assert isinstance(answer, Later)
        waits.append(answer.seconds)
        clock.now += answer.seconds
    discord.hang()
    answer = webhook.post(HELLO)
    assert isinstance(answer, Later)
    waits.append(answer.seconds)
    assert waits == [1, 2, 4, 8]
    discord.release()
    clock.now += 8
    assert isinstance(webhook.post(HELLO), Sent)
    discord.answer_next(500)
    answer = webhook.post(HELLO)
    assert isinstance(answer, Later)
    assert answer.seconds == 1, "a success forgets the failures before it"


def test_nobody_there(clock: Clock) -> None:
    answer = Webhook("http://127.0.0.1:9/api/webhooks/123/s3cr3t", clock).post(HELLO)
    assert isinstance(answer, Later)
    assert "s3cr3t" not in answer.why


@pytest.mark.parametrize("status", [401, 403, 404])
def test_gone_for_good_is_said_once_and_never_asked_again(
    status: int, discord: FakeDiscord, webhook: Webhook, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    discord.answer_next(status)
    assert isinstance(webhook.post(HELLO), Disabled)
    clock.now += 10**6
    assert isinstance(webhook.post(HELLO), Disabled)
    assert isinstance(webhook.edit("1", HELLO), Disabled)
    assert len(discord.requests) == 1
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


@pytest.mark.parametrize(("status", "code"), [(404, 10015), (401, 50027)])
def test_gone_for_good_survives_a_restart_and_ends_with_a_new_webhook(
    status: int, code: int, discord: FakeDiscord, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = GoneFile(tmp_path / ".publish" / "discord.json")
    discord.answer_next(status, code=code)
    assert isinstance(Webhook(discord.url, gone_file=memory).post(HELLO), Disabled)
    caplog.clear()
    again = Webhook(discord.url + "/", gone_file=memory)
    assert isinstance(again.post(HELLO), Disabled)
    assert len(discord.requests) == 1, "the second process asked nothing"
    assert f"Discord says {status}" in caplog.text
    assert str(memory.file) in caplog.text
    assert discord.token not in memory.file.read_text() + caplog.text
    discord.token = "another-token"
    assert isinstance(Webhook(discord.url, gone_file=memory).post(HELLO), Sent)


@pytest.mark.parametrize(("status", "code"), [(403, 50013), (403, 0), (404, 0), (401, 0)])
def test_what_may_be_a_proxys_word_is_forgotten_with_the_process(
    status: int, code: int, discord: FakeDiscord, tmp_path: Path
) -> None:
    memory = GoneFile(tmp_path / ".publish" / "discord.json")
    discord.answer_next(status, code=code)
    webhook = Webhook(discord.url, gone_file=memory)
    assert isinstance(webhook.post(HELLO), Disabled)
    assert isinstance(webhook.post(HELLO), Disabled)
    assert isinstance(Webhook(discord.url, gone_file=memory).post(HELLO), Sent)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b"null"])
def test_a_damaged_memory_is_passed_over(content: bytes, discord: FakeDiscord, tmp_path: Path) -> None:
    memory = GoneFile(tmp_path / "discord.json")
    memory.file.write_bytes(content)
    assert isinstance(Webhook(discord.url, gone_file=memory).post(HELLO), Sent)


def test_a_deleted_message_is_not_a_deleted_webhook(discord: FakeDiscord, webhook: Webhook) -> None:
    assert webhook.edit("999", HELLO) == WebhookRejected(404, 10008)
    assert isinstance(webhook.post(HELLO), Sent)


def test_the_token_is_in_no_log_and_no_repr(
    discord: FakeDiscord, webhook: Webhook, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    webhook.post(HELLO)
    for status in (400, 429, 500, 404):
        discord.answer_next(status, retry_after=0.0)
        webhook.post(HELLO)
        clock.now += 100
    Webhook(f"http://127.0.0.1:9/api/webhooks/1/{discord.token}", clock).post(HELLO)
    assert "urllib3" in {record.name.partition(".")[0] for record in caplog.records}
    assert discord.token not in caplog.text + repr(webhook)
    assert discord.token not in "".join(str(record.args) + str(record.msg) for record in caplog.records)
