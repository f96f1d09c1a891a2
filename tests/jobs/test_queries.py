"""Lists that are filtered and paged while jobs move, what they cost, and when a job's turn is expected to come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from jobs.disk.rundir import RunDir, create
from jobs.errors import NotFound
from jobs.events import (
    Adopted,
    AnyFact,
    AttemptEnded,
    JobCancelled,
    JobPauseRequested,
    JobPriorityChanged,
    JobQueued,
    JobSubmitted,
)
from jobs.redis.connection import connect
from jobs.redis.queries import Filter
from jobs.redis.store import Store
from jobs.spec import parse_spec
from jobs.state import Stage, Status
from jobs.trainer_facts import CheckpointSaved
from tests.support.samples import STARTED, checked, heartbeat, metric_row, prepared, time_summary

ROW = metric_row(5)


@pytest.fixture
def store(redis_url: str) -> Store:
    return Store(connect(redis_url))


def submit(
    store: Store, runs: Path, job: str, *facts: AnyFact, train: str = "rows.jsonl", hours: float | None = None,
    **more: Any,
) -> RunDir:  # fmt: skip
    """A job to which these facts have happened. `hours`: prepared and queued before them, and planned for so long."""
    spec = parse_spec({"data": {"train": train}})
    run, _ = create(runs, job, spec, JobSubmitted(name=job, model="m", spec_sha256="s", **more))
    store.project(run, run.record(), run.events())
    if hours is not None:
        planned = prepared(time=time_summary(hours_expected=hours))
        facts = (checked(), planned, JobQueued(), *facts)
    if facts:
        store.append(run, facts)
    return run


def ids(store: Store, wanted: Filter | None = None, **labels: str) -> list[str]:
    wanted = wanted or Filter(metadata={key: [value] for key, value in labels.items()})
    return [job.id for job in store.page(wanted, after=None, limit=100)[0]]


def test_a_list_has_what_fits_every_filter_newest_first(store: Store, tmp_path: Path) -> None:
    submit(store, tmp_path, "a", metadata={"team": "kitchen", "kind": "cake"})
    submit(store, tmp_path, "b", JobCancelled(), metadata={"team": "kitchen"})
    submit(store, tmp_path, "c", hours=1.0, metadata={"team": "bakery", "kind": "cake"})
    submit(store, tmp_path, "d", hours=1.0)
    assert ids(store) == ["d", "c", "b", "a"]
    assert ids(store, Filter([Status.CANCELLED, Status.QUEUED])) == ["d", "c", "b"]
    assert ids(store, team="kitchen") == ["b", "a"]
    assert ids(store, team="kitchen", kind="cake") == ["a"]
    assert ids(store, Filter(metadata={"team": ["kitchen", "bakery"]})) == ["c", "b", "a"]
    assert ids(store, Filter([Status.QUEUED], {"team": ["kitchen", "bakery"]})) == ["c"]
    assert ids(store, team="") == ids(store, kind="kitchen") == ids(store, Filter([Status.FAILED])) == []


def test_labels_are_told_apart_whatever_is_in_them(store: Store, tmp_path: Path) -> None:
    odd = [("a=b", "c"), ("a", "b=c"), ("a", "*"), ('"', "\u2603 \n"), ("]", "[")]
    for number, (key, value) in enumerate(odd):
        submit(store, tmp_path, f"job-{number}", metadata={key: value})
    assert [ids(store, Filter(metadata={key: [value]})) for key, value in odd] == [
        [f"job-{n}"] for n in range(len(odd))
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_pages_lose_and_double_nothing_while_jobs_change_their_state(
    store: Store, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them were submitted in the same millisecond; the job that a page follows moves away, too."""
    with monkeypatch.context() as patch:
        for number in range(16):
            if number % 2:
                patch.setattr("jobs.disk.rundir.time.time", lambda now=1e9 + number // 8: now)
            submit(store, tmp_path, f"job-{number:02}", hours=1.0)
    wanted = Filter([Status.QUEUED, Status.RUNNING])
    seen: list[str] = []
    after, more = None, True
    while more:
        page, more = store.page(wanted, after=after, limit=limit)
        seen += [job.id for job in page]
        after = seen[-1]
        for job in (after, f"job-{len(seen) % 16:02}"):  # one that was seen, one that may be to come
            run = RunDir(tmp_path / job)
            match run.record().status:
                case Status.QUEUED:
                    store.append(run, [JobCancelled()] if job == "job-07" and job in seen else [STARTED])
                case Status.RUNNING:
                    store.append(run, [AttemptEnded(reason="interrupted"), JobQueued()])
    assert len(seen) == len(set(seen)) == 16
    assert [job.id for job in store.page(after=None, limit=16)[0]] == seen, "the order is that of all jobs"


def test_a_page_that_follows_a_job_that_is_gone_is_refused(store: Store, tmp_path: Path) -> None:
    submit(store, tmp_path, "a")
    submit(store, tmp_path, "b")
    assert [job.id for job in store.page(after="b", limit=1)[0]] == ["a"]
    store.forget("b")
    with pytest.raises(NotFound, match="no job b"):
        store.page(after="b", limit=1)


def test_a_forgotten_job_leaves_nothing(store: Store, tmp_path: Path, redis_url: str) -> None:
    client = connect(redis_url)
    assert store.reserve("key", "job-a", "b") == ("job-a", "b")
    submit(store, tmp_path, "job-a", hours=1.0, idempotency_key="key", metadata={"x": "y"}, train="dataset:r.jsonl")
    store.set_latest("job-a", ROW)
    store.forget("job-a")
    assert set(cast(list[bytes], client.keys("*"))) == {b"longhaul:events", b"longhaul:rebuilt"}


def test_jobs_by_data_set(store: Store, tmp_path: Path) -> None:
    submit(store, tmp_path, "a", JobCancelled(), train="dataset:cakes.jsonl")
    submit(store, tmp_path, "b", train="dataset:cakes.jsonl")
    submit(store, tmp_path, "c", train="cakes.jsonl")
    assert store.using("cakes.jsonl") == [("b", Status.VALIDATING), ("a", Status.CANCELLED)]
    assert store.using("rows.jsonl") == []


def calls(client: redis.Redis) -> int:
    """Commands that Redis has run, those inside of scripts included."""
    stats = client.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if name != "cmdstat_info")


def test_a_question_costs_the_same_among_many_jobs(store: Store, tmp_path: Path, redis_url: str) -> None:
    client = connect(redis_url)
    run = submit(store, tmp_path, "job-0", JobCancelled(), metadata={"team": "a"})
    record, events = run.record(), run.events()

    def cost(ask: Callable[[], object]) -> int:
        before = calls(client)
        ask()
        return calls(client) - before

    questions: list[Callable[[], object]] = [
        lambda: store.get("job-0"),
        lambda: store.page(after=None, limit=20),
        lambda: store.page(after="job-50", limit=20),
        lambda: store.page(Filter([Status.CANCELLED, Status.RUNNING], {"team": ["a"]}), after="job-50", limit=20),
    ]
    costs: list[list[int]] = []
    for first, last in ((1, 100), (100, 3000)):
        for number in range(first, last):
            later = record.model_copy(update={"submitted_at": record.submitted_at + number})
            copy = RunDir(tmp_path / f"job-{number}")
            copy.path.mkdir()
            copy.spec_file.write_bytes(run.spec_file.read_bytes())
            store.project(copy, later.model_copy(update={"id": copy.id}), events)
        for ask in questions:  # Redis has seen the text of every script
            ask()
        costs.append([cost(ask) for ask in questions])
    assert costs[0] == costs[1]


# -- estimates --------------------------------------------------------------------------------------------------------


def trainers(store: Store, *names: str, **facts: Any) -> None:
    for name in names:
        store.workers.report(heartbeat(name, **{"stage": "train"} | facts))


def times(store: Store, job: str) -> tuple[float | None, float | None]:
    found = store.get(job)
    return found.estimated_start, found.estimated_finish


def test_jobs_start_one_after_the_other_on_one_gpu(store: Store, tmp_path: Path) -> None:
    trainers(store, "t")
    busy = submit(store, tmp_path, "busy", STARTED, hours=99.0)
    until = time.time() + 7200
    store.set_latest(busy.id, ROW.model_copy(update={"at": until - 3600, "eta_s": 3600.0}))
    submit(store, tmp_path, "a", hours=2.0)
    submit(store, tmp_path, "b", hours=0.5)
    submit(store, tmp_path, "urgent", hours=1.0, priority=5)
    assert times(store, "busy") == (None, None), "its own finish is in its row of metrics"
    assert times(store, "urgent") == pytest.approx((until, until + 3600), abs=0.002)
    assert times(store, "a") == pytest.approx((until + 3600, until + 3 * 3600), abs=0.002)
    assert times(store, "b") == pytest.approx((until + 3 * 3600, until + 3.5 * 3600), abs=0.002)
    page = [job.parsed() for job in store.page(after=None, limit=9)[0]]
    assert {job.record.id: (job.estimated_start, job.estimated_finish) for job in page} == {
        job: times(store, job) for job in ("urgent", "a", "b", "busy")
    }
    store.append(RunDir(tmp_path / "b"), [JobPriorityChanged(priority=9)])
    assert times(store, "b")[0] == pytest.approx(until, abs=0.002)


def test_a_second_gpu_takes_every_other_job_and_what_was_trained_already_counts(store: Store, tmp_path: Path) -> None:
    trainers(store, "t", "u")
    trainers(store, "broken", healthy=False)
    trainers(store, "checks", stage="check")
    saved = CheckpointSaved(step=5, path="checkpoints/step-00000005", bytes=1, seconds=0.1)
    submit(store, tmp_path, "half", STARTED, saved, AttemptEnded(reason="interrupted"), JobQueued(), hours=4.0)
    submit(store, tmp_path, "long", hours=8.0)
    submit(store, tmp_path, "third", hours=1.0)
    before = time.time()
    (start, finish), (long_start, _), (third, _) = (times(store, job) for job in ("half", "long", "third"))
    assert start is not None and finish is not None and long_start is not None and third is not None
    assert before - 0.002 <= start <= long_start <= time.time()
    assert finish - start == pytest.approx(2 * 3600, abs=0.002), "half of its steps are in a checkpoint"
    assert before + 2 * 3600 - 0.002 <= third <= time.time() + 2 * 3600


def test_what_is_left_counts_from_the_checkpoint_and_not_from_where_the_last_attempt_came(
    store: Store, tmp_path: Path
) -> None:
    """At 59 s before its end it crashed: with no checkpoint all of its ten steps are to be done again."""
    trainers(store, "t")
    crashed = (STARTED, AttemptEnded(reason="crash"), JobQueued())
    run = submit(store, tmp_path, "a", *crashed, hours=4.0)
    store.set_latest("a", ROW.model_copy(update={"step": 9, "eta_s": 59.0}))
    start, finish = times(store, "a")
    assert start is not None and finish == pytest.approx(start + 590, abs=0.002)
    submit(store, tmp_path, "b", hours=1.0)
    store.append(run, [STARTED])
    assert times(store, "b")[0] == pytest.approx((run.record().attempt_started_at or 0) + 590, abs=0.002)
    saved = CheckpointSaved(step=5, path="checkpoints/step-00000005", bytes=1, seconds=0.1)
    store.append(run, [saved, AttemptEnded(reason="worker_lost"), JobQueued()])
    start, finish = times(store, "a")
    assert start is not None and finish == pytest.approx(start + 295, abs=0.002)


def test_what_another_job_did_is_not_in_the_plan_of_one_that_goes_on_from_it(store: Store, tmp_path: Path) -> None:
    trainers(store, "t")
    adopted = Adopted(source="job-x/step-00000080", step=80, path="checkpoints/step-00000080")
    time_left = time_summary(hours_expected=2.0)
    queued = (checked(), prepared(100, time=time_left, adopted=adopted), JobQueued())
    run = submit(store, tmp_path, "a", *queued)
    start, finish = times(store, "a")
    assert start is not None and finish == pytest.approx(start + 2 * 3600, abs=0.002)
    saved = CheckpointSaved(step=90, path="checkpoints/step-00000090", bytes=1, seconds=0.1)
    store.append(run, [STARTED, saved, AttemptEnded(reason="worker_lost"), JobQueued()])
    start, finish = times(store, "a")
    assert start is not None and finish == pytest.approx(start + 3600, abs=0.002)


def test_a_job_that_was_asked_to_stop_is_not_waited_for(store: Store, tmp_path: Path) -> None:
    trainers(store, "t")
    submit(store, tmp_path, "stops", STARTED, JobPauseRequested(), hours=5.0)
    submit(store, tmp_path, "a", hours=1.0)
    before = time.time()
    start, _ = times(store, "a")
    assert start is not None and before - 0.002 <= start <= time.time()


def test_where_nobody_can_tell_there_is_no_estimate(store: Store, tmp_path: Path) -> None:
    submit(store, tmp_path, "a", hours=1.0)
    assert times(store, "a") == (None, None), "no worker is there"
    trainers(store, "t")
    assert None not in times(store, "a")
    submit(store, tmp_path, "checking")
    assert times(store, "checking") == (None, None), "nobody knows yet what it needs, nor whether it is in order"
    unknown = submit(store, tmp_path, "unknown", checked(), prepared(9), JobQueued())
    submit(store, tmp_path, "c", hours=1.0)
    in_an_hour = times(store, "a")[1]
    assert times(store, "unknown") == pytest.approx((in_an_hour, None), abs=1.0), "whenever asked"
    assert times(store, "c") == (None, None), "one before it takes nobody knows how long"
    assert store.claim(Stage.TRAIN, "x") == "a"
    before = time.time()
    start, _ = times(store, "unknown")
    assert start is not None and before - 0.002 <= start - 3600 <= time.time(), "claimed, and soon running"
    store.append(unknown, [JobCancelled()])
    assert None not in times(store, "c")


def test_a_job_with_more_than_a_hundred_before_it_has_a_place_but_no_estimate(store: Store, tmp_path: Path) -> None:
    trainers(store, "t")
    for number in range(102):
        submit(store, tmp_path, f"job-{number:03}", hours=0.1)
    assert store.get("job-100").position == 100 and None not in times(store, "job-100")
    assert store.get("job-101").position == 101 and times(store, "job-101") == (None, None)
