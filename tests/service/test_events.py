"""Events as a list and live: in order, without gap, wherever the follower comes in."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import jobs.feed
from jobs.events import (
    AttemptStarted,
    CheckpointSaved,
    JobCancelled,
    JobChecked,
    JobPrepared,
    JobQueued,
    JobRequested,
)
from tests.redis_server import RedisServer
from tests.service.running import Service, running

START = (JobChecked(plan={}), JobPrepared(data={}, steps=9), JobQueued(), AttemptStarted(worker="w", device="cpu"))


def test_the_list_has_pages(service: Service) -> None:
    job = service.submit()
    service.append(job, *START)
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
    service.append(job, *START)
    with follow(service, job) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        stream = frames(answer)
        first = [next(stream) for _ in range(6)]
        assert "comment" in first[0]
        assert [frame["id"] for frame in first[1:]] == ["1", "2", "3", "4", "5"]
        assert first[1]["event"] == "job.submitted"
        data: Any = json.loads(first[2]["data"])
        assert (data["number"], data["type"], data["job"]) == (2, "job.checked", job)
        service.append(job, JobRequested(request="cancel"))
        service.append(job, JobCancelled())
        assert [frame["event"] for frame in stream] == ["job.requested", "job.cancelled"]


def test_last_event_id_goes_on_from_there(service: Service) -> None:
    job = service.submit()
    service.append(job, *START)
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
    service.append(job, *START)
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
    monkeypatch.setattr(jobs.feed, "QUEUE_LENGTH", 2)
    job = service.submit()

    def work() -> None:
        service.append(job, *START)
        service.append(job, *[checkpoint(step) for step in range(20)])
        service.append(job, JobCancelled())

    async def slow() -> list[int]:
        got = []
        async with jobs.feed.Feed(service.settings.redis_url) as feed:
            async for event in feed.follow(job, after=0, idle_s=10):
                assert event is not None, "idle although there are events"
                got.append(event.number)
                if event.number == 1:
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
        service.append(job, *START)
        with follow(service, job) as answer:
            stream = frames(answer)
            assert [next(stream).get("id") for _ in range(6)] == [None, "1", "2", "3", "4", "5"]
            redis.stop()
            redis.start()
            service.append(job, checkpoint(1))
            service.append(job, JobCancelled())
            assert [frame["id"] for frame in stream] == ["6", "7"]
