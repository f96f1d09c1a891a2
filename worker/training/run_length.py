"""How many steps a run has: as planned, corrected by the measured pace where the job limits its hours, or fewer where
its evaluations say that it gets no better; and what is due at the step where it stands.

    plan.steps ─▶ after 200 steps, or a tenth of the run ─▶ as many as fit into the hours left ─▶ state, event
               ─▶ after a half, three quarters, … 31/32 of the hours ─▶ the same once more, if it is another number
               ─▶ at 5 % more than these hours ─▶ cut at this step ─▶ state, event

Each time 97 % of the hours left are filled: steps that become a little slower still fit.

A decision is noted before the next step: a run that is killed and resumes from an earlier checkpoint, or from the
start, finds it in its attempt files and schedules every step as it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from jobs.attempt import Heartbeat, Noted
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import cost_of, is_better
from jobs.plan import Plan, StepLimit, most_steps, warmup_steps
from jobs.reasons import Reason
from jobs.spec import JobSpec
from jobs.trainer_facts import StepsCorrected
from worker.training.checkpoints.checkpoint import TrainState, stops
from worker.training.journal import Journal
from worker.training.pace import STEPS, Pace
from worker.training.steps.learning_rate import Correction

CORRECTED_AFTER = 200
"""Steps, of a long run."""
TENTH = 0.1
"""Of the steps of a short run, or of its hours, after which it is corrected."""
AGAIN = tuple(1 - 0.5**halvings for halvings in range(1, 6))
"""Of its hours, after which it is corrected once more: each time half of those that were left are over."""
FILLED = 0.97
"""Of the hours left: for so long the steps are to last."""
GRACE = 1.05
"""Of its hours, after which a run that has become slower is cut."""


class RunLength:
    """Of a run; `state` is where it stands. `first`: steps that another job did. `spent_s`: seconds in attempts."""

    def __init__(
        self, spec: JobSpec, plan: Plan, state: TrainState, pace: Pace, *, first: int, spent_s: Callable[[], float]
    ) -> None:
        self._spec, self._plan, self._state, self._pace = spec, plan, state, pace
        self.first, self._spent_s = first, spent_s
        self._limit_s = None if spec.training.max_hours is None else 3600 * spec.training.max_hours
        self._passed_s = spent_s()
        """Each of `AGAIN` up to here was for an earlier attempt to see, or is seen."""
        pace.steps = self.steps

    @property
    def steps(self) -> int:
        """Of the whole run, as it stands."""
        correction = self._state.correction
        return self._plan.steps if correction is None else correction.last

    @property
    def limited_by(self) -> StepLimit:
        """What decides their number."""
        correction = self._state.correction
        if correction is None:
            return self._plan.limited_by
        most, otherwise = most_steps(self._spec, self._plan.data)
        return "max_hours" if self.steps < most else otherwise

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self._state.step >= self.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether the evaluations so far say that it gets no better."""
        rule = self._spec.training.early_stopping
        return rule is not None and stops(self._state.evaluations, rule, self._spec.early_stopping_metric)

    @property
    def reason(self) -> Reason:
        """Of the end of the run."""
        early = self.stopped_early and self._state.step < self.steps
        return Reason.EARLY_STOPPED if early else Reason.DONE

    def correct(self, journal: Journal) -> None:
        """Correct the number of steps, where that is due after this one."""
        if self._limit_s is None or self.done:
            return
        step, before, correction, spent = self._state.step, self.steps, self._state.correction, self._spent_s()
        if correction is not None and spent >= GRACE * self._limit_s:
            correction = correction.model_copy(update={"cut": step})
        elif self._measured(step, spent) if correction is None else self._due_again(correction, spent):
            self._passed_s = spent
            most, _ = most_steps(self._spec, self._plan.data)
            steps = self._pace.steps_within(FILLED * (self._limit_s - spent), step, most)
            if correction is not None and steps == before:
                return
            correction = Correction(
                step=step, steps=steps, warmup_steps=warmup_steps(self._spec, steps), before=correction
            )
        else:
            return
        self._state.correction = correction
        self._pace.steps = self.steps
        journal.note(
            StepsCorrected(
                step=step,
                steps=self.steps,
                steps_before=before,
                warmup_steps=correction.warmup_steps,
                limited_by=self.limited_by,
                spent_s=spent,
                step_s=self._pace.left_s(step, before) / (before - step),
                cut=correction.cut is not None,
            )
        )

    def _due_again(self, correction: Correction, spent: float) -> bool:
        """Whether one of `AGAIN` has passed. Steps whose rates an earlier attempt has decided are left as they are."""
        assert self._limit_s is not None, "there is a limit"
        passed = any(self._passed_s < share * self._limit_s <= spent for share in AGAIN)
        if not passed or spent >= self._limit_s or self._state.step <= correction.step:
            return False
        return self._pace.measured >= min(STEPS, (self.steps - self._state.step) // 2)

    def _measured(self, step: int, spent: float) -> bool:
        """Whether enough of the run was measured: of its steps, or of its time."""
        assert self._limit_s is not None, "there is a limit"
        after = min(CORRECTED_AFTER, math.ceil(TENTH * (self._plan.steps - self.first)))
        if step - self.first >= after:
            return self._pace.measured >= min(STEPS, after - 1)
        return spent >= TENTH * self._limit_s and self._pace.measured > 0


def noted_correction(run: RunDir, attempts: range) -> Correction | None:
    """The newest that one of these attempts noted, with those before it."""
    found: Correction | None = None
    for attempt in attempts:
        for line in run.attempt_lines(attempt):
            if isinstance(line, Noted) and isinstance(fact := line.fact, StepsCorrected):
                found = (
                    found.model_copy(update={"cut": fact.step})
                    if fact.cut and found is not None
                    else Correction(step=fact.step, steps=fact.steps, warmup_steps=fact.warmup_steps, before=found)
                )
    return found


def seconds_spent(run: RunDir, attempts: range) -> float:
    """Seconds in these attempts, to the last line of each, less those of waiting for a GPU or for room on it."""
    spent = 0.0
    for attempt in attempts:
        waits, since = True, 0.0
        for line in run.attempt_lines(attempt):
            spent += 0.0 if waits else max(0.0, line.at - since)
            since = line.at
            waits = line.phase == "wait" if isinstance(line, Heartbeat) else waits
    return spent


def stopwatch(already_s: float) -> Callable[[], float]:
    """Seconds, these included, since now."""
    began = time.monotonic()
    return lambda: already_s + time.monotonic() - began


# -- what is due ---------------------------------------------------------------------------------------------


class Due:
    """What is due at the step where a run of this `length` and so many `validation_rows` stands, as `state` says.

    Asked after each step, and first of all at the step where an attempt begins: what an earlier one was stopped before,
    or in the middle of, is due there still. So a run that was stopped has the same evaluations, and the same
    checkpoints that can become the model, as one that was not.

    `best_saved`: by `checkpoint.best`, the cost of the best checkpoint that there is or is being written. None: there
    is none.
    """

    def __init__(
        self,
        spec: JobSpec,
        state: TrainState,
        *,
        length: RunLength,
        validation_rows: int,
        best_saved: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evaluate_every, self._checkpoint = spec.evaluation.every_steps, spec.checkpoint
        self._state, self._length, self._validates = state, length, validation_rows > 0
        self._best_saved = best_saved
        self._clock = clock
        self._saved_at = clock() - state.unsaved_s

    @property
    def evaluation(self) -> bool:
        """Before the first step, at every n-th and at the last; once."""
        step = self._state.step
        return self._validates and not self._state.evaluated and (step % self._evaluate_every == 0 or self._length.done)

    @property
    def checkpoint(self) -> bool:
        """At every n-th step and at the last; at every evaluation that is better than each checkpoint so far, since the
        best is delivered; and at the first evaluation (or step, without any) after some minutes."""
        step, every, minutes = self._state.step, self._checkpoint.every_steps, self._checkpoint.every_minutes
        if step == 0 or self._length.done or (every is not None and step % every == 0):
            return step > 0
        evaluated = self._state.validation_loss is not None or not self._validates
        if (metric := self._checkpoint.best) is not None:
            cost = cost_of(metric, self._state.validation_loss, self._state.metrics)
            if cost is not None and is_better(cost, self._best_saved()):
                return True
        return minutes is not None and evaluated and self.unsaved_s >= 60 * minutes

    @property
    def unsaved_s(self) -> float:
        """Seconds of training since the last checkpoint that was due."""
        return self._clock() - self._saved_at

    def saved(self) -> None:
        """The checkpoint that was due is being saved."""
        self._saved_at = self._clock()
