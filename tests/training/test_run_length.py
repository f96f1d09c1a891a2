"""`training.max_steps` and `training.max_hours`: how many steps a run has, and that whoever stops or kills it changes
none of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.attempt import Heartbeat
from jobs.disk.rundir import RunDir
from jobs.spec import parse_spec
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, StepsCorrected
from tests.support.machine import Clock
from tests.training.attempts import attempt, checkpoints, facts, finished, logged, same_tensors
from tests.training.conftest import MakeRun
from tests.training.contexts import plan_of
from tests.training.stepping import Noting
from worker.training.checkpoints.checkpoint import STATE, TrainState
from worker.training.journal import Journal
from worker.training.pace import Durations, Pace
from worker.training.run_length import RunLength, seconds_spent
from worker.training.steps.learning_rate import Correction, learning_rate

LOGGED: dict[str, Any] = {"log": {"every_steps": 1}, "checkpoint": {"every_steps": 4, "keep": 9}}
HOURS: dict[str, Any] = LOGGED | {"training": {"max_hours": 1000}}
"""21 steps are planned, and corrected after 3: a tenth of them."""


class KilledInstead(BaseException):
    """Takes the place of SIGKILL, where a process of its own would show no more."""


@pytest.fixture
def twelve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace leaves time for 12 steps."""
    monkeypatch.setattr(Pace, "steps_within", lambda *_: 12)


def evaluated(run: RunDir, attempts: int) -> dict[int, float]:
    found = [fact for number in range(1, attempts + 1) for fact in facts(run, EvaluationFinished, number)]
    return {fact.step: fact.loss for fact in found}


def test_a_run_of_so_many_steps_ends_as_one_whose_epochs_are_over(make_run: MakeRun) -> None:
    run = make_run(**LOGGED | {"training": {"max_steps": 7}})
    assert (run.plan().steps, run.plan().limited_by, run.plan().warmup_steps) == (7, "max_steps", 1)
    assert attempt(run) == 0
    assert finished(run).reason == "done" and [step for step, *_ in logged(run)] == list(range(1, 8))
    assert logged(run)[-1][3] == pytest.approx(0.01 / 7), "the rate is at its end"
    assert [*evaluated(run, 1)] == [0, 5, 7] and checkpoints(run) == [f"step-{step:08d}" for step in (4, 5, 7)]
    stopped = make_run("stopped", **LOGGED | {"training": {"max_steps": 7}})
    assert attempt(stopped, 1, stop_at=7) == 75
    assert attempt(stopped, 2) == 0
    assert logged(stopped) == logged(run) and evaluated(stopped, 2) == evaluated(run, 1)
    assert same_tensors(stopped.model / "model.safetensors", run.model / "model.safetensors")
    more = make_run("more", **LOGGED | {"training": {"max_steps": 99}})
    assert (more.plan().steps, more.plan().limited_by) == (21, "epochs"), "never more than the epochs have"


@pytest.mark.parametrize("killed_after", ["before", "corrected", "saved"])
def test_a_corrected_run_is_the_same_bit_for_bit_wherever_it_is_killed(
    make_run: MakeRun, twelve: None, monkeypatch: pytest.MonkeyPatch, killed_after: str
) -> None:
    whole, run = make_run("whole", **HOURS), make_run("killed", **HOURS)
    assert attempt(whole) == 0
    [fact] = facts(whole, StepsCorrected)
    assert (fact.step, fact.steps, fact.steps_before, fact.limited_by, fact.cut) == (3, 12, 21, "max_hours", False)
    assert [step for step, *_ in logged(whole)] == list(range(1, 13)) and 12 in evaluated(whole, 1)
    assert TrainState.model_validate_json((whole.checkpoints / "step-00000008" / STATE).read_bytes()).correction == (
        Correction(step=3, steps=12, warmup_steps=1)
    )
    real = Journal.note

    def note(journal: Journal, fact: Any) -> None:
        if killed_after == "before" and isinstance(fact, StepsCorrected):
            raise KilledInstead
        real(journal, fact)
        if isinstance(fact, StepsCorrected if killed_after == "corrected" else CheckpointSaved):
            raise KilledInstead

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", note)
        with pytest.raises(KilledInstead):
            attempt(run, 1)
    if killed_after != "before":  # measured again, the pace could leave time for other steps
        monkeypatch.setattr(Pace, "steps_within", lambda *_: 20)
    assert attempt(run, 2) == 0
    assert len(facts(run, StepsCorrected, 2)) == (killed_after == "before"), "it is corrected once"
    assert logged(run) == logged(whole) and evaluated(run, 2) == evaluated(whole, 1)
    assert finished(run, 2).result == finished(whole).result
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")


@pytest.mark.parametrize("after", [1, 2, 3])
def test_of_several_corrections_each_stays_wherever_the_run_is_killed(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Corrected after steps 3, 6 and 9 to 12, 18 and 15 steps, and saved at 4, 8 …; killed once this many are noted."""
    whole, run = make_run("whole", **HOURS), make_run("killed", **HOURS)
    numbers = {3: 12, 6: 18, 9: 15}
    monkeypatch.setattr(Pace, "steps_within", lambda _pace, _seconds, step, _most: numbers[step])
    monkeypatch.setattr(
        RunLength, "_due_again", lambda self, old, _spent: self._state.step in numbers and self._state.step > old.step
    )
    assert attempt(whole) == 0
    noted = facts(whole, StepsCorrected)
    assert [(fact.step, fact.steps) for fact in noted] == [*numbers.items()] and len(logged(whole)) == 15
    real, left = Journal.note, iter(range(after))

    def note(journal: Journal, fact: Any) -> None:
        real(journal, fact)
        if isinstance(fact, StepsCorrected) and next(left) == after - 1:
            raise KilledInstead

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", note)
        with pytest.raises(KilledInstead):
            attempt(run, 1)
    assert attempt(run, 2) == 0
    assert [fact.step for number in (1, 2) for fact in facts(run, StepsCorrected, number)] == [*numbers]
    assert logged(run) == logged(whole) and evaluated(run, 2) == evaluated(whole, 1)
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")


def test_a_paused_run_goes_on_with_the_corrected_number(
    make_run: MakeRun, twelve: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = make_run("whole", **HOURS), make_run("paused", **HOURS)
    assert attempt(whole) == 0
    assert attempt(run, 1, stop_at=1 + 4 + 2 + 7) == 75
    monkeypatch.setattr(Pace, "steps_within", lambda *_: 20)
    assert attempt(run, 2) == 0
    assert logged(run) == logged(whole)
    assert same_tensors(run.model / "model.safetensors", whole.model / "model.safetensors")


class PacedRun:
    """The length of a run whose steps take as long as a test says."""

    def __init__(self, noting: Noting, rows: int = 8 * 1000, first: int = 0, **training: Any) -> None:
        self.clock, self.noting = Clock(), noting
        settings = {"epochs": 1, "batch_size": 8, **training}
        spec = parse_spec({"data": {"train": "rows.jsonl"}, "training": settings, "evaluation": {"every_steps": 100}})
        plan = plan_of(spec, rows)
        plan = plan.model_copy(update={"data": plan.data.model_copy(update={"validation_rows": 1})})
        self.state = TrainState(spec_sha256="", micro_batch=1, step=first)
        self.began = self.clock.now
        self._spec, self._plan, self._first = spec, plan, first
        self.resume(first)

    def resume(self, step: int) -> None:
        """Another attempt begins, at this step."""
        self.state.step = step
        self.pace = Pace(self._spec, self._plan, Durations(), self.clock)
        self.length = RunLength(
            self._spec, self._plan, self.state, self.pace,
            first=self._first, spent_s=lambda: self.clock.now - self.began,
        )  # fmt: skip
        self.pace.begin()

    def go(self, steps: int, step_s: float) -> list[StepsCorrected]:
        """Steps, or as many as are left; what was corrected."""
        before = len(self.noting.facts)
        for _ in range(steps):
            if self.length.done:
                break
            self.clock.now += step_s
            self.state.step += 1
            self.pace.step()
            self.length.correct(self.noting)
        return [fact for fact in self.noting.facts[before:] if isinstance(fact, StepsCorrected)]


def test_hours_become_steps_by_the_measured_pace_with_evaluations(noting: Noting) -> None:
    run = PacedRun(noting, max_hours=1)
    run.pace.evaluated(100.0)
    run.clock.now += 100.0
    [fact] = run.go(150, step_s=6.0)
    # 3,236 s are left, of which 97 % are filled: 439 steps, and an evaluation after every 100th and the last.
    assert (fact.step, fact.spent_s, fact.steps_before, fact.limited_by) == (44, 364.0, 1000, "max_hours")
    assert fact.steps == run.length.steps == 44 + 439


def test_never_more_steps_than_the_epochs_or_max_steps_ask_for(noting: Noting) -> None:
    [fact] = PacedRun(noting, max_hours=9000).go(500, step_s=1.0)
    assert (fact.steps, fact.limited_by) == (1000, "epochs")
    [fact] = PacedRun(noting, max_hours=9000, max_steps=600).go(500, step_s=1.0)
    assert (fact.step, fact.steps, fact.limited_by) == (60, 600, "max_steps")
    [fact] = PacedRun(noting, rows=8 * 100_000, max_hours=1000).go(500, step_s=1.0)
    assert fact.step == 200


def test_steps_of_which_200_would_take_longer_are_measured_for_a_tenth_of_the_time(noting: Noting) -> None:
    fact, *_ = PacedRun(noting, rows=8 * 100_000, max_hours=1).go(50, step_s=60.0)
    assert (fact.step, fact.steps) == (6, 6 + 52)
    assert PacedRun(noting, rows=8 * 100_000, max_hours=0.01).go(2, step_s=60.0)[0].steps == 2, "its time is over"


def test_what_another_job_did_is_not_measured(noting: Noting) -> None:
    fact, *_ = PacedRun(noting, first=500, max_hours=1).go(300, step_s=9.0)
    assert (fact.step, fact.spent_s, fact.steps) == (540, 360.0, 540 + 349)


def test_a_run_that_becomes_slower_at_its_end_is_cut_at_5_percent_more(noting: Noting) -> None:
    run = PacedRun(noting, max_hours=1)
    planned = run.go(585, step_s=6.0)[-1]
    assert 0.96 * 3600 < planned.spent_s < 3600
    [cut] = run.go(1000, step_s=60.0)
    assert cut.cut and cut.step == cut.steps == run.state.step < planned.steps and run.length.done
    assert cut.spent_s == pytest.approx(1.05 * 3600, abs=60.0)
    correction = run.state.correction
    assert correction is not None and correction.steps == planned.steps, "rates up to there stay as they were"


def test_a_run_is_corrected_again_each_time_half_of_its_hours_left_are_over(noting: Noting) -> None:
    run = PacedRun(noting, rows=8 * 100_000, max_hours=1)
    found = run.go(100_000, step_s=1.0)
    shares = [round(fact.spent_s / 3600, 2) for fact in found]
    assert shares == [0.06, 0.5, 0.75, 0.88, 0.94, 0.97] and not any(fact.cut for fact in found)
    assert run.length.done and 0.995 * 3600 < run.clock.now - run.began <= 3600
    assert run.state.correction is not None and run.state.correction.before is not None
    assert run.state.correction.before.steps == found[-2].steps


def test_attempts_correct_once_at_each_share_and_leave_what_was_decided(noting: Noting) -> None:
    run = PacedRun(noting, rows=8 * 100_000, max_hours=1)
    run.go(1900, step_s=1.0)
    decided = run.state.correction
    assert decided is not None and decided.step == 1800
    run.resume(1500)
    assert run.go(300, step_s=1.5) == [], "half of the hours are over, and seen; these steps have their rates"
    run.resume(1500)
    [fact] = run.go(100_000, step_s=1.5)[:1]
    assert fact.step > 1800 and fact.spent_s >= 0.75 * 3600
    assert run.state.correction is not None and run.length.done


@pytest.mark.parametrize("drift", [0.0, 0.2, -0.2])
def test_of_unsteady_runs_nearly_all_end_their_schedule_within_their_hours(noting: Noting, drift: float) -> None:
    """Each step takes 1 s, ± 10 % by chance, and `drift` more little by little until the end."""
    draw, ends, runs = random.Random(7), [], 60
    for _ in range(runs):
        run = PacedRun(noting, rows=8 * 100_000, max_hours=0.5)
        while not run.length.done:
            share = (run.clock.now - run.began) / 1800
            run.go(1, step_s=draw.uniform(0.9, 1.1) * (1 + drift * share))
        correction = run.state.correction
        assert correction is not None and correction.cut is None, "none is cut"
        ends.append((run.clock.now - run.began) / 1800)
    within = sum(end <= 1.0 for end in ends)
    print(f"drift {drift:+.0%}: {within} of {runs} within their hours, ends {min(ends):.4f} to {max(ends):.4f}")
    assert within >= 0.95 * runs and min(ends) > 0.98 and max(ends) < 1.01


def test_a_job_without_a_limit_is_never_corrected(noting: Noting) -> None:
    assert PacedRun(noting).go(1000, step_s=99.0) == []


@pytest.mark.parametrize("lr_scheduler", ["linear", "cosine"])
@pytest.mark.parametrize("sinces", [(200, 2000, 3000), (20, 60, 500)])  # the second: twice while it still warms up
def test_the_rate_continues_without_a_jump_through_several_corrections(
    lr_scheduler: Any, sinces: tuple[int, ...]
) -> None:
    settings: dict[str, Any] = {"peak": 1.0, "steps": 6000, "warmup": 180, "lr_scheduler": lr_scheduler}
    correction, rates = None, [learning_rate(step, **settings) for step in range(1, 6001)]
    for since, steps in zip(sinces, (4000, 3500, 4200), strict=True):
        correction = Correction(step=since, steps=steps, warmup_steps=int(0.03 * steps), before=correction)
        before, rates = rates, [learning_rate(step, **settings, correction=correction) for step in range(1, steps + 1)]
        assert rates[:since] == before[:since], "what is done stays as it was"
        assert max(abs(np.diff(rates))) <= 1 / 100
        assert 0 < rates[-1] < 0.002
        peak = int(np.argmax(rates))
        assert rates[peak:] == sorted(rates[peak:], reverse=True) and rates[:peak] == sorted(rates[:peak])


@pytest.mark.parametrize("lr_scheduler", ["linear", "cosine"])
@pytest.mark.parametrize(("since", "steps"), [(200, 4000), (200, 9000), (20, 300), (20, 2000), (200, 201)])
def test_the_rate_continues_without_a_jump_and_ends_with_the_run(lr_scheduler: Any, since: int, steps: int) -> None:
    """Of 6,000 steps planned, of which 180 warm up."""
    correction = Correction(step=since, steps=steps, warmup_steps=int(0.03 * steps))
    settings: dict[str, Any] = {"peak": 1.0, "steps": 6000, "warmup": 180, "lr_scheduler": lr_scheduler}
    planned = [learning_rate(step, **settings) for step in range(1, since + 1)]
    rates = [learning_rate(step, **settings, correction=correction) for step in range(1, steps + 1)]
    assert rates[:since] == planned, "what is done stays as it was"
    slope = 1 / max(1, min(180, correction.warmup_steps)) + 1 / (steps + 1 - since)
    assert max(abs(np.diff(rates))) <= max(slope, 2 / (steps + 1 - since))
    assert 0 < rates[-1] < 2 / (steps + 1 - since) + 1e-9
    peak = int(np.argmax(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True) and rates[:peak] == sorted(rates[:peak])


def test_time_counts_in_attempts_and_not_while_they_wait(make_run: MakeRun) -> None:
    run: RunDir = make_run()
    for number, at in ((1, 0.0), (2, 9000.0)):
        lines = [("wait", 0.0), ("load", 500.0), ("step", 510.0), ("step", 600.0), ("wait", 610.0), ("step", 700.0)]
        file: Path = run.attempt_file(number)
        file.parent.mkdir(exist_ok=True)
        beats = [Heartbeat(at=at + since, phase=phase, step=1) for phase, since in lines]
        file.write_text("".join(f"{beat.model_dump_json()}\n" for beat in beats))
    assert seconds_spent(run, range(1, 3)) == 2 * 110.0
