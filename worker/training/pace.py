"""The pace of a run and the time that it still needs: measured, with everything in it that takes time.

    steps left x the mean of the last 50 + evaluations left x the time of the last + checkpoints left x that of the last

A step lasts from the end of the one before: waiting for data, logging and clearing the cache are in it, evaluations and
checkpoints are not. Steps are stratified over length, so 50 of them stand for the others. The first of an attempt, in
which kernels are compiled and memory is taken, does not; nor does one that stood still (`STALL`). An evaluation or
checkpoint counts from the first that was measured, in this attempt or an earlier one; where the best is kept, each
evaluation may be it, and counts as followed by a checkpoint. Copying the final model, after
all that, does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable

from pydantic import BaseModel, ConfigDict

from jobs.plan import Plan
from jobs.spec import JobSpec

STEPS = 50
STALL = 10
"""A step that takes more than so many times the median stood still: the container was paused, a disk did not answer."""


class Durations(BaseModel):
    """Seconds that the newest evaluation and checkpoint took; None: there was none yet. It goes into checkpoints."""

    model_config = ConfigDict(extra="forbid")

    evaluation_s: float | None = None
    checkpoint_s: float | None = None


class Pace:
    """Watches the clock while steps, evaluations and checkpoints go by."""

    def __init__(
        self, spec: JobSpec, plan: Plan, asides: Durations, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.asides = asides
        self._evaluate_every = spec.evaluation.every_steps if plan.data.validation_rows else None
        self._save_every = spec.checkpoint.every_steps
        self._save_every_s = 60 * spec.checkpoint.every_minutes if spec.checkpoint.every_minutes is not None else None
        self._best_every = self._evaluate_every if spec.checkpoint.best is not None else None
        self.steps = plan.steps
        """Of the whole run, as it stands."""
        self._clock = clock
        self._since = clock()
        self._excluded_s = 0.0
        self._first_s: float | None = None
        self._times: deque[float] = deque(maxlen=STEPS)

    def begin(self) -> None:
        """The first step begins now."""
        self._since, self._excluded_s = self._clock(), 0.0

    def step(self) -> float:
        """A step has ended: its seconds, without what was done aside since the one before."""
        now = self._clock()
        seconds = max(0.0, now - self._since - self._excluded_s)
        self._since, self._excluded_s = now, 0.0
        if self._first_s is None:
            self._first_s = seconds
        else:
            self._times.append(seconds)
        return seconds

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long."""
        self.asides.evaluation_s = seconds
        self._excluded_s += seconds

    def saved(self, seconds: float) -> None:
        """A checkpoint took so long."""
        self.asides.checkpoint_s = seconds
        self._excluded_s += seconds

    @property
    def measured(self) -> int:
        """How many steps stand for the others, so far."""
        return len(self._times)

    def steps_within(self, seconds: float, step: int, most: int) -> int:
        """Steps of a run that ends so long after step `step`, `most` at most, that one at least."""
        return step + bisect_right(range(step + 1, most + 1), seconds, key=lambda last: self.left_s(step, last))

    def left_s(self, step: int, steps: int | None = None) -> float:
        """Seconds left of so many `steps` (None: those of the run) once step `step` is done, before what is due after
        it. Only after a first step."""
        assert self._first_s is not None, "nothing was measured yet"
        last = self.steps if steps is None else steps
        times = self._times or [self._first_s]
        is_usual = usual(times)
        pace = statistics.fmean(each for each in times if is_usual(each))
        evaluation_s = self.asides.evaluation_s or 0.0
        evaluations = _due(self._evaluate_every, step, last) if self._evaluate_every else 0
        saves = _due(self._save_interval(pace, evaluation_s), step, last)
        return (last - step) * pace + evaluations * evaluation_s + saves * (self.asides.checkpoint_s or 0.0)

    def _save_interval(self, pace: float, evaluation_s: float) -> int | None:
        """Steps from one checkpoint to the next; None: there is only the last."""
        intervals = [each for each in (self._save_every, self._best_every) if each is not None]
        if self._save_every_s is not None:  # due at the first evaluation (or step, where there is none) after that time
            between = self._evaluate_every or 1
            seconds = between * pace + (evaluation_s if self._evaluate_every else 0.0)
            times = math.ceil(self._save_every_s / seconds) if seconds > 0 else self.steps
            intervals.append(between * max(1, times))
        return min(intervals, default=None)


def usual(seconds: Iterable[float]) -> Callable[[float], bool]:
    """Whether a step stood for others, by the seconds that each of them took: it was no stall."""
    most = STALL * statistics.median(seconds)
    return lambda each: each <= most


def _due(every: int | None, step: int, last: int) -> int:
    """How often something comes that is due after every n-th step and after the last, from `step` on, it included."""
    if every is None:
        return 1
    return last // every - (step - 1) // every + (last % every != 0)
