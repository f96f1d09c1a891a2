"""What is due at the step where a run stands: an evaluation, a checkpoint.

Asked after each step, and first of all at the step where an attempt begins: what an earlier one was stopped before, or
in the middle of, is due there still. So a run that was stopped has the same evaluations, and the same checkpoints that
can become the model, as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from jobs.evaluation_metrics import cost_of, is_better
from jobs.spec import JobSpec
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.run_length import RunLength


class Due:
    """For a run of this `length` and so many `validation_rows`; `state` is where it stands.

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
