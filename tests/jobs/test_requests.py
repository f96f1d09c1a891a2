"""Queues of requests: clients take turns, a full queue refuses, and nothing is done for those who no longer wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
import redis

from jobs.errors import QueueFull
from jobs.redis import requests as queues
from jobs.redis.connection import connect
from jobs.redis.requests import MOST_OF_CLIENT, MOST_WAITING, Answers, Request, Requests, Standing, answer_key
from jobs.redis.workers import Workers


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return connect(redis_url)


@pytest.fixture
def requests(client: redis.Redis) -> Requests:
    return Requests(client)


def taken(requests: Requests) -> list[object]:
    found = []
    while (request := requests.take("generate")) is not None:
        found.append(request.payload["text"])
    return found


def submit(requests: Requests, client: str, text: str) -> Request:
    return requests.submit("generate", "job-1", {"text": text}, client=client)


def test_clients_take_turns_and_each_has_its_own_order(requests: Requests) -> None:
    for number in range(4):
        submit(requests, "a", f"a{number}")
    for number in range(2):
        submit(requests, "b", f"b{number}")
    submit(requests, "c", "c0")
    assert taken(requests) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert requests.take("generate") is None


def test_twenty_clients_wait_for_one_turn_of_the_others_at_most(requests: Requests) -> None:
    for number in range(MOST_OF_CLIENT):
        submit(requests, "first", f"first {number}")
    last = [submit(requests, f"person {number}", f"person {number}") for number in range(19)]
    order = taken(requests)
    assert order[:20] == ["first 0", *(request.payload["text"] for request in last)]


def test_who_passes_its_turn_is_behind_every_other_client_and_first_of_its_own(
    client: redis.Redis, requests: Requests
) -> None:
    long = submit(requests, "a", "long")
    submit(requests, "a", "a2")
    assert requests.take("generate") == long
    assert not requests.pass_turn(long.id, {"row": 1}), "no other client waits"
    gone = submit(requests, "b", "gone")
    requests.give_up(gone.id)
    assert not requests.pass_turn(long.id, {"row": 1}), "nobody waits for that"
    assert requests.keep(long.id) == (Standing.TAKEN, 0)
    other = submit(requests, "b", "b1")
    assert requests.keep(other.id) == (Standing.WAITING, 2), "one is at work, one waits"
    for _ in range(2):  # sent twice
        assert requests.pass_turn(long.id, {"row": 1})
    assert requests.keep(long.id) == (Standing.WAITING, 1)
    assert requests.take("generate") == other
    again = requests.take("generate")
    assert again is not None and (again.id, again.progress) == (long.id, {"row": 1})
    assert taken(requests) == ["a2"]


def test_kinds_have_queues_of_their_own(requests: Requests) -> None:
    export = requests.submit("export", "job-1", {"to": "gguf"}, client="a")
    assert requests.take("generate") is None
    assert requests.take("export") == export


def test_a_full_queue_refuses_and_says_what_to_do(requests: Requests) -> None:
    for number in range(MOST_OF_CLIENT):
        submit(requests, "a", str(number))
    with pytest.raises(QueueFull, match=rf"{MOST_OF_CLIENT} requests of yours wait, which is the limit") as refused:
        submit(requests, "a", "one more")
    assert refused.value.hint == "wait for answers, or try again in 5 s"
    for number in range(MOST_WAITING - MOST_OF_CLIENT):
        submit(requests, f"client {number}", str(number))
    with pytest.raises(QueueFull, match=rf"^{MOST_WAITING} requests wait"):
        submit(requests, "another", "one more")
    assert requests.take("generate") is not None
    submit(requests, "another", "there is room")


def test_what_waits_is_bounded_in_bytes(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MOST_BYTES", 3 * 2**20)
    for number in range(2):
        submit(requests, f"client {number}", "é" * 2**19)
    with pytest.raises(
        QueueFull, match=r"^requests of 2 MiB wait; with this one it is more than 3 MiB, which is the limit$"
    ):
        submit(requests, "another", "x" * 2**20)
    submit(requests, "another", "small")
    assert requests.take("generate") is not None
    submit(requests, "another", "x" * 2**20)


def test_texts_are_kept_in_few_bytes_whatever_they_are(client: redis.Redis, requests: Requests) -> None:
    text = "é" * 1000 + "\ud800"  # half a surrogate pair, which JSON may have
    request = submit(requests, "a", text)
    assert requests.take("generate") == request
    assert requests.answer(request.id, 1, "done", {"text": text})
    assert requests.newest_part(request.id) == ("done", {"text": text})
    assert cast(Any, client.hstrlen(f"longhaul:request:{request.id}", "payload")) < 2100


def test_an_answer_that_has_come_leaves_nothing_behind(client: redis.Redis, redis_url: str, requests: Requests) -> None:
    request = submit(requests, "a", "1")
    requests.take("generate")
    for number, type in enumerate(("text", "done"), start=1):
        requests.answer(request.id, number, type, {})

    async def follow() -> list[str]:
        answers = Answers(redis_url, requests, Workers(client))
        found = []
        async for part in answers.follow(request):
            found.append(part.type)
            if part.last:
                assert client.keys("longhaul:request:*") == []
        await answers.close()
        return found

    assert asyncio.run(follow()) == ["text", "done"]


def test_what_nobody_waits_for_is_skipped_and_takes_no_room(requests: Requests) -> None:
    given_up = [submit(requests, "a", str(number)) for number in range(MOST_OF_CLIENT)]
    for request in given_up:
        requests.give_up(request.id)
    submit(requests, "a", "wanted")
    assert taken(requests) == ["wanted"]


def test_the_asker_hears_where_its_request_stands(client: redis.Redis, requests: Requests) -> None:
    first, second = submit(requests, "a", "1"), submit(requests, "b", "2")
    assert requests.keep(first.id) == (Standing.WAITING, 0)
    assert requests.keep(second.id) == (Standing.WAITING, 1)
    assert requests.take("generate") == first
    assert requests.keep(first.id) == (Standing.TAKEN, 0)
    assert requests.keep(second.id) == (Standing.WAITING, 1), "the one at work"
    client.delete(f"longhaul:request:{first.id}:held")  # as if its time had run out
    assert requests.keep(first.id) == (Standing.LOST, 0)
    assert requests.keep(second.id) == (Standing.WAITING, 0)
    assert requests.hold(first.id)
    assert requests.keep(first.id) == (Standing.TAKEN, 0)
    assert requests.answer(first.id, 1, "done", {})
    assert requests.keep(first.id) == (Standing.ENDED, 0)
    client.flushall()
    assert requests.keep(second.id) == (Standing.GONE, 0)


def test_what_waits_or_is_taken_can_be_cancelled_and_nothing_else(client: redis.Redis, requests: Requests) -> None:
    waits, at_work = submit(requests, "b", "2"), submit(requests, "a", "1")
    assert requests.cancel(waits.id) and requests.keep(waits.id)[0] is Standing.GONE
    assert requests.take("generate") == at_work and requests.cancel(at_work.id)
    assert requests.cancelled(at_work.id) and requests.keep(at_work.id)[0] is Standing.TAKEN, "until its worker says so"
    assert not requests.hold(at_work.id)
    ended = submit(requests, "a", "3")
    assert requests.take("generate") == ended and requests.answer(ended.id, 1, "done", {})
    for id in (waits.id, at_work.id, ended.id, "unknown"):
        assert not requests.cancel(id) and not requests.cancelled(id)
    assert [key for key in cast(Any, client.keys("longhaul:request:*")) if client.ttl(key) == -1] == []


@pytest.mark.parametrize(
    "damage", [{"payload": "{"}, {"payload": "[1]"}, {"payload": b"\xff"}, {"job": "/tmp/job-1"}, {"job": "job-1/../x"}]
)
def test_a_damaged_request_is_dropped_and_the_next_is_taken(
    client: redis.Redis, requests: Requests, damage: dict[Any, Any]
) -> None:
    damaged, sound = submit(requests, "a", "1"), submit(requests, "a", "2")
    client.hset(f"longhaul:request:{damaged.id}", mapping=damage)
    assert requests.take("generate") == sound
    assert requests.keep(damaged.id)[0] is Standing.GONE


def test_a_request_is_forgotten_without_its_asker(client: redis.Redis, requests: Requests) -> None:
    request = submit(requests, "a", "1")
    assert 0 < client.pttl(f"longhaul:request:{request.id}") <= 30_000
    requests.take("generate")
    client.delete(f"longhaul:request:{request.id}")  # as if that time had run out
    assert not requests.hold(request.id)
    assert not requests.answer(request.id, 1, "text", {"text": "x"})
    assert client.exists(answer_key(request.id)) == 0


def test_parts_of_an_answer_are_in_order_once_each_and_go_away(client: redis.Redis, requests: Requests) -> None:
    request = submit(requests, "a", "1")
    requests.take("generate")
    for number, type in ((1, "text"), (1, "text"), (2, "done"), (2, "done")):  # each sent twice
        assert requests.answer(request.id, number, type, {"number": number})
    stored = cast(Any, client.xrange(answer_key(request.id)))
    assert [(each[b"type"], json.loads(each[b"data"])) for _, each in stored] == [
        (b"text", {"number": 1}), (b"done", {"number": 2}),
    ]  # fmt: skip
    assert 0 < client.pttl(answer_key(request.id)) <= 600_000
    requests.give_up(request.id)
    assert client.keys("longhaul:request:*") == []
