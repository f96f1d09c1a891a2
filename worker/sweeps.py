"""Sweeps: one turn a second for each that is open. A thread of publish (ADR 14).

What a turn does follows from the events of the sweep and from the run directories of its trials alone, so it does not
matter where the last one was cut off.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import redis

from jobs.disk.removal import remove_weights
from jobs.disk.rundir import RunDir
from jobs.errors import Conflict, Damaged, NotFound, StoreUnavailable, UserError
from jobs.evaluation_metrics import cost_of
from jobs.events import AnyFact, ModelRemoved
from jobs.record import JobRecord, cancellation
from jobs.redis.connection import Tickets
from jobs.redis.store import Store, make_id, make_job, submitted_of
from jobs.state import Requested, Stage, Status
from jobs.sweeps.directory import SweepDir, list_sweeps
from jobs.sweeps.events import (
    Ending,
    ImportancesEstimated,
    SweepEnded,
    SweepFact,
    TrialEnded,
    TrialPruned,
    TrialRetried,
    TrialStarted,
)
from jobs.sweeps.record import SweepRecord, TrialRecord, rest, retry
from jobs.sweeps.space import Settings
from jobs.sweeps.spec import SweepSpec
from jobs.trainer_facts import EvaluationFinished, Fault
from worker.suggestions import importances, suggest

# -- pruning -----------------------------------------------------------------------------------------------------------
# Which trials of a sweep are stopped early: by the evaluations that their jobs have written.

MEDIAN_FROM = 5
"""Trials that must have come as far before one is compared with their median."""
REDUCTION = 3
"""Of successive halving: one in so many continues; the levels are the 1st, 3rd, 9th … evaluation."""


class StepCost(NamedTuple):
    """Of one trial: the mean over its jobs."""

    step: int
    cost: float
    """Lower is better."""


class Pruned(NamedTuple):
    """A trial that is stopped."""

    step: int
    cost: float
    why: str


def prune(spec: SweepSpec, trial: int, evaluations: Mapping[int, Sequence[StepCost]]) -> Pruned | None:
    """Whether this trial is stopped, by the evaluations after step 0 of all trials, in order. None: it continues."""
    own = evaluations.get(trial, ())
    others = [found for number, found in evaluations.items() if number != trial]
    if spec.pruning == "median":
        return _worse_than_median(own, others)
    return _below_level(own, others) if spec.pruning == "asha" else None


def _worse_than_median(own: Sequence[StepCost], others: Sequence[Sequence[StepCost]]) -> Pruned | None:
    if not own:
        return None
    last = own[-1]
    reached = [found[len(own) - 1].cost for found in others if len(found) >= len(own)]
    if len(reached) < MEDIAN_FROM:
        return None
    best, median = min(each.cost for each in own), statistics.median(reached)
    if best <= median:
        return None
    return Pruned(last.step, last.cost, f"worse than the median of {len(reached)} others at evaluation {len(own)}")


def _below_level(own: Sequence[StepCost], others: Sequence[Sequence[StepCost]]) -> Pruned | None:
    level = 1
    while level * REDUCTION <= len(own):
        level *= REDUCTION
    if len(own) < level:
        return None
    at = own[level - 1]
    reached = sorted([found[level - 1].cost for found in others if len(found) >= level] + [at.cost])
    if len(reached) < REDUCTION or at.cost <= reached[len(reached) // REDUCTION - 1]:
        return None
    share = f"the best {len(reached) // REDUCTION} of {len(reached)}"
    return Pruned(at.step, at.cost, f"not among {share} at evaluation {level}")


# -- sweeps ------------------------------------------------------------------------------------------------------------

log = logging.getLogger("longhaul.sweeps")
EVERY_S = 1.0
ESTIMATED_EVERY = 10
"""Trials that succeed between two estimates of the importance of parameters."""


class SweepTurns:
    """Call `turn`, or `run` in a thread. One at a time for a runs directory."""

    def __init__(self, runs: Path, store: Store, tickets: Tickets) -> None:
        self._runs = runs
        self._store = store
        self._tickets = tickets
        self._ended: set[str] = set()
        self._said: dict[str, str] = {}
        self._evaluated: dict[tuple[str, int], list[StepCost]] = {}
        """Of trials that have ended."""
        self._removed: set[tuple[str, int]] = set()
        """Trials whose weights are gone."""

    def run(self, stop: threading.Event) -> None:
        """A turn a second until asked to stop."""
        while not stop.is_set():
            self.turn()
            stop.wait(EVERY_S)

    def turn(self) -> None:
        """Of each open sweep: one that cannot have its turn keeps no other from it."""
        try:
            sweeps = [sweep for sweep in list_sweeps(self._runs) if sweep.id not in self._ended]
        except OSError as error:
            self._say("", f"the sweeps cannot be listed: {error}")
            return
        for sweep in sweeps:
            try:
                self._turn(sweep)
                self._said.pop(sweep.id, None)
            except (Damaged, NotFound, OSError, StoreUnavailable, redis.RedisError) as error:
                self._say(sweep.id, f"sweep {sweep.id} waits: {error}")
            except Exception:  # whatever it is, it must not end the thread; the log has it
                log.exception("sweep %s: its turn failed, and is tried again", sweep.id)

    def _say(self, sweep: str, message: str) -> None:
        """Once, not every second."""
        if self._said.get(sweep) != message:
            log.error("%s", message)
            self._said[sweep] = message

    def _turn(self, sweep: SweepDir) -> None:
        spec, record = sweep.spec(), sweep.record()
        if record.ended is not None:
            if not self._remove_losers(sweep.id, spec, record):
                return
            self._ended.add(sweep.id)
            self._removed = {key for key in self._removed if key[0] != sweep.id}
            self._evaluated = {key: found for key, found in self._evaluated.items() if key[0] != sweep.id}
            return
        stopped = record.cancel_requested or out_of_time(spec, record)
        busy, training, stuck = 0, 0, list[str]()
        evaluations = self._all_evaluations(sweep.id, spec, record)
        for trial in record.open:
            if not trial.jobs:
                record = self._append(sweep, [refused(spec, trial)])
                continue
            try:
                jobs = [self._job(sweep.id, spec, trial, seed) for seed in range(len(trial.jobs))]
            except Damaged as error:
                self._cancel(self._readable(trial))
                record = self._append(sweep, [damaged(trial, error)])
                continue
            busy += any(job.status is not Status.PAUSED for job in jobs)
            training += any(job.status is Status.RUNNING for job in jobs)
            if (found_rest := rest(trial, jobs)) is not None and found_rest.holds:
                stuck.append(found_rest.why)
            if trial.pruned is not None or stopped or any(job.status is Status.FAILED for job in jobs):
                self._cancel(jobs)
            if all(job.status.terminal for job in jobs):
                retries = not stopped and record.failures(spec.max_failures) is None
                if retries and (again := retry(trial, jobs)) is not None:
                    if time.time() >= again.at:  # the next turn makes the jobs
                        ids = [job.id if job.status is Status.SUCCEEDED else make_id() for job in jobs]
                        retried = TrialRetried(trial=trial.number, jobs=ids, error=again.error)
                        record = self._append(sweep, [retried])
                    continue
                record = self._append(sweep, [ended(spec, trial, jobs)])
                busy -= 1
            elif trial.pruned is None and (found := prune(spec, trial.number, evaluations)) is not None:
                value = spec.by.cost(found.cost)  # its own inverse
                pruned = TrialPruned(trial=trial.number, step=found.step, value=value, message=found.why)
                record = self._append(sweep, [pruned])
        self._remove_losers(sweep.id, spec, record)
        succeeded = record.counts.get("succeeded", 0)
        if succeeded >= record.estimated + ESTIMATED_EVERY:
            estimated = ImportancesEstimated(trials=succeeded, importances=importances(spec, record))
            record = self._append(sweep, [estimated])
        over = why_over(spec, record)
        if over is not None:
            if not record.open:
                self._append(sweep, [end(spec, record, over)])
            return
        # However many slots there are: trials that only wait for one would be suggested knowing less.
        most = spec.parallel or min(self._train_workers(), training + 1) + 1
        if stuck:
            self._say(f"paused {sweep.id}", f"sweep {sweep.id} starts no trial now: {stuck[0]}")
        else:
            self._said.pop(f"paused {sweep.id}", None)
        while busy < most and not stuck and why_over(spec, record) is None:
            record = self._start(sweep, spec, record)
            busy += 1

    def _append(self, sweep: SweepDir, facts: Sequence[SweepFact]) -> SweepRecord:
        record = sweep.append(facts)
        for fact in facts:
            log.info("sweep %s: %s", sweep.id, fact.model_dump_json(exclude_none=True))
        return record

    def _train_workers(self) -> int:
        ours = (each for each in self._store.workers.all() if each.stage == Stage.TRAIN and each.engine is None)
        return max(1, sum(1 for _ in ours))

    def _start(self, sweep: SweepDir, spec: SweepSpec, record: SweepRecord) -> SweepRecord:
        """The next trial: its settings are on disk before its jobs are."""
        settings = suggest(spec, record)
        number = len(record.trials)
        assert settings is not None, "a grid with nothing left is over"
        # Values that are right one by one and wrong together make no job; the next turn says why.
        jobs = [make_id() for _ in range(spec.seeds)] if why_refused(spec, settings) is None else []
        record = self._append(sweep, [TrialStarted(trial=number, settings=settings, jobs=jobs)])
        for seed in range(len(jobs)):
            self._job(sweep.id, spec, record.trials[number], seed)
        return record

    def _job(self, sweep: str, spec: SweepSpec, trial: TrialRecord, seed: int) -> JobRecord:
        """How a job of a trial stands; it is made where it is not there yet."""
        job = trial.jobs[seed]
        with suppress(NotFound):
            return RunDir(self._runs / job).record()
        made = spec.trial(trial.settings, trial.number, seed)
        return make_job(self._runs, self._store, self._tickets, job, made, submitted_of(made, sweep=sweep))[1]

    def _readable(self, trial: TrialRecord) -> list[JobRecord]:
        """Jobs of a trial, without those whose directory is damaged or gone."""
        found = []
        for job in trial.jobs:
            with suppress(Damaged, NotFound):
                found.append(RunDir(self._runs / job).record())
        return found

    def _cancel(self, jobs: Sequence[JobRecord]) -> None:
        for record in jobs:
            if not record.status.terminal and record.requested is not Requested.CANCEL:
                with suppress(Conflict, NotFound):  # it has ended meanwhile
                    self._store.append(RunDir(self._runs / record.id), cancellation)

    def _remove_losers(self, sweep: str, spec: SweepSpec, record: SweepRecord) -> bool:
        """Remove the weights of trials that have ended and are not the best so far, whose end is on disk.

        The best is one that still has a model: after that of the best was deleted, the next good one is kept. False: of
        some the trainer is still ending.
        """

        def there(trial: TrialRecord) -> bool:
            return any(RunDir(self._runs / job).has_model() for job in trial.jobs)

        all_removed, best = True, record.best(higher_is_better=spec.by.higher_is_better, among=there)
        for number in record.finished if spec.keep_models == "best" else []:
            if (best is not None and number == best.number) or (sweep, number) in self._removed:
                continue
            runs = [RunDir(self._runs / job) for job in record.trials[number].jobs]
            if any(run.held() for run in runs):
                all_removed = False
                continue
            for run in runs:
                if run.model.exists() or run.checkpoints.exists():
                    with suppress(Damaged):  # whoever repairs it finds them
                        self._store.append(run, _removal)
                        remove_weights(run)
            self._removed.add((sweep, number))
        return all_removed

    def _all_evaluations(self, sweep: str, spec: SweepSpec, record: SweepRecord) -> dict[int, list[StepCost]]:
        """Of each trial by its number; empty where nothing is pruned."""
        if spec.pruning == "none":
            return {}
        return {each.number: self._evaluations(sweep, spec, each) for each in record.trials}

    def _evaluations(self, sweep: str, spec: SweepSpec, trial: TrialRecord) -> list[StepCost]:
        """Those after step 0 that all jobs of the trial have, in order."""
        if (kept := self._evaluated.get((sweep, trial.number))) is not None:
            return kept
        by_job = []
        for job in trial.jobs:
            with suppress(Damaged, NotFound):
                events = RunDir(self._runs / job).events()
                facts = [event.fact for event in events if isinstance(event.fact, EvaluationFinished)]
                costs = [(fact.step, cost_of(spec.by.value, fact.loss, fact.metrics)) for fact in facts]
                by_job.append({step: cost for step, cost in costs if step and cost is not None})
        steps = sorted(set.intersection(*map(set, by_job))) if by_job else []
        mean = [StepCost(step, sum(found[step] for found in by_job) / len(by_job)) for step in steps]
        if trial.outcome is not None:
            self._evaluated[sweep, trial.number] = mean
        return mean


def _removal(record: JobRecord) -> list[AnyFact]:
    """What is told of weights before they are removed: once, should that be cut short."""
    return [ModelRemoved()] if record.result_model is not None or record.checkpoint is not None else []


def why_over(spec: SweepSpec, record: SweepRecord) -> Ending | None:
    """Why no trial is started any more; None: the next one may."""
    if record.cancel_requested:
        return "cancelled"
    if record.failures(spec.max_failures) is not None:
        return "failures"
    if out_of_time(spec, record):
        return "max_hours"
    return "done" if len(record.trials) >= spec.most_trials else None


def out_of_time(spec: SweepSpec, record: SweepRecord) -> bool:
    """Whether its hours are over."""
    hours = spec.max_hours
    return hours is not None and bool(record.trials) and time.time() > record.trials[0].started_at + hours * 3600


def why_refused(spec: SweepSpec, settings: Settings) -> UserError | None:
    """What is wrong with the jobs of a trial; None: nothing is."""
    try:
        for seed in range(spec.seeds):
            spec.trial(settings, seed=seed)
    except UserError as error:
        return error
    return None


def refused(spec: SweepSpec, trial: TrialRecord) -> TrialEnded:
    """How a trial ended whose settings make no job."""
    error = why_refused(spec, trial.settings)
    assert error is not None, "a trial without a job has wrong settings"
    fault = Fault(code=error.code, message=str(error), hint=error.hint, param=error.param)
    return TrialEnded(trial=trial.number, outcome="failed", error=fault)


def damaged(trial: TrialRecord, error: Damaged) -> TrialEnded:
    """How a trial ended that cannot be read any more."""
    fault = Fault(code=error.code, message=str(error), hint=error.hint or "`longhaul repair` may repair the job")
    return TrialEnded(trial=trial.number, outcome="failed", error=fault)


def ended(spec: SweepSpec, trial: TrialRecord, jobs: Sequence[JobRecord]) -> TrialEnded:
    """How a trial ended whose jobs all have."""
    seconds = sum(job.training_s for job in jobs)
    if all(job.status is Status.SUCCEEDED for job in jobs):
        found = [job.result_loss if spec.by == "loss" else job.result_metrics.get(spec.by) for job in jobs]
        values = [value for value in found if value is not None]
        if len(values) == len(jobs):
            mean = sum(values) / len(values)
            return TrialEnded(trial=trial.number, outcome="succeeded", value=mean, values=values, seconds=seconds)
        fault = Fault(
            code="no_metric",
            message=f"its model was not judged by {spec.by.words}",
            hint="see that data.validation holds rows out and that evaluation.metrics has the metric of the sweep",
        )
        return TrialEnded(trial=trial.number, outcome="failed", seconds=seconds, error=fault)
    failed = next((job.error for job in jobs if job.status is Status.FAILED), None)
    if failed is not None:
        return TrialEnded(trial=trial.number, outcome="failed", seconds=seconds, error=failed)
    return TrialEnded(trial=trial.number, outcome="cancelled" if trial.pruned is None else "pruned", seconds=seconds)


def end(spec: SweepSpec, record: SweepRecord, reason: Ending) -> SweepEnded:
    """The end of a sweep of which no trial is open."""
    best = record.best(higher_is_better=spec.by.higher_is_better)
    return SweepEnded(
        reason=reason,
        best=None if best is None else best.number,
        importances=importances(spec, record),
        error=record.failures(spec.max_failures) if reason == "failures" else None,
    )
