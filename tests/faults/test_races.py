"""Two wishes for one job, or a wish and its end, at the same instant, 200 (60) times each; on real files and Redis.

In every round: one thing happened after the other, whichever; a job ends once; the record, the sum of the events and
what Redis says are the same; whoever came too late was told so.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import redis

from jobs.attempt import Finished, TrainResult
from jobs.disk.files import write_synced
from jobs.disk.rundir import RunDir, create
from jobs.errors import Conflict, NotFound
from jobs.events import AnyFact, JobFailed, JobSubmitted
from jobs.record import JobRecord, fold
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store, StoredJob
from jobs.spec import parse_spec
from jobs.state import Stage, Status
from jobs.trainer_facts import Fault
from service.jobs.actions import Actions
from tests.support.samples import QUEUED, STARTED
from worker.ending import ending
from worker.reconcile import Reconciler

ROUNDS = 200
FEWER = 60
FAILED = JobFailed(error=Fault(code="bad_data", message="m"))
Act = Callable[[], object]


class Rounds:
    """One job after another, each brought to a state, then treated by two threads at the same instant."""

    def __init__(self, url: str, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.client: redis.Redis = connect(url)
        (folder / "runs").mkdir()
        self.store = Store(self.client)
        self.tickets = Tickets(self.client)
        self.actions = Actions(
            runs=folder / "runs", data=folder, uploads=folder, store=self.store, tickets=self.tickets
        )
        self._spec = parse_spec({"data": {"train": "rows.jsonl"}})
        self._pool = pool
        self._count = 0

    def job(self, *facts: AnyFact, key: str | None = None) -> RunDir:
        """A queued job, and what happened to it since."""
        self._count += 1
        first = JobSubmitted(name="n", model="m", spec_sha256="s", idempotency_key=key, body_sha256="b")
        run, _ = create(self.actions.runs, f"job-{self._count}", self._spec, first)
        self.store.append(run, [*QUEUED, *facts])
        return run

    def at_once(self, *acts: Act) -> list[object]:
        """What each returned, or the Conflict or NotFound that it met."""
        barrier = Barrier(len(acts))

        def go(act: Act) -> object:
            barrier.wait()
            try:
                return act()
            except (Conflict, NotFound) as refused:
                return refused

        return list(self._pool.map(go, acts))

    def ends(self, run: RunDir, end: Finished) -> Act:
        """What a supervisor does when its trainer has ended."""

        def decide(record: JobRecord) -> Sequence[AnyFact]:
            return ending(run, record, 1, end)

        return lambda: self.store.append(run, decide, attempt=1)

    def agreed(self, run: RunDir) -> JobRecord:
        """The record, on which the events, Redis and the order agree."""
        record = fold(run.id, run.events())
        assert self.store.get(run.id).record == record
        assert [event.number for event in self.store.events(run.id)] == list(range(1, record.number + 1))
        ends = [event.type for event in run.events() if event.type.removeprefix("job.") in ENDED]
        assert len(ends) == record.status.terminal, ends
        assert ends[:1] == [event.type for event in run.events()[-1:]][: len(ends)], "nothing follows the end"
        waits = record.status is Status.QUEUED and not self.store.maintenance.leased(run.id)
        score = self.client.zscore("longhaul:order:train", run.id)
        expected = -record.priority * 10**13 + int(record.submitted_at * 1000)
        assert score == (expected if waits else None)
        return record


ENDED = {status.value for status in Status if status.terminal}


@pytest.fixture
def rounds(redis_url: str, tmp_path: Path) -> Iterator[Rounds]:
    with ThreadPoolExecutor(3) as pool:
        yield Rounds(redis_url, tmp_path, pool)


def types(run: RunDir) -> list[str]:
    """Events since it was queued."""
    return [event.type for event in run.events()][4:]


# -- wishes against ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["cancel", "pause"])
def test_a_wish_against_a_completion(rounds: Rounds, wish: str) -> None:
    # Must hold: it has succeeded; the wish was noted before, or met a Conflict; no request is left.
    done = Finished(
        at=1.0, reason="done", step=9, result=TrainResult(model="model", loss=None, first_loss=None, step=9)
    )
    seen: Counter[str] = Counter()
    for _ in range(ROUNDS):
        run = rounds.job(STARTED)
        wished, _ = rounds.at_once(partial(getattr(rounds.actions, wish), run.id), rounds.ends(run, done))
        late = isinstance(wished, Conflict)
        asked = [] if late else [f"job.{wish}_requested"]
        assert types(run) == ["attempt.started", *asked, "attempt.ended", "job.succeeded"]
        assert rounds.agreed(run).status is Status.SUCCEEDED
        seen["late" if late else "noted"] += 1
    print(wish, dict(seen))


def test_a_cancel_against_an_interruption(rounds: Rounds) -> None:
    # Cancel while the attempt ends because its worker is stopped. Must hold: it is cancelled, whoever came first.
    interrupted = Finished(at=1.0, reason="interrupted", step=3)
    for _ in range(FEWER):
        run = rounds.job(STARTED)
        rounds.at_once(partial(rounds.actions.cancel, run.id), rounds.ends(run, interrupted))
        assert types(run)[1:] in (
            ["job.cancel_requested", "attempt.ended", "job.cancelled"],
            ["attempt.ended", "job.queued", "job.cancelled"],
        )
        assert rounds.agreed(run).status is Status.CANCELLED
        assert rounds.store.claim(Stage.TRAIN, run.id) is None, "nobody gets it any more"


def test_a_pause_against_a_failure(rounds: Rounds) -> None:
    # Must hold: an attempt that was asked to pause, and whose trainer finds that the job cannot continue, is paused
    # with the reason; one whose failure came first has failed, and the pause met a Conflict. Never both.
    refused = Finished(at=1.0, reason="rejected", step=3, error=Fault(code="guard", message="meta tensor"))
    for _ in range(ROUNDS):
        run = rounds.job(STARTED)
        paused, _ = rounds.at_once(partial(rounds.actions.pause, run.id), rounds.ends(run, refused))
        record = rounds.agreed(run)
        assert record.last_reason == "rejected"
        if isinstance(paused, Conflict):
            assert types(run)[1:] == ["attempt.ended", "job.failed"] and record.error == refused.error
        else:
            assert types(run)[1:] == ["job.pause_requested", "attempt.ended", "job.paused"]


def test_a_cancel_against_a_start_and_another_cancel(rounds: Rounds) -> None:
    # Cancel twice while a worker starts the job. Must hold: cancelled before it started (the worker is told), or
    # running with one request; never both, never two of a kind.
    for _ in range(FEWER):
        run = rounds.job()
        *_, started = rounds.at_once(
            partial(rounds.actions.cancel, run.id),
            partial(rounds.actions.cancel, run.id),
            partial(rounds.store.append, run, [STARTED]),
        )
        if isinstance(started, Conflict):
            assert types(run) == ["job.cancelled"]
        else:
            assert types(run) == ["attempt.started", "job.cancel_requested"]
        rounds.agreed(run)


# -- priority ---------------------------------------------------------------------------------------------------------


def test_a_priority_against_a_claim_and_a_start(rounds: Rounds) -> None:
    # The second of two is put first while a worker takes the head and starts it. Must hold: the worker has one of the
    # two, and it is the second only if the priority came first; the other one waits, at the place it then has.
    seen: Counter[str] = Counter()
    for number in range(ROUNDS):
        first, second = rounds.job(), rounds.job()
        token = f"t{number}"

        def start(number: int = number, token: str = token) -> str:
            if number % 2:  # a claim alone is so much quicker than an append to a file that it would always be first
                write_synced(rounds.actions.runs / ".slower", b"")
            job = rounds.store.claim(Stage.TRAIN, token)
            assert job is not None
            rounds.store.append(RunDir(rounds.actions.runs / job), [STARTED])
            return job

        _, taken = rounds.at_once(partial(rounds.actions.change, second.id, {"priority": 5}), start)
        left = first if taken == second.id else second
        assert taken in (first.id, second.id)
        assert types(first) == (["attempt.started"] if taken == first.id else [])
        assert sorted(types(second)) == sorted(
            ["job.priority_changed", *(["attempt.started"] if taken == second.id else [])]
        )
        assert [rounds.agreed(run).priority for run in (first, second)] == [0, 5]
        assert [job for job, _ in rounds.store.waiting_to_train()] == [left.id]
        seen["second" if taken == second.id else "first"] += 1
        rounds.actions.cancel(left.id)
    print(dict(seen))


def test_two_priorities_at_once(rounds: Rounds) -> None:
    # Must hold: both are told, in some order, and the last one holds, in the record and in the order.
    for _ in range(FEWER):
        run = rounds.job()
        rounds.at_once(*(partial(rounds.actions.change, run.id, {"priority": n}) for n in (3, -3)))
        assert types(run) == ["job.priority_changed"] * 2
        assert rounds.agreed(run).priority == run.events()[-1].fact.model_dump()["priority"]


# -- deletion ---------------------------------------------------------------------------------------------------------


def test_a_deletion_against_a_clone(rounds: Rounds) -> None:
    # Must hold: the clone is whole, or there was nothing to clone any more; of the job nothing is left.
    for _ in range(FEWER):
        run = rounds.job(FAILED)
        deleted, cloned = rounds.at_once(
            partial(rounds.actions.delete, run.id),
            partial(rounds.actions.clone, run.id, {"name": "again"}),
        )
        assert deleted is None and not run.path.exists() and rounds.store.number(run.id) == 0
        if not isinstance(cloned, NotFound):
            assert isinstance(cloned, StoredJob)
            clone = rounds.actions.run(cloned.record.id)
            assert clone.record().cloned_from == run.id and clone.spec().name == "again"
            shutil.rmtree(clone.path)
    assert list(rounds.actions.runs.iterdir()) == []


def test_a_deletion_against_a_rebuilding_of_redis(rounds: Rounds) -> None:
    # Redis is wiped, and reconcile tells it of every run directory while one is deleted. Must hold: Redis does not hear
    # of a job that is gone, nor of its key, whoever came first.
    for number in range(ROUNDS):
        key = f"key-{number}"
        run = rounds.job(FAILED, key=key)
        rounds.client.flushall()
        reconciler = Reconciler(rounds.actions.runs, rounds.store, rounds.tickets)
        deleted, _ = rounds.at_once(partial(rounds.actions.delete, run.id), reconciler.run_once)
        assert deleted is None
        assert rounds.client.keys(f"*{run.id}*") == []
        assert rounds.store.reserve(key, "job-new", "b", on_disk=lambda: None) == ("job-new", "b")


def test_two_deletions_at_once(rounds: Rounds) -> None:
    # Must hold: one of them did it, the other is told that there is no such job; nothing is left lying about.
    for _ in range(FEWER):
        run = rounds.job(FAILED)
        results = rounds.at_once(*[partial(rounds.actions.delete, run.id)] * 2)
        assert sorted(type(result).__name__ for result in results) == ["NoneType", "NotFound"]
    assert list(rounds.actions.runs.iterdir()) == [] and rounds.store.maintenance.known() == set()
