"""Sweeps: submit, find, list, cancel, repeat, delete. What happens to their trials is the work of publish."""

from __future__ import annotations

import csv
import io
import json
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field, ValidationError

from jobs import answers
from jobs.answers import TrialStatus
from jobs.disk.removal import PREFIX, remove
from jobs.disk.rundir import RunDir
from jobs.errors import Conflict, Damaged, NotFound, UserError
from jobs.frozen import Part
from jobs.redis.store import make_id
from jobs.state import CANCEL_FIRST
from jobs.sweeps import directory
from jobs.sweeps.directory import SweepDir, list_sweeps
from jobs.sweeps.events import SweepCancelRequested, SweepFact, SweepSubmitted
from jobs.sweeps.record import Rest, SweepRecord, TrialRecord, rest
from jobs.sweeps.spec import SweepSpec, parse_sweep
from jobs.version import VERSION
from jobs.wrong_spec import explain
from service.jobs.actions import Actions
from service.jobs.submissions import check_name, checked_key, sha256


class Repetition(Part):
    """How a trial is repeated."""

    trial: Annotated[int, Field(ge=0)] | None = None
    """Which; null: the best."""
    seeds: Annotated[int, Field(ge=2, le=100)] = 5
    """So many values of `training.seed`, each a trial of a new sweep."""


class Sweeps:
    """Everything that changes or finds a sweep. Raises the errors of `jobs.errors`."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._submitting = threading.Lock()
        self._ended: dict[str, tuple[tuple[int, int, int], answers.Sweep]] = {}
        """Answers of sweeps that have ended, with the state of their events."""

    def submit(self, body: object, *, key: str | None) -> answers.Sweep:
        """A new sweep; or, with an Idempotency-Key that came before with this body, the sweep of that time."""
        return self._make(parse_sweep(body, self._actions.submissions.check), asked=body, key=key)

    def repeat(self, sweep: str, body: object, *, key: str | None) -> answers.Sweep:
        """A new sweep of one trial's settings with other seeds."""
        try:
            asked = Repetition.model_validate(body)
        except ValidationError as error:
            raise explain(error, Repetition, keys="the keys are `trial` and `seeds`") from None
        found = self.find(sweep)
        spec, record = found.spec(), found.record()
        number = asked.trial
        if number is None and (best := record.best(higher_is_better=spec.by.higher_is_better)) is not None:
            number = best.number
        if number is None:
            raise Conflict(
                f"sweep {sweep} has no best trial, for none has succeeded: name one, as `trial` or with `--trial`"
            )
        if number >= len(record.trials):
            raise UserError(f"sweep {sweep} has no trial {number}", param="trial")
        settings = record.trials[number].settings
        first = spec.trial(settings).training.seed + spec.seeds  # those before it were the trial's own
        given = {
            "name": f"{spec.name[:40]} again",
            "job": spec.given(settings),
            "space": {"training.seed": {"choice": [first + place for place in range(asked.seeds)]}},
            "sampler": "grid",
            "metric": spec.by.value,
            "keep_models": spec.keep_models,
        }
        return self._make(parse_sweep(given), asked={"repeat": sweep, "body": body}, key=key)

    def _make(self, spec: SweepSpec, *, asked: object, key: str | None) -> answers.Sweep:
        checked_key(key)
        check_name(spec.name)
        body_sha256 = sha256(asked)
        with self._submitting:
            if key is not None and (earlier := self._submitted_under(key)) is not None:
                if earlier.submitted().body_sha256 != body_sha256:
                    used = f"was used before with another body (sweep {earlier.id})"
                    raise Conflict(f"Idempotency-Key {key!r} {used}; take a new key")
                return self.answer(earlier)
            submitted = SweepSubmitted(
                name=spec.name, spec_sha256=spec.sha256(), version=VERSION, idempotency_key=key, body_sha256=body_sha256
            )
            made = directory.create(self._actions.runs, make_id("sweep"), spec, submitted)
        return self.answer(made)

    def _submitted_under(self, key: str) -> SweepDir | None:
        for sweep in list_sweeps(self._actions.runs):
            with suppress(Damaged, NotFound):
                if sweep.submitted().idempotency_key == key:
                    return sweep
        return None

    def find(self, sweep: str) -> SweepDir:
        """An existing one. Raises NotFound."""
        return directory.find(self._actions.runs, sweep)

    def get(self, sweep: str) -> answers.Sweep:
        """One of them."""
        return self.answer(self.find(sweep))

    def answer(self, sweep: SweepDir) -> answers.Sweep:
        """How it stands. The answer of one that has ended is kept. Raises Damaged, NotFound."""
        state, kept = sweep.state(), self._ended.get(sweep.id)
        if kept is not None and kept[0] == state:
            answer = kept[1].copy()
            if (best := answer["best"]) is not None:  # no event of the sweep says that a job was deleted
                gone = _gone(sweep, answer["specification"]["job"], best["status"], best["jobs"])
                answer["best"] = {**best, "gone": gone}
            return answer
        answer = sweep_answer(sweep, sweep.record())
        if answer["status"] != "running":
            self._ended[sweep.id] = state, answer
        return answer

    def trials(self, sweep: str) -> list[answers.Trial]:
        """All of one sweep, by number."""
        found = self.find(sweep)
        return trial_answers(found, found.record())

    def page(self, *, after: str | None, limit: int) -> tuple[list[answers.Sweep], bool]:
        """Newest first, and whether there is more; a damaged one is left out here, and says so when it is asked for."""
        found = list(reversed(list_sweeps(self._actions.runs)))
        if after is not None:
            found = [sweep for sweep in found if sweep.id < after]
        shown = []
        for sweep in found:
            with suppress(Damaged, NotFound):
                shown.append(self.answer(sweep))
            if len(shown) > limit:
                break
        return shown[:limit], len(shown) > limit

    def cancel(self, sweep: str) -> answers.Sweep:
        """No more trials; the open ones are cancelled. Conflict when the sweep has ended."""

        def decide(record: SweepRecord) -> Sequence[SweepFact]:
            if record.ended is not None:
                raise Conflict(f"sweep {sweep} has already ended ({record.status}): there is nothing to cancel")
            return [] if record.cancel_requested else [SweepCancelRequested()]

        found = self.find(sweep)
        return sweep_answer(found, found.append(decide))

    def delete(self, sweep: str) -> None:
        """Remove an ended sweep and the jobs of its trials, with their models. Conflict while it runs."""
        found = self.find(sweep)
        record = found.record()
        if record.ended is None:
            raise Conflict(f"sweep {sweep} still runs: {CANCEL_FIRST}")
        for trial in record.trials:
            for job in (*trial.jobs, *trial.replaced):
                with suppress(NotFound):
                    self._actions.delete(job)
        gone = found.path.with_name(f"{PREFIX}{found.id}-{uuid.uuid4().hex[:8]}")
        os.rename(found.path, gone)
        self._ended.pop(sweep, None)
        remove(gone)

    def table(self, sweep: str) -> str:
        """All trials as CSV: number, status, value, seconds, cause, jobs, and a column for each parameter."""
        found = self.find(sweep)
        spec = found.spec()
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(["trial", "status", spec.by.value, "seconds", "cause", "jobs", *spec.space])
        for trial in trial_answers(found, found.record()):
            cause = trial["error"].message if trial["error"] else trial["message"] or ""
            known: list[Any] = [trial["number"], trial["status"], "" if trial["value"] is None else trial["value"]]
            cells = [_cell(trial["settings"][key]) if key in trial["settings"] else "" for key in spec.space]
            rows.writerow([*known, f"{trial['seconds']:.3f}", _cell(cause), " ".join(trial["jobs"]), *cells])
        return text.getvalue()


def _cell(value: object) -> object:
    """For a spreadsheet, which would take what begins with these signs for a formula."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def sweep_answer(sweep: SweepDir, record: SweepRecord) -> answers.Sweep:
    """A sweep as the API shows it. Raises Damaged."""
    spec = sweep.spec()
    best = record.best(higher_is_better=spec.by.higher_is_better)
    ended = record.ended
    rests = [found for trial in record.open if (found := _rest(sweep, trial)) is not None]
    counts = record.counts | {"running": len(record.open) - len(rests), "paused": len(rests)}
    return answers.Sweep(
        id=record.id,
        object="sweep",
        name=record.name,
        status=record.status,
        reason=None if ended is None else ended.reason,
        cancel_requested=record.cancel_requested,
        created_at=int(record.submitted_at),
        finished_at=None if record.ended_at is None else int(record.ended_at),
        metric=spec.by.value,
        direction="maximize" if spec.by.higher_is_better else "minimize",
        sampler=spec.sampler,
        pruning=spec.pruning,
        max_trials=spec.most_trials,
        parameters=list(spec.space),
        trials={status: count for status, count in counts.items() if count},
        best=None if best is None else trial_answer(sweep, spec, best),
        importances=record.importances,
        waiting=next((found.why for found in rests if found.holds), None),
        error=None if ended is None else ended.error,
        warnings=spec.warnings,
        specification=spec.model_dump(mode="json", by_alias=True),
    )


def trial_answers(sweep: SweepDir, record: SweepRecord) -> list[answers.Trial]:
    """All trials as the API shows them, by number."""
    spec = sweep.spec()
    return [trial_answer(sweep, spec, trial, _rest(sweep, trial)) for trial in record.trials]


def _rest(sweep: SweepDir, trial: TrialRecord) -> Rest | None:
    """Why a trial rests that has not ended. What is damaged or not there yet is for publish to see."""
    if trial.outcome is not None:
        return None
    jobs, runs = [], sweep.path.parent.parent
    for job in trial.jobs:
        with suppress(Damaged, NotFound, OSError):
            jobs.append(RunDir(runs / job).record())
    return rest(trial, jobs)


def _gone(sweep: SweepDir, job: Mapping[str, Any], status: str, jobs: Sequence[str]) -> list[str]:
    """Jobs of a trial that trained a model which is no longer there. `job`: what all trials share."""
    if status != "succeeded" or job.get("kind") == "evaluate":
        return []
    return [job for job in jobs if not RunDir(sweep.path.parent.parent / job).has_model()]


def trial_answer(sweep: SweepDir, spec: SweepSpec, trial: TrialRecord, rests: Rest | None = None) -> answers.Trial:
    """A trial as the API shows it."""
    pruned = trial.pruned
    status: TrialStatus = trial.outcome or ("running" if rests is None else "paused")
    message = rests.why if rests is not None else None if pruned is None else pruned.message
    return answers.Trial(
        object="sweep.trial",
        number=trial.number,
        status=status,
        settings=trial.settings,
        jobs=list(trial.jobs),
        gone=_gone(sweep, spec.job, status, trial.jobs),
        value=pruned.value if pruned is not None and trial.value is None else trial.value,
        values=list(trial.values),
        started_at=int(trial.started_at),
        finished_at=None if trial.ended_at is None else int(trial.ended_at),
        seconds=trial.seconds,
        message=message,
        error=trial.error,
    )
