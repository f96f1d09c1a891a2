"""The turns of a sweep: what becomes of its trials, and that it does not matter where the last turn was cut off."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.disk import removal, rundir
from jobs.disk.rundir import RunDir, list_runs
from jobs.events import AnyFact, AttemptEnded, JobCancelled, JobFailed, JobPaused, JobSucceeded
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import Store
from jobs.state import Status
from jobs.sweeps import directory
from jobs.sweeps.directory import SweepDir
from jobs.sweeps.events import SweepCancelRequested, SweepSubmitted, TrialStarted
from jobs.sweeps.record import RETRY_DELAYS_S, SweepRecord
from jobs.sweeps.space import Settings
from jobs.sweeps.spec import parse_sweep
from jobs.trainer_facts import EvaluationFinished, Fault
from tests.support.samples import DONE, QUEUED, RUNNING, heartbeat
from worker.sweeps import SweepTurns

SPACE = {"training.learning_rate": {"range": [1e-5, 1e-2], "log": True}, "training.batch_size": [4, 8, 16]}
TOGETHER = {"speed.fused": [True, False], "speed.compile": [False, True]}
"""Right one by one; the last two together are wrong."""
OUT_OF_MEMORY = Fault(code="out_of_memory", message="the GPU is full", hint="use a smaller batch")


CANCELLED: list[AnyFact] = [AttemptEnded(reason="interrupted", step=5), JobCancelled()]
SUCCEEDED: list[AnyFact] = [AttemptEnded(reason="done", step=10), JobSucceeded(model="model", step=10, loss=1.0)]
"""How an attempt ends."""


class KilledInTurn(BaseException):
    """As kill -9 would end the process."""


class Publish:
    """Redis, run directories, and who trains: the test itself."""

    def __init__(self, url: str, runs: Path) -> None:
        self.runs = runs
        self.runs.mkdir()
        self.store, self.tickets = Store(connect(url)), Tickets(connect(url))
        self.start()

    def start(self) -> None:
        """Publish starts, or starts again."""
        self.sweeps = SweepTurns(self.runs, self.store, self.tickets)

    def submit(self, name: str = "sweep-1", **more: Any) -> SweepDir:
        given: dict[str, Any] = {"job": {"data": {"train": "rows.jsonl"}}, "space": SPACE, "parallel": 2, **more}
        spec = parse_sweep(given)
        submitted = SweepSubmitted(name=spec.name, spec_sha256=spec.sha256(), version="1")
        return directory.create(self.runs, name, spec, submitted)

    def append(self, job: str, *facts: AnyFact) -> None:
        self.store.append(RunDir(self.runs / job), list(facts))

    def train(self, outcome: Callable[[Settings], list[AnyFact]]) -> None:
        """What the workers do with each job that waits for them."""
        for run in list_runs(self.runs):
            if run.record().status is Status.VALIDATING:
                self.append(run.id, *outcome(settings_of(run)))

    def until_ended(self, sweep: SweepDir, outcome: Callable[[Settings], list[AnyFact]]) -> SweepRecord:
        for _ in range(200):
            self.sweeps.turn()
            if (record := sweep.record()).ended is not None:
                return record
            self.train(outcome)
        raise AssertionError("it does not end")


def settings_of(run: RunDir) -> Settings:
    training = run.spec().training
    names = ("learning_rate", "batch_size", "seed")
    return {f"training.{name}": getattr(training, name) for name in names}


def learnt(settings: Settings) -> list[AnyFact]:
    """Better with a higher learning rate."""
    rate = settings["training.learning_rate"]
    assert isinstance(rate, float)
    return [*DONE, JobSucceeded(model="model", step=10, loss=1.0 - rate)]


def out_of_memory(settings: Settings) -> list[AnyFact]:
    return [*RUNNING, JobFailed(error=OUT_OF_MEMORY)]


@pytest.fixture
def house(redis_url: str, tmp_path: Path) -> Publish:
    return Publish(redis_url, tmp_path / "runs")


def test_trials_are_jobs_and_the_best_is_told(house: Publish) -> None:
    sweep = house.submit(max_trials=6)
    record = house.until_ended(sweep, learnt)
    jobs = [job for trial in record.trials for job in trial.jobs]
    assert (len(jobs), record.status, record.counts) == (6, "succeeded", {"succeeded": 6})
    assert sorted(jobs) == [run.id for run in list_runs(house.runs)]
    assert {RunDir(house.runs / job).record().sweep for job in jobs} == {sweep.id}
    assert record.ended is not None
    rates = [float(str(trial.settings["training.learning_rate"])) for trial in record.trials]
    assert record.ended.best == rates.index(max(rates))
    assert [run.record().name for run in list_runs(house.runs)] == [f"sweep {number}" for number in range(6)]


def test_unless_asked_two_more_are_open_than_train_and_one_more_than_could(house: Publish) -> None:
    for slot in range(3):
        house.store.workers.report(heartbeat(f"train-{slot}", device="cpu", slot=slot))
        house.store.workers.report(heartbeat(f"train-{slot + 3}", device="cpu", engine="cluster"))  # trains no trial
    sweep = house.submit(max_trials=9, parallel=None)
    for training, opened in ((0, 2), (1, 3), (2, 4), (3, 4)):
        for trial in sweep.record().trials[:training]:
            if RunDir(house.runs / trial.jobs[0]).record().status is Status.VALIDATING:
                house.append(trial.jobs[0], *RUNNING)
        house.sweeps.turn()
        assert len(sweep.record().trials) == opened


def test_as_many_are_open_as_asked(house: Publish) -> None:
    sweep = house.submit(max_trials=6, parallel=3)
    for _ in range(3):
        house.sweeps.turn()
    assert len(sweep.record().open) == 3
    house.append(sweep.record().trials[1].jobs[0], *learnt({"training.learning_rate": 0.5}))
    house.sweeps.turn()
    assert [trial.number for trial in sweep.record().open] == [0, 2, 3]
    house.append(sweep.record().trials[0].jobs[0], *QUEUED, JobPaused())
    house.sweeps.turn()
    assert [trial.number for trial in sweep.record().open] == [0, 2, 3, 4], "a paused one keeps no place"


def writes(monkeypatch: pytest.MonkeyPatch, kill_at: int | None) -> Iterator[int]:
    """Count what a turn writes; kill it before or after the write of this number, in turns."""
    count = [0]

    def wrapped(write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            count[0] += 1
            if kill_at is not None and count[0] == kill_at and kill_at % 2:
                raise KilledInTurn
            done = write(*args, **more)
            if kill_at is not None and count[0] == kill_at:
                raise KilledInTurn
            return done

        return counted

    monkeypatch.setattr(SweepDir, "append", wrapped(SweepDir.append))
    monkeypatch.setattr(rundir, "create", wrapped(rundir.create))
    yield 0
    yield count[0]


def with_weights(house: Publish) -> Callable[[Settings], list[AnyFact]]:
    """Jobs learn, and leave a model and a checkpoint."""

    def outcome(settings: Settings) -> list[AnyFact]:
        for run in list_runs(house.runs):
            if run.record().status is Status.VALIDATING:
                run.model.mkdir(exist_ok=True)
                (run.checkpoints / "step-00000010").mkdir(parents=True, exist_ok=True)
        return learnt(settings)

    return outcome


def weights(house: Publish) -> set[str]:
    """Jobs that have a model and checkpoints."""
    runs = list_runs(house.runs)
    assert all(run.model.exists() == run.checkpoints.exists() for run in runs)
    return {run.id for run in runs if run.model.exists()}


@pytest.mark.parametrize("keep_models", ["best", "all"])
def test_models_of_trials_that_are_not_the_best_are_removed(house: Publish, keep_models: str) -> None:
    sweep = house.submit(max_trials=6, sampler="random", seed=2, seeds=2, keep_models=keep_models)
    record = house.until_ended(sweep, with_weights(house))
    house.sweeps.turn()
    assert record.ended is not None and record.ended.best is not None
    kept = [record.trials[record.ended.best]] if keep_models == "best" else record.trials
    assert weights(house) == {job for trial in kept for job in trial.jobs}
    assert record.ended.best != 0, "the best so far was another one, too"
    assert weights(house) == {run.id for run in list_runs(house.runs) if run.record().result_model is not None}


def test_after_the_best_was_deleted_the_best_of_those_that_follow_keeps_its_model(house: Publish) -> None:
    sweep = house.submit(max_trials=4, sampler="random", seed=2, parallel=1)
    leave = with_weights(house)
    for _ in range(8):
        house.sweeps.turn()
        if (best := sweep.record().best(higher_is_better=False)) is not None:
            break
        for trial in sweep.record().open:
            house.append(trial.jobs[0], *leave(trial.settings))
    assert best is not None
    removal.remove(house.runs / best.jobs[0])  # as `longhaul delete` does
    record = house.until_ended(sweep, leave)
    house.sweeps.turn()
    others = [trial for trial in record.trials if trial.number != best.number]
    kept = min(others, key=lambda trial: (trial.value or 0.0, trial.number))
    assert weights(house) == {*kept.jobs}


@pytest.mark.parametrize("where", ["rename", "remove"])
def test_killed_while_models_are_removed_the_best_so_far_is_there(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for kill_at in range(1, 9):
        house = Publish(redis_url, tmp_path / f"killed-{kill_at}")
        sweep, left = house.submit(max_trials=5, sampler="random", parallel=1), [kill_at]
        name = "jobs.disk.removal." + ("os.rename" if where == "rename" else "shutil.rmtree")
        done: Callable[..., None] = os.rename if where == "rename" else shutil.rmtree

        def killed(*args: Any, left: list[int] = left, done: Callable[..., None] = done, **more: Any) -> None:
            if removal.PREFIX in str(args[-1]):  # and no other file
                left[0] -= 1
                if not left[0]:
                    raise KilledInTurn
            done(*args, **more)

        with monkeypatch.context() as patched:
            patched.setattr(name, killed)
            with pytest.raises(KilledInTurn):
                house.until_ended(sweep, with_weights(house))
        best = sweep.record().best(higher_is_better=False)
        assert best is not None and weights_of(house, best.jobs[0]), kill_at
        house.start()
        record = house.until_ended(sweep, with_weights(house))
        house.sweeps.turn()
        assert record.ended is not None and record.ended.best is not None
        assert weights(house) == {*record.trials[record.ended.best].jobs}, kill_at
        told = [sum(event.type == "job.model_removed" for event in run.events()) for run in list_runs(house.runs)]
        assert sorted(told) == [0, 1, 1, 1, 1], kill_at
        removal.sweep(house.runs)
        assert {entry.name for entry in house.runs.iterdir()} == {".sweeps", *(run.id for run in list_runs(house.runs))}


def weights_of(house: Publish, job: str) -> bool:
    run = RunDir(house.runs / job)
    return run.model.exists() and run.checkpoints.exists()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_killed_at_every_write_it_does_what_an_undisturbed_one_does(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    asked: dict[str, Any] = {"max_trials": 4, "sampler": sampler, "seeds": 2}
    twin = Publish(redis_url, tmp_path / "twin")
    with monkeypatch.context() as patched:
        counting = writes(patched, None)
        next(counting)
        undisturbed = twin.until_ended(twin.submit(**asked), learnt)
        total = next(counting)
    assert total >= 4 * 4
    for kill_at in range(1, total + 1):
        house = Publish(redis_url, tmp_path / f"killed-{kill_at}")
        sweep = house.submit(**asked)
        with monkeypatch.context() as patched:
            next(writes(patched, kill_at))
            with pytest.raises(KilledInTurn):
                house.until_ended(sweep, learnt)
        house.start()
        record = house.until_ended(sweep, learnt)
        assert [trial.settings for trial in record.trials] == [trial.settings for trial in undisturbed.trials], kill_at
        assert [trial.values for trial in record.trials] == [trial.values for trial in undisturbed.trials], kill_at
        assert record.ended is not None and undisturbed.ended is not None
        assert record.ended.best == undisturbed.ended.best
        jobs = [job for trial in record.trials for job in trial.jobs]
        assert sorted(jobs) == [run.id for run in list_runs(house.runs)], "none lost, none made twice"


def test_without_redis_it_goes_on_when_redis_is_back(house: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = house.submit(max_trials=2, parallel=1)
    away = SweepTurns(house.runs, Store(connect("redis://127.0.0.1:1/0")), Tickets(connect("redis://127.0.0.1:1/0")))
    away.turn()
    assert len(list_runs(house.runs)) == 1, "a trial's directory is made, and reconcile tells Redis"
    assert house.until_ended(sweep, learnt).counts == {"succeeded": 2}


def test_a_failing_corner_fails_and_the_rest_goes_on(house: Publish) -> None:
    sweep = house.submit(max_trials=12, seed=2, sampler="random")
    record = house.until_ended(
        sweep, lambda settings: (out_of_memory if settings["training.batch_size"] == 16 else learnt)(settings)
    )
    assert record.status == "succeeded" and record.counts.keys() == {"failed", "succeeded"}
    for trial in record.trials:
        assert (trial.outcome == "failed") == (trial.settings["training.batch_size"] == 16)
        assert trial.error == (OUT_OF_MEMORY if trial.outcome == "failed" else None)


def test_too_many_failures_with_one_cause_end_it_with_the_cause(house: Publish) -> None:
    sweep = house.submit(max_trials=1000, max_failures=4)
    record = house.until_ended(sweep, out_of_memory)
    assert record.status == "failed" and record.ended is not None
    assert (record.ended.reason, record.ended.error) == ("failures", OUT_OF_MEMORY)
    assert len(record.trials) <= 5, "the fourth, and one that was open beside it"


def test_too_many_failures_are_too_many_whatever_succeeds_later(house: Publish) -> None:
    sweep = house.submit(max_trials=9, max_failures=3, parallel=4)
    house.sweeps.turn()
    *failing, last = [trial.jobs[0] for trial in sweep.record().trials]
    for job in failing:
        house.append(job, *RUNNING, JobFailed(error=OUT_OF_MEMORY))
    house.sweeps.turn()
    house.append(last, *learnt(settings_of(RunDir(house.runs / last))))
    record = house.until_ended(sweep, learnt)
    assert (len(record.trials), record.ended and record.ended.reason) == (4, "failures")


def test_a_failed_job_ends_the_other_seeds_of_its_trial(house: Publish) -> None:
    sweep = house.submit(max_trials=1, seeds=3)
    house.sweeps.turn()
    first, *others = sweep.record().trials[0].jobs
    house.append(first, *RUNNING, JobFailed(error=OUT_OF_MEMORY))
    record = house.until_ended(sweep, lambda _: [])
    assert record.trials[0].error == OUT_OF_MEMORY
    assert [RunDir(house.runs / job).record().status.value for job in others] == ["cancelled", "cancelled"]


def test_a_trial_that_paused_itself_keeps_others_from_doing_the_same(
    house: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    full = Fault(code="disk_full", message="no room is left", hint="make room")
    sweep = house.submit(max_trials=9)
    house.sweeps.turn()
    jobs = [trial.jobs[0] for trial in sweep.record().trials]
    for job in jobs:
        house.append(job, *RUNNING, AttemptEnded(reason="disk_full", step=5), JobPaused(error=full))
    with caplog.at_level(logging.ERROR, logger="longhaul.sweeps"):
        for _ in range(5):
            house.sweeps.turn()
    assert len(sweep.record().trials) == 2
    assert len([message for message in caplog.messages if "no room is left" in message]) == 1, "not every second"


@pytest.mark.parametrize("code", ["no_room", "disk_full", "hub_unreachable"])
def test_a_cause_outside_of_the_settings_is_waited_for(
    house: Publish, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    now = [time.time()]
    monkeypatch.setattr("worker.sweeps.time.time", lambda: now[0])
    sweep = house.submit(max_trials=6, seeds=2, parallel=2, max_failures=2)
    fault = Fault(code=code, message="no room is left", hint="make room")
    for times in (1, 2, 3):
        house.sweeps.turn()
        for first, *_ in (trial.jobs for trial in sweep.record().trials):
            house.append(first, JobFailed(error=fault))
        with caplog.at_level(logging.ERROR, logger="longhaul.sweeps"):
            for _ in range(3):
                house.sweeps.turn()
        record = sweep.record()
        assert (len(record.open), len(record.trials), record.ended) == (2, 2, None)
        assert len(list_runs(house.runs)) == 4 * times, "not at once"
        now[0] += 3700.0
        house.sweeps.turn()
        assert {trial.retries for trial in sweep.record().trials} == {times}
    assert "starts no trial now: no room is left; make room; it is tried again by itself" in caplog.text
    settings = [trial.settings for trial in sweep.record().trials]
    house.start()  # killed before the jobs were made
    record = house.until_ended(sweep, learnt)
    assert record.counts == {"succeeded": 6} and [trial.settings for trial in record.trials][:2] == settings
    jobs = [job for trial in record.trials for job in (*trial.jobs, *trial.replaced)]
    assert sorted(jobs) == [run.id for run in list_runs(house.runs)], "none lost, none made twice"


def test_who_waits_for_a_cause_can_cancel_and_does_not_wait_for_ever(
    house: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.time()]
    monkeypatch.setattr("worker.sweeps.time.time", lambda: now[0])
    fault = Fault(code="no_room", message="no room is left")
    patient, cancelled = (house.submit(f"sweep-{number}", max_trials=1) for number in (1, 2))
    retries: list[int] = []
    house.sweeps.turn()
    house.append(cancelled.record().trials[0].jobs[0], JobFailed(error=fault))
    house.sweeps.turn()
    assert cancelled.record().ended is None
    cancelled.append([SweepCancelRequested()])
    assert house.until_ended(cancelled, lambda _: []).status == "cancelled"
    while patient.record().ended is None and len(retries) < 99:
        house.train(lambda _: [JobFailed(error=fault)])
        now[0] += 3700.0
        house.sweeps.turn()
        retries.append(patient.record().trials[0].retries)
        house.sweeps.turn()
    [trial] = patient.record().trials
    assert (trial.outcome, trial.error) == ("failed", fault)
    assert retries == [*range(1, len(RETRY_DELAYS_S) + 1), len(RETRY_DELAYS_S)]


def test_a_damaged_trial_has_failed_and_the_rest_goes_on(house: Publish) -> None:
    sweep = house.submit(max_trials=6, seeds=2)
    house.sweeps.turn()
    broken, sibling = sweep.record().trials[0].jobs
    events = RunDir(house.runs / broken).events_file
    events.write_bytes(events.read_bytes().replace(b"job.submitted", b"job.submittee"))
    house.sweeps.turn()
    assert RunDir(house.runs / sibling).record().status is Status.CANCELLED
    shutil.move(house.runs / broken, house.runs.parent / "elsewhere")  # out of the way of `train`
    record = house.until_ended(sweep, learnt)
    error = record.trials[0].error
    assert error is not None and error.code == "damaged" and "events.jsonl" in error.message
    assert record.counts == {"failed": 1, "succeeded": 5}


def test_failures_with_other_causes_do_not_count_together(house: Publish) -> None:
    causes = iter(f"cause_{number % 2}" for number in range(100))
    sweep = house.submit(max_trials=8, max_failures=2, parallel=1)
    record = house.until_ended(
        sweep, lambda _: [*RUNNING, JobFailed(error=Fault(code=next(causes), message="m", hint=None))]
    )
    assert record.counts == {"failed": 8} and record.ended is not None and record.ended.reason == "done"


def test_settings_that_make_no_job_are_a_failed_trial(house: Publish) -> None:
    space = {"training.max_steps": [5, 10], **TOGETHER}
    sweep = house.submit(space=space, sampler="grid", parallel=1)
    record = house.until_ended(sweep, lambda _: [*DONE, JobSucceeded(model="model", step=10, loss=1.0)])
    failed = [trial for trial in record.trials if trial.outcome == "failed"]
    assert len(failed) == 2 and record.status == "succeeded"
    assert all(trial.error and "needs `fused: true`" in trial.error.message and not trial.jobs for trial in failed)


def test_a_trial_without_a_job_that_was_left_open_is_ended(house: Publish) -> None:
    sweep = house.submit(space=TOGETHER, sampler="grid")
    wrong: Settings = {"speed.fused": False, "speed.compile": True}
    sweep.append([TrialStarted(trial=0, settings=wrong, jobs=[])])
    house.sweeps.turn()
    assert sweep.record().trials[0].outcome == "failed"


def test_a_cancelled_sweep_cancels_its_trials(house: Publish) -> None:
    sweep = house.submit(max_trials=9)
    house.sweeps.turn()
    house.append(sweep.record().trials[0].jobs[0], *RUNNING)
    sweep.append([SweepCancelRequested()])
    house.sweeps.turn()
    running, waiting = (RunDir(house.runs / trial.jobs[0]).record() for trial in sweep.record().trials)
    assert (running.requested.value, waiting.status.value) == ("cancel", "cancelled")
    house.append(running.id, *CANCELLED)
    record = house.until_ended(sweep, learnt)
    assert record.status == "cancelled" and len(record.trials) == 2


def test_hours_end_it(house: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = house.submit(max_trials=9, max_hours=1.0)
    house.sweeps.turn()
    house.train(learnt)
    house.sweeps.turn()
    began = sweep.record().trials[0].started_at
    monkeypatch.setattr("worker.sweeps.time.time", lambda: began + 3601.0)
    house.sweeps.turn()
    house.sweeps.turn()
    record = sweep.record()
    assert record.ended is not None and record.ended.reason == "max_hours"
    assert record.counts == {"succeeded": 2, "cancelled": 2} and record.status == "succeeded"


def test_importances_are_estimated_after_every_ten_that_succeeded(house: Publish) -> None:
    sweep = house.submit(max_trials=25, sampler="random", parallel=1)
    seen = dict[int, dict[str, float]]()

    def outcome(settings: Settings) -> list[AnyFact]:
        record = sweep.record()
        seen[record.estimated] = record.importances
        return learnt(settings)

    record = house.until_ended(sweep, outcome)
    assert seen.keys() == {0, 10, 20} and seen[0] == {}
    assert all(max(found, key=found.__getitem__) == "training.learning_rate" for found in (seen[10], seen[20]))
    assert record.ended is not None and record.importances == record.ended.importances != seen[20]


def evaluated(step: int, loss: float) -> EvaluationFinished:
    return EvaluationFinished(step=step, loss=loss, rows=9, seconds=0.1, best=False)


def test_a_worse_trial_is_pruned_and_cancelled(house: Publish) -> None:
    sweep = house.submit(max_trials=8, pruning="median", parallel=8)
    house.sweeps.turn()
    jobs = [trial.jobs[0] for trial in sweep.record().trials]
    for number, job in enumerate(jobs):
        house.append(job, *RUNNING, evaluated(0, 9.0), evaluated(5, 1.0 + number / 10))
    house.sweeps.turn()
    pruned = [trial.number for trial in sweep.record().trials if trial.pruned is not None]
    assert pruned == [4, 5, 6, 7], "the loss before training is nobody's evaluation"
    house.sweeps.turn()
    assert [
        number for number, job in enumerate(jobs) if RunDir(house.runs / job).record().requested.value == "cancel"
    ] == pruned
    for number, job in enumerate(jobs):
        house.append(job, *(CANCELLED if number in pruned else SUCCEEDED))
    record = house.until_ended(sweep, learnt)
    assert record.counts == {"succeeded": 4, "pruned": 4}
    assert record.trials[5].pruned is not None and record.trials[5].pruned.value == 1.5
    assert record.trials[5].value is None


def test_a_trial_of_several_seeds_is_their_mean(house: Publish) -> None:
    sweep = house.submit(max_trials=1, seeds=3)
    losses = {42: 1.0, 43: 2.0, 44: 6.0}
    record = house.until_ended(
        sweep,
        lambda found: [*DONE, JobSucceeded(model="model", step=10, loss=losses[int(str(found["training.seed"]))])],
    )
    assert (record.trials[0].value, record.trials[0].values) == (3.0, (1.0, 2.0, 6.0))
    assert sorted(RunDir(house.runs / job).spec().training.seed for job in record.trials[0].jobs) == [42, 43, 44]


def test_a_trial_without_the_metric_has_failed(house: Publish) -> None:
    sweep = house.submit(max_trials=1)
    record = house.until_ended(sweep, lambda _: [*DONE, JobSucceeded(model="model", step=10, loss=None)])
    assert record.trials[0].error is not None and record.trials[0].error.code == "no_metric"


def test_a_damaged_sweep_keeps_no_other_from_its_turn(house: Publish, caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = house.submit("sweep-1"), house.submit("sweep-2", max_trials=1)
    broken.events_file.write_bytes(b"{}\n")
    with caplog.at_level(logging.ERROR, logger="longhaul.sweeps"):
        assert house.until_ended(whole, learnt).counts == {"succeeded": 1}
    assert [message for message in caplog.messages if "sweep-1" in message], "it is told"
    assert len([message for message in caplog.messages if "sweep-1" in message]) == 1, "and not every second"


def test_a_trial_whose_directory_is_gone_is_made_again_under_its_id(house: Publish) -> None:
    sweep = house.submit(max_trials=1)
    house.sweeps.turn()
    job = sweep.record().trials[0].jobs[0]
    shutil.rmtree(house.runs / job)
    house.sweeps.turn()
    assert [run.id for run in list_runs(house.runs)] == [job]
    assert house.until_ended(sweep, learnt).counts == {"succeeded": 1}
