"""Events as a list and live: in order, without gap, wherever the follower comes in."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import jobs.redis.feed
from jobs.events import Event, JobCancelled, JobCancelRequested
from jobs.redis.connection import connect
from jobs.redis.store import ALL_EVENTS, Store, events_key
from jobs.trainer_facts import CheckpointSaved
from service.reading.stream import frame
from tests.service.running import TINY, Service, running
from tests.service.scraping import figure, scrape
from tests.sinks.driving import until
from tests.support.redis_server import RedisServer
from tests.support.samples import RUNNING, checked
from tests.support.stack import Stack


def test_the_list_has_pages(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    page = service.get(f"/jobs/{job}/events", params={"limit": 3}).json()
    assert [event["type"] for event in page["data"]] == ["job.submitted", "job.checked", "job.prepared"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, 1, 3)
    event = page["data"][0]
    assert event["object"] == "fine_tuning.job.event"
    assert event["level"] == "info"
    assert event["data"]["name"] == "tiny"
    assert event["message"].startswith("submitted")
    rest = service.get(f"/jobs/{job}/events", params={"after": 3}).json()
    assert [event["number"] for event in rest["data"]] == [4, 5]
    assert not rest["has_more"]


def follow(service: Service, job: str, *, last: int | None = None, timeout: float = 20) -> requests.Response:
    headers = {"Accept": "text/event-stream"}
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    return requests.get(f"{service.url}/jobs/{job}/events", headers=headers, stream=True, timeout=timeout)


def frames(answer: requests.Response) -> Iterator[dict[str, str]]:
    frame: dict[str, str] = {}
    for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
        if line:
            name, _, value = line.partition(":")
            frame[name or "comment"] = value.removeprefix(" ")
        else:
            yield frame
            frame = {}


def numbers(answer: requests.Response) -> list[int]:
    with answer:
        return [int(frame["id"]) for frame in frames(answer) if "id" in frame]


def test_a_stream_goes_from_the_first_event_to_the_last(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    with follow(service, job) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        stream = frames(answer)
        first = [next(stream) for _ in range(6)]
        assert "comment" in first[0]
        assert [frame["id"] for frame in first[1:]] == ["1", "2", "3", "4", "5"]
        assert first[1]["event"] == "job.submitted"
        data: Any = json.loads(first[2]["data"])
        assert (data["number"], data["type"], data["job"]) == (2, "job.checked", job)
        service.append(job, JobCancelRequested())
        service.append(job, JobCancelled())
        assert [frame["event"] for frame in stream] == ["job.cancel_requested", "job.cancelled"]


def test_last_event_id_goes_on_from_there(service: Service) -> None:
    job = service.submit()
    service.append(job, *RUNNING)
    service.append(job, JobCancelled())
    assert numbers(follow(service, job, last=3)) == [4, 5, 6]
    assert follow(service, job, last=6).status_code == 204
    with requests.get(
        f"{service.url}/jobs/{job}/events?after=4", headers={"Accept": "text/event-stream"}, stream=True, timeout=9
    ) as answer:
        assert [frame["id"] for frame in frames(answer) if "id" in frame] == ["5", "6"]


def checkpoint(step: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, path=f"checkpoints/step-{step:08}", bytes=1, seconds=0.1)


def test_no_gap_while_events_are_being_written(service: Service) -> None:
    """Followers come in at any time during 200 appends, one of them leaves and comes back: all see all numbers."""
    job = service.submit()
    service.append(job, *RUNNING)
    seen: dict[int, list[int]] = {}

    def one(follower: int) -> None:
        seen[follower] = numbers(follow(service, job))

    def coming_back() -> None:
        got: list[int] = []
        while not got or got[-1] != 206:
            with follow(service, job, last=got[-1] if got else 0) as answer:
                for count, frame in enumerate(each for each in frames(answer) if "id" in each):
                    got.append(int(frame["id"]))
                    if count == 20:
                        break
        seen[-1] = got

    threads = [threading.Thread(target=coming_back)]
    threads[0].start()
    for step in range(200):
        service.append(job, checkpoint(step))
        if step % 40 == 0:
            threads.append(threading.Thread(target=one, args=(step,)))
            threads[-1].start()
    service.append(job, JobCancelled())
    for thread in threads:
        thread.join(20)
    assert len(seen) == 6
    for follower, got in seen.items():
        assert got == list(range(1, 207)), follower


def test_a_slow_follower_misses_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one event and rests while its queue overflows, the last event included; then it reads on by number."""
    monkeypatch.setattr(jobs.redis.feed, "MOST_WAITING", 2)
    job = service.submit()

    def work() -> None:
        service.append(job, *RUNNING)
        service.append(job, *[checkpoint(step) for step in range(20)])
        service.append(job, JobCancelled())

    async def slow() -> list[int]:
        got = []
        async with jobs.redis.feed.Feed(service.settings.redis_url, frame) as feed:
            async for new in feed.follow(job, after=0, idle_s=10):
                assert new, "idle although there are events"
                got += [told.number for told in new]
                if got == [1]:
                    await asyncio.to_thread(work)
                    await asyncio.sleep(0.3)
        return got

    assert asyncio.run(slow()) == list(range(1, 27))


def test_quiet_streams_are_kept_alive(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, keep_alive_s=0.1) as service:
        job = service.submit()
        with follow(service, job) as answer:
            stream = frames(answer)
            assert [next(stream).get("comment") for _ in range(4)] == ["following", None, "keep-alive", "keep-alive"]


def test_a_stream_survives_a_restart_of_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", aof=True) as redis, running(redis.url, tmp_path) as service:
        job = service.submit()
        service.append(job, *RUNNING)
        with follow(service, job) as answer:
            stream = frames(answer)
            assert [next(stream).get("id") for _ in range(6)] == [None, "1", "2", "3", "4", "5"]
            redis.stop()
            redis.start()
            service.append(job, checkpoint(1))
            service.append(job, JobCancelled())
            assert [frame["id"] for frame in stream] == ["6", "7"]


def test_a_stream_goes_on_after_the_service_was_killed_and_started_again(tmp_path: Path, data: Path) -> None:
    """kill -9 between events, twice, while a worker keeps writing: each number once, in order."""
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service")
        run = stack.submit(TINY)
        store = Store(connect(stack.redis.url))
        store.append(run, RUNNING)
        got: list[int] = []
        for step in range(2):
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(got[-1] if got else 0)}
            url = f"{stack.url}/jobs/{run.id}/events"
            with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
                stream = frames(answer)
                while not got or got[-1] < 5 + 2 * step:
                    frame = next(stream)
                    got += [int(frame["id"])] if "id" in frame else []
                store.append(run, [checkpoint(step)])
                got.append(next(int(frame["id"]) for frame in stream if "id" in frame))
                stack.kill("service")
            store.append(run, [checkpoint(step)])  # while nobody serves
            stack.start("service")
        store.append(run, [JobCancelled()])
        with requests.get(
            f"{stack.url}/jobs/{run.id}/events",
            headers={"Accept": "text/event-stream", "Last-Event-ID": str(got[-1])},
            stream=True,
            timeout=60,
        ) as answer:
            got += numbers(answer)
    assert got == list(range(1, 11))


def test_an_event_is_put_into_words_once_for_all_who_follow(service: Service) -> None:
    job = service.submit()
    made: list[int] = []

    def counted(event: Event) -> bytes:
        made.append(event.number)
        return frame(event)

    async def everybody() -> list[list[int]]:
        async with jobs.redis.feed.Feed(service.settings.redis_url, counted) as feed:
            there = asyncio.Barrier(21)

            async def one() -> list[int]:
                got: list[int] = []
                async for new in feed.follow(job, after=0, idle_s=10):
                    assert new, "idle although there are events"
                    if not got:
                        await there.wait()
                    got += [told.number for told in new]
                return got

            async def worker() -> None:
                await there.wait()
                await asyncio.to_thread(service.append, job, *RUNNING)
                await asyncio.to_thread(service.append, job, JobCancelled())

            async with asyncio.TaskGroup() as group:
                followers = [group.create_task(one()) for _ in range(20)]
                group.create_task(worker())
            return [follower.result() for follower in followers]

    assert asyncio.run(everybody()) == [list(range(1, 7))] * 20
    assert sorted(made) == list(range(1, 7))


def test_what_happens_while_followers_are_told_is_told_with_one_write(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.redis.feed, "TOGETHER_S", 2.0)
    job = service.submit()
    service.append(job, *RUNNING)

    async def one() -> list[list[int]]:
        got: list[list[int]] = []
        async with jobs.redis.feed.Feed(service.settings.redis_url, frame) as feed:
            async for new in feed.follow(job, after=4, idle_s=10):
                got.append([told.number for told in new])
                if got == [[5]]:
                    await asyncio.to_thread(service.append, job, checkpoint(1))
                elif got == [[5], [6]]:
                    for step in range(2, 12):
                        await asyncio.to_thread(service.append, job, checkpoint(step))
                    await asyncio.to_thread(service.append, job, JobCancelled())
        return got

    assert asyncio.run(one()) == [[5], [6], list(range(7, 18))]


def test_an_event_that_did_not_come_is_looked_for_where_the_job_keeps_it(service: Service) -> None:
    """Between two that came together, too."""
    job = service.submit()
    service.append(job, *RUNNING)
    run = service.run(job)
    client = connect(service.settings.redis_url)

    async def one() -> list[int]:
        got: list[int] = []
        async with jobs.redis.feed.Feed(service.settings.redis_url, frame) as feed:
            async for new in feed.follow(job, after=0, idle_s=10):
                got += [told.number for told in new]
                if got[-1] == 5:
                    run.append([checkpoint(1), checkpoint(2), JobCancelled()])
                    with client.pipeline(transaction=True) as both:
                        for event in run.events(after=5):
                            raw = event.model_dump_json()
                            both.xadd(events_key(job), {"event": raw}, id=f"{event.number}-0")
                            if event.number != 7:
                                both.xadd(ALL_EVENTS, {"job": job, "event": raw})
                        await asyncio.to_thread(both.execute)
        return got

    assert asyncio.run(one()) == list(range(1, 9))


def test_an_event_that_nobody_can_read_stops_no_other_job(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """As another version, or a stranger in Redis, may write it: the reader continues for everybody else."""
    broken, job = service.submit(), service.submit()
    client = connect(service.settings.redis_url)
    with follow(service, broken) as hurt, follow(service, job) as answer:
        stream, other = frames(answer), frames(hurt)
        for each in (stream, other):
            assert [next(each).get("id") for _ in range(2)] == [None, "1"]
        client.xadd("longhaul:events", {"job": broken, "event": '{"number": 2, "fact": {"type": "job.exploded"}}'})
        service.append(job, JobCancelled())
        assert [frame["id"] for frame in stream if "id" in frame] == ["2"]
    assert f"job {broken} has an event that this version cannot read" in caplog.text


def unworded(service: Service) -> float:
    value = figure(scrape(service), "events_unworded_total")
    assert value is not None
    return value


def test_an_event_without_words_is_shown_as_it_is_and_cuts_nobody_off(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned, job = service.submit(), service.submit()
    monkeypatch.setattr("jobs.events._needed", None)
    before = unworded(service)
    with follow(service, poisoned) as hurt, follow(service, job) as answer:
        stream, other = frames(answer), frames(hurt)
        for each in (stream, other):
            assert [next(each).get("id") for _ in range(2)] == [None, "1"]
        service.append(poisoned, checked())
        shown = json.loads(next(other)["data"])
        assert (shown["number"], shown["type"]) == (2, "job.checked")
        assert shown["message"] == f"job.checked {checked().model_dump_json(exclude={'type'})}"
        assert unworded(service) == before + 1
        service.append(job, JobCancelled())
        service.append(poisoned, JobCancelled())
        for each in (stream, other):
            assert "job.cancelled" in [frame.get("event") for frame in each]
    page = service.get(f"/jobs/{poisoned}/events").json()
    assert page["data"][1]["message"] == shown["message"]


def test_whatever_stands_in_the_stream_of_all_jobs_the_reader_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs.redis.feed, "RETRY_S", 0.01)
    job = service.submit()
    client = connect(service.settings.redis_url)
    with follow(service, job) as answer:
        stream = frames(answer)
        assert [next(stream).get("id") for _ in range(2)] == [None, "1"]
        client.xadd(ALL_EVENTS, {"neither": "job", "nor": "event"})
        until(lambda: "the reader of the feed failed" in caplog.text)
        service.append(job, JobCancelled())
        assert [frame["id"] for frame in stream if "id" in frame] == ["2"]


@pytest.mark.parametrize(
    "raw", ['{"number": 2, "at": 5, "fact": {"type": "job.exploded", "why": "\\ud800"}}', "[]", "x"]
)
def test_an_event_of_another_version_is_shown_as_it_is(service: Service, raw: str) -> None:
    job = service.submit()
    client = connect(service.settings.redis_url)
    with follow(service, job) as answer:
        stream = frames(answer)
        assert [next(stream).get("id") for _ in range(2)] == [None, "1"]
        client.xadd(events_key(job), {"event": raw}, id="2-0")
        client.xadd(ALL_EVENTS, {"job": job, "event": raw})
        shown = json.loads(next(stream)["data"])
    assert (shown["number"], shown["job"], shown["level"]) == (2, job, "warn")
    assert shown["message"] == f"this version cannot read the event: {raw}"


def test_too_many_streams_are_refused_and_those_that_end_make_room(redis_url: str, tmp_path: Path) -> None:
    with running(redis_url, tmp_path, max_streams=2) as service:
        job = service.submit()
        with follow(service, job) as first, follow(service, job) as second:
            streams = [frames(answer) for answer in (first, second)]
            assert [next(stream) for stream in streams] == [{"comment": "following"}] * 2
            refused = follow(service, job)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) > 0
            assert refused.json()["error"]["code"] == "too_many_streams"
            logs = service.get(f"/jobs/{job}/logs?follow=true")
            assert (logs.status_code, logs.json()["error"]["code"]) == (429, "too_many_streams")
            assert service.get(f"/jobs/{job}").status_code == 200, "only streams are counted"
            service.append(job, JobCancelled())
            for stream in streams:
                assert [frame["id"] for frame in stream if "id" in frame] == ["1", "2"]
        until(lambda: service.get(f"/jobs/{job}/logs?follow=true").status_code == 200)


# redis-py leaves a connection to the garbage collector when it is stopped while it connects.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_feed_stops_at_once_whenever_it_is_told_to(service: Service) -> None:
    """At any moment of its reader's and followers' first words with Redis, whose client may swallow a cancellation."""

    async def rounds() -> None:
        for number in range(150):
            async with asyncio.timeout(20):
                async with jobs.redis.feed.Feed(service.settings.redis_url, frame) as feed:
                    followers = [asyncio.create_task(feed.ended("job-none", after=0)) for _ in range(5)]
                    await asyncio.sleep(number / 15_000)
                for follower in followers:
                    follower.cancel()
                await asyncio.wait(followers)

    asyncio.run(rounds())
    gc.collect()  # here, where the warning is expected, and not in the next test
