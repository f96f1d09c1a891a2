"""One stack for all fault tests that can share it, the job that they disturb, and what it comes to undisturbed."""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
import requests

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir, create
from jobs.events import Event, JobQueued, JobSubmitted
from jobs.metrics import MetricRow
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.spec import parse_spec
from jobs.state import Stage
from jobs.trainer_facts import EvaluationFinished
from tests.support.processes import trainers
from tests.support.samples import checked, facts_of, prepared, read_lines
from tests.support.shared_stack import mended, shared_stack, succeeds
from tests.support.stack import Stack, tiny_job

MakeJob = Callable[..., RunDir]
STEPS = 16
_HOLDS = re.compile(r"^(\S+ \S+) INFO process (\d+) holds the lock of job", re.MULTILINE)


def small_job(**more: Any) -> dict[str, Any]:
    """16 steps, each logged; saved every 4, evaluated every 8."""
    return tiny_job(**{"log": {"every_steps": 1}, "checkpoint": {"every_steps": 4, "keep": 3}, **more})


@dataclass(frozen=True)
class Undisturbed:
    """A run to which nothing happened."""

    run: RunDir
    weights: bytes
    series: list[tuple[int, float, float | None]]
    losses: dict[int, float]

    @classmethod
    def of(cls, run: RunDir) -> Undisturbed:
        return cls(run, (run.model / "model.safetensors").read_bytes(), series(run), losses(run))


def series(run: RunDir) -> list[tuple[int, float, float | None]]:
    """Step, loss and norm of every line of metrics.jsonl."""
    return [(row.step, row.loss, row.grad_norm) for row in read_lines(run.metrics_file, MetricRow)]


def losses(run: RunDir) -> dict[int, float]:
    """Validation loss by step."""
    return {evaluation.step: evaluation.loss for evaluation in facts_of(run, EvaluationFinished)}


@pytest.fixture(scope="package")
def _shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with shared_stack(tmp_path_factory.mktemp("faults")) as stack:
        yield stack


@pytest.fixture
def stack(_shared_stack: Stack) -> Stack:
    """Redis and every role, running, and no job."""
    return mended(_shared_stack)


@pytest.fixture(scope="package")
def _references() -> dict[str, Undisturbed]:
    return {}


@pytest.fixture
def undisturbed(stack: Stack, _references: dict[str, Undisturbed]) -> Undisturbed:
    """What `small_job` comes to when nothing happens to it."""
    if not _references:
        run = stack.submit(small_job())
        succeeds(stack, run)
        _references["small"] = Undisturbed.of(run)
    return _references["small"]


@pytest.fixture
def queued(stack: Stack, undisturbed: Undisturbed) -> MakeJob:
    """`queued(priority=5)`: a new `small_job`, checked and prepared like the undisturbed one, in the order of train."""
    client = connect(stack.redis.url)
    store, tickets = Store(client), Tickets(client)

    def make(**more: object) -> RunDir:
        spec = parse_spec(small_job(integrations={"wandb": None}, **more))
        submitted = JobSubmitted(
            name=spec.name, model=spec.model, spec_sha256=spec.sha256(), priority=spec.priority, wandb=False
        )
        run, _ = create(stack.runs, f"job-{time.time_ns()}", spec, submitted)
        run.write_plan(undisturbed.run.plan())
        store.append(run, [checked(), prepared(STEPS), JobQueued()])
        tickets.add(Stage.TRAIN)
        return run

    return make


def assert_as_if_nothing_had_happened(stack: Stack, run: RunDir, undisturbed: Undisturbed) -> None:
    """The run succeeds with the weights and losses of the undisturbed one; nothing is missing, no number is twice."""
    succeeds(stack, run)
    assert [event.number for event in run.events()] == list(range(1, run.record().number + 1))
    assert series(run) == undisturbed.series and losses(run) == undisturbed.losses
    assert (run.model / "model.safetensors").read_bytes() == undisturbed.weights
    stack.wait_for(lambda: not trainers(run) or None, "the trainer's end")
    assert_lock_never_held_twice(run)


def assert_lock_never_held_twice(run: RunDir) -> None:
    """Every trainer took the lock after the last word of the one before, and each was another process."""
    taken = [
        (datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp(), int(pid))
        for at, pid in _HOLDS.findall(run.trainer_log.read_text())
    ]
    attempts = run.record().attempt
    assert 0 < len(taken) <= attempts and len({pid for _, pid in taken}) == len(taken)
    spans = []
    for attempt in range(1, attempts + 1):
        if lines := run.attempt_lines(attempt):
            rows = [row.at for row in run.metrics() if row.attempt == attempt]
            spans.append((lines[0].at, max([line.at for line in lines] + rows)))
    for (_, last_word), (begin, _) in itertools.pairwise(spans):
        assert last_word <= begin, f"two trainers at once: {spans}"
    begins = [*(begin for begin, _ in spans), math.inf]
    for taken_at, pid in taken:  # a trainer may have been killed before it said more
        inside = [begin for begin, next_one in itertools.pairwise(begins) if begin <= taken_at + 0.001 < next_one]
        assert len(inside) == 1, f"process {pid} took the lock at {taken_at}, attempts were at work in {spans}"


class LiveReader(threading.Thread):
    """`with LiveReader(stack, run) as follower:` reads the job's events live, as one stream, to its end."""

    def __init__(self, stack: Stack, run: RunDir) -> None:
        super().__init__(name=f"follower-{run.id}", daemon=True)
        self._url = f"{stack.url}/jobs/{run.id}/events"
        self.numbers: list[int] = []
        """Of the events, as they came."""

    def __enter__(self) -> LiveReader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(300)

    def run(self) -> None:
        """Until the stream ends."""
        asked = requests.get(self._url, headers={"Accept": "text/event-stream"}, stream=True, timeout=300)
        with asked as answer:
            for line in answer.iter_lines():
                if line.startswith(b"id:"):
                    self.numbers.append(int(line[3:]))


def assert_all_is_told(stack: Stack, run: RunDir, follower: LiveReader) -> None:
    """Redis has every event of a job that is over, and who followed it has heard each once and in order."""
    events, store = run.events(), Store(connect(stack.redis.url))
    stack.wait_for(lambda: store.number(run.id) == len(events) or None, "the projection")
    assert store.events(run.id) == events
    assert store.get(run.id).record == run.record()
    follower.join(300)
    assert follower.numbers == [event.number for event in events]


def runs_again(stack: Stack, run: RunDir, attempt: int) -> None:
    """Wait for the model of that attempt to be loaded."""

    def look() -> Event | None:
        return next((e for e in run.events() if e.type == "model.loaded" and e.attempt == attempt), None)

    stack.wait_for(look, f"attempt {attempt} of {run.id} to run")


def finished(run: RunDir, attempt: int) -> bool:
    """Whether the trainer of that attempt has said its last line."""
    return any(isinstance(line, Finished) for line in run.attempt_lines(attempt))
