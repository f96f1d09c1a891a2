"""Every Lua move may be sent twice (redis-py re-sends after a lost reply): same answers, same Redis."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import redis

from jobs.disk.rundir import RunDir, create
from jobs.errors import Damaged
from jobs.events import AttemptEnded, AttemptStarted, JobCancelled, JobQueued, JobSubmitted
from jobs.redis import maintenance, queries, scripts
from jobs.redis.connection import Scripts, connect
from jobs.redis.store import Store
from jobs.spec import parse_spec
from jobs.state import Stage, Status
from tests.support.samples import QUEUED, STARTED

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})


class Lossy(Scripts):
    """Loses the reply of every script once, so that each is sent twice; answers with the second reply."""

    sent: ClassVar[set[str]] = set()

    def __call__(self, script: str, *args: str | bytes | int) -> Any:
        self.sent.add(script)
        first = super().__call__(script, *args)
        second = super().__call__(script, *args)
        if script != scripts.RELEASE:  # says whether *this* call let go; the state is what counts
            assert first == second, script
        return second


def submit(store: Store, runs: Path, job: str, **more: object) -> RunDir:
    first = JobSubmitted.model_validate({"name": job, "model": "m", "spec_sha256": "s", **more})
    run, _ = create(runs, job, SPEC, first)
    store.project(run, run.record(), run.events())
    return run


def scenario(store: Store, runs: Path) -> None:
    """A life with every move in it. Redis is new."""
    assert (
        store.maintenance.begin_rebuild("me")
        and store.maintenance.end_rebuild("me")
        and not store.maintenance.begin_rebuild("you")
    )
    assert store.reserve("key", "job-a", "body") == ("job-a", "body")
    assert store.reserve("key", "job-b", "other") == ("job-a", "body")
    run = submit(store, runs, "job-a")
    submit(store, runs, "job-b", priority=5)
    assert store.claim(Stage.CHECK, "t0") == "job-b"
    assert store.claim(Stage.CHECK, "t1") == "job-a"
    assert store.claim(Stage.CHECK, "t2") is None
    assert store.renew("job-a", "t1") and not store.renew("job-a", "t2")
    store.release("job-b", "t0")
    store.append(run, QUEUED[:1], release="t1")
    assert store.claim(Stage.PREPARE, "t3") == "job-a"
    store.append(run, QUEUED[1:], release="t3")
    assert store.claim(Stage.TRAIN, "t4") == "job-a"
    store.append(run, [STARTED])
    assert [item for item in store.maintenance.expired() if item[0] == "job-a"] == []
    assert store.maintenance.expire("job-a", "t4") == 0
    store.append(run, [AttemptEnded(reason="interrupted"), JobQueued()], attempt=1, release="t4")
    assert store.claim(Stage.TRAIN, "t5") == "job-a"
    store.mark_damaged(run, Damaged("no more", hint="h"), release="t5")
    assert store.waiting(Stage.TRAIN) == 0 and store.all_damaged() == ["job-a"]
    store.clear_damage("job-a")
    assert store.waiting(Stage.TRAIN) == 1 and store.all_damaged() == []
    assert store.useful_tickets(Stage.TRAIN) == len(store.waiting_to_train()) == 1
    store.mark_damaged(run, Damaged("no more", hint="h"))
    assert store.page(after=None, limit=1)[1] and store.get("job-a").position is None and store.using("rows") == []
    store.forget("job-b")
    assert store.maintenance.known() == {"job-a"}
    assert store.maintenance.lead("me", 60_000) and not store.maintenance.lead("you", 60_000)
    store.maintenance.resign("you")
    assert not store.maintenance.lead("you", 60_000)
    store.maintenance.resign("me")
    assert store.maintenance.lead("you", 60_000)


def dump(client: redis.Redis) -> dict[str, Any]:
    """All of Redis, with clock readings and stream times left out."""
    out: dict[str, Any] = {}
    for raw in cast(list[bytes], client.keys("*")):
        key, kind = raw.decode(), cast(bytes, client.type(raw)).decode()
        if kind == "hash":
            fields = cast(dict[bytes, bytes], client.hgetall(raw))
            out[key] = {name: _timeless(value) for name, value in fields.items()}
        elif kind == "zset":
            out[key] = cast(list[bytes], client.zrange(raw, 0, -1))
        elif kind == "stream":
            rows = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(raw))
            out[key] = [{name: _timeless(value) for name, value in fields.items()} for _, fields in rows]
        else:
            out[key] = client.get(raw)
    return out


def _timeless(value: bytes) -> Any:
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    if isinstance(parsed, dict):
        return {
            key: item for key, item in parsed.items() if key != "at" and not key.endswith("_at") and key != "training_s"
        }
    return None if isinstance(parsed, float) or (isinstance(parsed, int) and abs(parsed) > 10**9) else parsed


def test_every_move_sent_twice_leaves_the_same_redis(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(redis_url)
    client.flushall()
    (tmp_path / "once").mkdir()
    scenario(Store(client), tmp_path / "once")
    once = dump(client)
    client.flushall()
    (tmp_path / "twice").mkdir()
    with monkeypatch.context() as patch:
        for module in ("store", "maintenance"):
            patch.setattr(f"jobs.redis.{module}.Scripts", Lossy)
        scenario(Store(client), tmp_path / "twice")
    assert dump(client) == once
    texts = {**vars(scripts), **vars(maintenance), **vars(queries)}.items()
    every = {
        text
        for name, text in texts
        if name.isupper() and isinstance(text, str) and "\n" in text and name not in ("HELPERS", "SHOWN", "WHOLE")
    }
    assert Lossy.sent == every, "a script that this test does not replay"


def test_one_ticket_too_many_finds_nothing(redis_url: str, tmp_path: Path) -> None:
    """Two horses at one job: one claim, and in the file one attempt, whatever Redis said."""
    store = Store(connect(redis_url))
    run = submit(store, tmp_path, "job-a")
    store.append(run, QUEUED)
    won: list[str] = []
    refused: list[str] = []

    def attempt(name: str) -> None:
        mine = Store(connect(redis_url))
        try:
            mine.append(run, [AttemptStarted(worker=name, device="cpu")])
            won.append(name)
        except Exception as error:
            refused.append(type(error).__name__)

    threads = [threading.Thread(target=attempt, args=(f"w{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and refused == ["InvalidTransition"] * 7
    assert [event.number for event in run.events()] == [1, 2, 3, 4, 5] == [e.number for e in store.events("job-a")]


def test_order_is_priority_then_time_and_an_interrupted_job_keeps_its_place(redis_url: str, tmp_path: Path) -> None:
    store = Store(connect(redis_url))
    runs = {name: submit(store, tmp_path, name, priority=p) for name, p in (("a", 0), ("b", 0), ("c", 7), ("d", -1))}
    for run in runs.values():
        store.append(run, QUEUED)
    assert [store.get(name).position for name in "cabd"] == [0, 1, 2, 3]
    assert store.claim(Stage.TRAIN, "t") == "c"
    store.append(runs["c"], [STARTED])
    assert store.get("c").position is None
    store.append(runs["c"], [AttemptEnded(reason="interrupted"), JobQueued()], release="t")
    assert [store.get(name).position for name in "cabd"] == [0, 1, 2, 3]


def test_a_job_whose_time_has_not_come_is_skipped(redis_url: str, tmp_path: Path) -> None:
    store = Store(connect(redis_url))
    first, second = submit(store, tmp_path, "a"), submit(store, tmp_path, "b")
    store.append(first, QUEUED)
    store.append(first, [STARTED])
    store.append(first, [AttemptEnded(reason="crash"), JobQueued(not_before_s=300)])
    store.append(second, QUEUED)
    assert store.claim(Stage.TRAIN, "t1") == "b"
    assert store.claim(Stage.TRAIN, "t2") is None


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_a_lost_projection_is_made_up(redis_url: str, tmp_path: Path, keep: int) -> None:
    """Events that Redis never saw (an outage, a FLUSHALL) come with the next projection, in order and once."""
    store = Store(connect(redis_url))
    run = submit(store, tmp_path, "a")
    lost: list[Callable[[], object]] = [lambda: run.append(QUEUED[:1]), lambda: run.append(QUEUED[1:2])]
    for missing in lost:
        missing()
    if keep == 0:
        client = connect(redis_url)
        client.flushall()
        client.set("longhaul:rebuilt", "yes")
    record, _ = store.append(run, QUEUED[2:])
    assert [event.number for event in store.events("a")] == [1, 2, 3, 4]
    stored = store.get("a")
    assert stored.record == record and stored.position == 0
    assert stored.spec is not None and stored.spec.data.train == "rows.jsonl"


def test_an_old_projection_changes_nothing_but_lets_its_lease_go(redis_url: str, tmp_path: Path) -> None:
    store = Store(connect(redis_url))
    run = submit(store, tmp_path, "a")
    assert store.claim(Stage.CHECK, "t") == "a"
    old = run.record()
    store.append(run, [JobCancelled()])
    store.project(run, old, [], release="t")
    assert store.get("a").record.status is Status.CANCELLED
    assert not store.maintenance.leased("a") and store.waiting(Stage.CHECK) == 0
