"""SIGTERM to every process, twice, too early and too late; and wishes that come just as a job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jobs.attempt import Finished
from jobs.errors import Conflict
from jobs.events import AnyFact, AttemptStarted, JobCancelled, JobChecked, JobPrepared, JobQueued, JobSubmitted
from jobs.queue import Tickets
from jobs.record import JobRecord
from jobs.rundir import RunDir, create
from jobs.spec import parse_spec
from jobs.state import Status
from jobs.store import Store, connect
from service.actions import Actions
from tests.faults.conftest import (
    Undisturbed,
    assert_as_if_nothing_had_happened,
    finished,
    reasons,
    small_job,
)
from tests.processes import freeze, parent_of, saving, stepping, thaw, trainers
from tests.stack import ROOT, Stack
from worker.ending import ending
from worker.training.checkpoint import verify

MakeJob = Callable[..., RunDir]
ROUNDS = 70


def test_a_worker_is_stopped_twice_in_the_middle_of_a_background_save(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # SIGTERM to the train worker, and once more (impatience), while its trainer writes the checkpoint of step 8, with
    # another job waiting. Must hold: the trainer completes that save and makes its last; the worker ends with 0; the
    # job is queued at its old place, before the other; started again, it goes on from where it stopped.
    run, behind = queued(), queued()
    trainer = freeze(stack, run, saving(8))
    worker = stack.processes.pop("train")
    for _ in range(2):
        worker.send_signal(signal.SIGTERM)
    thaw(trainer)
    assert worker.wait(60) == 0
    record = run.record()
    assert (record.status, record.last_reason) == (Status.QUEUED, "interrupted")
    saved = {folder.name: verify(folder).step for folder in run.checkpoints.iterdir()}
    assert "step-00000008" in saved and record.progress_step == max(saved.values()) >= 8
    store = Store(connect(stack.redis.url))
    stack.wait_for(lambda: store.get(run.id).position == 0 or None, "its old place")
    assert store.get(behind.id).position == 1
    stack.start("train")
    for each in (run, behind):
        assert_as_if_nothing_had_happened(stack, each, undisturbed)
    assert reasons(run) == ["interrupted", "done"]
    loaded = [event.fact for event in run.events() if event.type == "model.loaded"]
    assert [fact.resumed_step for fact in loaded] == [None, record.progress_step]


def test_the_trainer_publish_and_the_service_are_stopped(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # SIGTERM to publish and to the service in the middle of a run, then to the trainer alone. Must hold: each ends in
    # good order; the job is queued and goes on by itself; the sinks that were away hear everything.
    run = queued()
    trainer = freeze(stack, run, stepping(5, 14))
    assert stack.stop("publish") == 0
    assert stack.stop("service") in (0, -signal.SIGTERM)  # uvicorn closes everything, then ends by the signal it got
    assert "Application shutdown complete" in (stack.home / "service.log").read_text().splitlines()[-2]
    os.kill(trainer, signal.SIGTERM)
    thaw(trainer)
    stack.start("publish", "service")
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["interrupted", "done"]
    cursor = run.sinks / "log.json"
    stack.wait_for(lambda: '"closed":"job.succeeded"' in cursor.read_text() or None, "the log sink's last event", 20)


@pytest.mark.parametrize("stage", ["check", "prepare"])
def test_a_worker_is_stopped_while_a_job_is_validated(stack: Stack, stage: str) -> None:
    # SIGTERM to the check or prepare worker while its process is at work. Must hold: it ends with 0, the process is
    # gone, the job is still being validated, and goes on as soon as the worker is back.
    run = stack.submit(small_job(name=stage))
    process = freeze(stack, run, lambda run: run.attempt_file(stage).exists() and not ended(run, stage))
    worker = stack.processes.pop(stage)
    assert parent_of(parent_of(process)) == worker.pid
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    assert trainers(run) == []
    record = run.record()
    assert (record.status, record.stage.value) == (Status.VALIDATING, stage)
    stack.start(stage)
    stack.wait_for_event(run, "job.queued")
    assert stack.post(run, "cancel").status_code == 200
    stack.wait_for_event(run, "job.cancelled")


def ended(run: RunDir, stage: str) -> bool:
    """Whether the process of that stage has said its last line."""
    return any(isinstance(line, Finished) for line in run.attempt_lines(stage))


def test_a_second_trainer_started_by_hand_leaves_the_first_alone(
    stack: Stack, undisturbed: Undisturbed, queued: MakeJob
) -> None:
    # `python -m worker.training train RUN_DIR` by hand, while the job runs. Must hold: it ends with 75 and says
    # job_busy; it writes into none of the first one's files; the run is as if nothing had happened.
    run = queued()
    trainer = freeze(stack, run, stepping(5, 15))
    before = run.attempt_file(1).read_bytes()
    by_hand = subprocess.run(
        [sys.executable, "-m", "worker.training", "train", str(run.path)],
        cwd=ROOT, env=stack.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert by_hand.returncode == 75 and "job_busy" in by_hand.stderr
    assert run.attempt_file(1).read_bytes() == before and not finished(run, 1)
    assert trainers(run) == [trainer]
    thaw(trainer)
    assert_as_if_nothing_had_happened(stack, run, undisturbed)
    assert reasons(run) == ["done"]


# -- wishes against ends ---------------------------------------------------------------------------------------------


class Rounds:
    """One job after another, each brought to a state, then treated by two threads at the same instant."""

    def __init__(self, url: str, folder: Path) -> None:
        client = connect(url)
        (folder / "runs").mkdir()
        self.store = Store(client)
        self.actions = Actions(runs=folder / "runs", data=folder, store=self.store, tickets=Tickets(client))
        self._spec = parse_spec({"data": {"train": "rows.jsonl"}})
        self._count = 0

    def job(self, *facts: AnyFact) -> RunDir:
        """A queued job, and what happened to it since."""
        self._count += 1
        first = JobSubmitted(name="n", model="m", spec_sha256="s")
        run, _ = create(self.actions.runs, f"job-{self._count}", self._spec, first)
        self.store.append(run, [JobChecked(plan={}), JobPrepared(data={}, steps=9), JobQueued(), *facts])
        return run

    def at_once(self, *acts: Callable[[], object]) -> list[object]:
        """What each returned, or the Conflict that it met."""
        barrier = threading.Barrier(len(acts))
        results: list[object] = [None] * len(acts)

        def go(index: int) -> None:
            barrier.wait()
            try:
                results[index] = acts[index]()
            except Conflict as conflict:
                results[index] = conflict

        threads = [threading.Thread(target=go, args=(index,)) for index in range(len(acts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def rounds(redis_url: str, tmp_path: Path) -> Rounds:
    return Rounds(redis_url, tmp_path)


STARTED = AttemptStarted(worker="w", device="cpu")


def ends(rounds: Rounds, run: RunDir, end: Finished) -> Callable[[], object]:
    """What a supervisor does when its trainer has ended."""

    def decide(record: JobRecord) -> Sequence[AnyFact]:
        return ending(run, record, 1, end)

    return lambda: rounds.store.append(run, decide, attempt=1)


@pytest.mark.parametrize("wish", ["cancel", "pause"])
def test_a_wish_against_a_completion(rounds: Rounds, wish: str) -> None:
    # Cancel (pause) and the completion of the job, at the same instant. Must hold, in every round: it has succeeded,
    # once; the wish was noted before, or met a Conflict; Redis says the same; no request is left.
    done = Finished(at=1.0, reason="done", step=9, result={"model": "model"})
    seen: Counter[str] = Counter()
    for _ in range(ROUNDS):
        run = rounds.job(STARTED)
        wished, _ = rounds.at_once(lambda run=run: getattr(rounds.actions, wish)(run.id), ends(rounds, run, done))
        types = [event.type for event in run.events()][5:]
        late = isinstance(wished, Conflict)
        assert types == ["attempt.ended", "job.succeeded"] if late else ["job.requested", *types[1:]] == types, types
        assert types[-2:] == ["attempt.ended", "job.succeeded"]
        assert rounds.store.get(run.id).record == run.record()
        assert not run.request_file.exists()
        seen["late" if late else "noted"] += 1
    print(wish, dict(seen))


def test_a_cancel_against_an_interruption(rounds: Rounds) -> None:
    # Cancel while the attempt ends because its worker is stopped. Must hold: it is cancelled, once, whoever came first.
    for _ in range(ROUNDS):
        run = rounds.job(STARTED)
        interrupted = Finished(at=1.0, reason="interrupted", step=3)
        rounds.at_once(lambda run=run: rounds.actions.cancel(run.id), ends(rounds, run, interrupted))
        types = [event.type for event in run.events()][5:]
        assert types in (
            ["job.requested", "attempt.ended", "job.cancelled"],
            ["attempt.ended", "job.queued", "job.cancelled"],
        )
        assert rounds.store.get(run.id).record == run.record()
        assert rounds.store.claim(run.record().stage, run.id) is None, "nobody gets it any more"


def test_a_cancel_against_a_start_and_another_cancel(rounds: Rounds) -> None:
    # Cancel twice while a worker starts the job. Must hold: cancelled before it started (the worker is told), or
    # running with one request; never both, never two of a kind.
    for _ in range(ROUNDS):
        run = rounds.job()
        *_, started = rounds.at_once(
            lambda run=run: rounds.actions.cancel(run.id),
            lambda run=run: rounds.actions.cancel(run.id),
            lambda run=run: rounds.store.append(run, [STARTED]),
        )
        facts = [event.fact for event in run.events()][4:]
        if isinstance(started, Conflict):
            assert [type(fact) for fact in facts] == [JobCancelled]
        else:
            assert [fact.type for fact in facts] == ["attempt.started", "job.requested"]
            assert run.request_file.read_text() == "cancel\n"
        assert rounds.store.get(run.id).record == run.record()
