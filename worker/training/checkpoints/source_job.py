"""The job that `resume_from` names, and whether this one may resume from it (ADR 0005). It is not changed.

This takes seconds: it reads sizes and state of the checkpoints, not the tensors (adoption.py reads those).
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.disk.rundir import RunDir
from jobs.errors import Damaged, NotFound, Rejected
from jobs.memory_plan import OptimizerName
from jobs.plan import DataPlan, Plan, SourceSummary, most_steps
from jobs.spec import BUILTIN_MODELS, JobSpec
from worker.training.checkpoints.checkpoint import TrainState, check_order, newest_first, stops, verify
from worker.training.dataset.data import PARTS, SIDES
from worker.training.steps.learning_rate import Correction, learning_rate

SAME: dict[str, bool | dict[str, bool]] = {
    "model": True, "task": True, "method": True, "data": True, "training": {"batch_size": True, "seed": True},
}  # fmt: skip
"""Parts of a job that decide what a step is: they must equal those of the original run."""
DELIVERED = {"method": {"merge"}}
"""What of these decides only in which form the result comes."""
SAME_STATES = {"adamw", "adamw_offload"}
"""Optimizers of which each takes the states of the other."""


@dataclass(frozen=True)
class SourceJob:
    """A prepared job with checkpoints that this one may resume from."""

    run: RunDir
    spec: JobSpec
    plan: Plan
    checkpoint: str | None
    """Name of the one that `resume_from` asks for; None: the newest that verifies."""
    state: TrainState
    """Of the one asked for, or of the newest that looks whole."""

    @property
    def step(self) -> int:
        """Steps that it has done."""
        return self.state.step

    @property
    def optimizer(self) -> OptimizerName:
        """The one whose states the checkpoints hold."""
        return self.plan.resolved.optimizer

    @property
    def validation_fraction(self) -> float | None:
        """Of the rows that it holds out; None: these have a file of their own."""
        found, asked = self.plan.data.validation_fraction, self.spec.data.validation
        return found if found is not None or isinstance(asked, str) else asked

    def folders(self) -> list[Path]:
        """The checkpoints that exist now: the first one that verifies is used."""
        if self.checkpoint is not None:
            return [self.run.checkpoints / self.checkpoint]
        return newest_first(self.run)

    def summary(self, spec: JobSpec, plan: Plan) -> SourceSummary:
        """For the event of check of the job that resumes from it."""
        state = self.state
        before = _rate(self.spec, self.plan, state.step, state.correction) if state.step else None
        return SourceSummary(
            job=self.run.id, step=state.step, optimizer=self.optimizer, loss=state.validation_loss,
            learning_rate=before, next_learning_rate=_rate(spec, plan, state.step + 1),
        )  # fmt: skip


def _rate(spec: JobSpec, plan: Plan, step: int, correction: Correction | None = None) -> float:
    training = spec.training
    return learning_rate(
        step, peak=training.learning_rate, steps=plan.steps, warmup=plan.warmup_steps,
        lr_scheduler=training.lr_scheduler, correction=correction,
    )  # fmt: skip


def prepared_before(run: RunDir, spec: JobSpec) -> str | None:
    """Folder of the prepared rows of the job that this one resumes from; None: it is not known, or there is none."""
    if spec.resume_from is None:
        return None
    try:
        return RunDir(run.path.parent / spec.resume_from.partition("/")[0]).plan().data.prepared
    except (NotFound, Damaged):
        return None


def find(run: RunDir, spec: JobSpec) -> SourceJob:
    """The job that `spec.resume_from` names, beside `run`.

    Raises Rejected: `no_such_job`, `no_checkpoint`, `other_run`, `other_optimizer`, `other_order`, `nothing_left`.
    """
    assert spec.resume_from is not None, "there is a job to resume from"
    job, _, named = spec.resume_from.partition("/")
    other = RunDir(run.path.parent / job)
    if not other.exists():
        raise _refused(
            f"resume_from = {spec.resume_from!r}: there is no job {job}",
            "no_such_job",
            "is the id right, and was the job deleted? Leave resume_from out to start over",
        )
    folders = newest_first(other)
    chosen = [folder for folder in folders if not named or folder.name == named]
    if not chosen:
        there = f"it has {', '.join(folder.name for folder in folders)}" if folders else "it has none at all"
        raise _refused(
            f"resume_from = {spec.resume_from!r}: job {job} has no {named or 'checkpoint'}",
            "no_checkpoint",
            f"{there}; leave resume_from out to start over",
        )
    theirs = other.spec()
    check_settings(spec, theirs, job)
    plan = other.plan()
    if not plan.data.complete:  # killed while it was itself made to resume from another job
        raise _refused(
            f"resume_from = {spec.resume_from!r}: job {job} was never prepared",
            "no_checkpoint",
            f"name the job that it was to resume from: {theirs.resume_from}",
        )
    check_optimizer(spec, plan.resolved.optimizer, job)
    defects = []
    for folder in chosen:
        try:
            state = verify(folder, thorough=False)
        except ValueError as error:
            defects.append(f"{folder.name}: {error}")
            continue
        check_order(state)
        check_steps_left(spec, plan.data, f"{job}/{folder.name}", state)
        return SourceJob(other, theirs, plan, named or None, state)
    raise none_verifies(spec, defects)


def check_settings(ours: JobSpec, theirs: JobSpec, job: str) -> None:
    """Raise Rejected (`other_run`) if a step would differ from one of the original run."""
    mine, other = (_flat(spec.model_dump(include=SAME, exclude=DELIVERED)) for spec in (ours, theirs))
    if ours.method.type != theirs.method.type:  # they have no keys in common
        for flat, spec in ((mine, ours), (other, theirs)):
            own = spec.method.model_dump(exclude_defaults=True, exclude=DELIVERED["method"])
            flat["method"] = {"type": spec.method.type} | own
    if ours.data.validation == "auto" and theirs.data.validation_name is None:  # then it is as there
        mine["data.validation"] = other["data.validation"]
    wrong = [key for key in mine | other if mine.get(key) != other.get(key)]
    if "method" in wrong:
        wrong = [key for key in wrong if not key.startswith("method.")]
    if wrong:
        as_there = ", ".join(f"{key}={_as_set(other.get(key))}" for key in wrong)
        differences = "; ".join(f"{key} is {mine.get(key)!r} here and {other.get(key)!r} there" for key in wrong)
        raise _refused(
            f"this is not the run that job {job} began: {differences}",
            "other_run",
            f"set {as_there}, or leave resume_from out (`longhaul clone` without --resume) to start over",
            wrong[0],
        )


def check_optimizer(spec: JobSpec, began: OptimizerName, job: str) -> None:
    """Raise Rejected (`other_optimizer`) if the checkpoints do not hold states of the optimizer that the job sets."""
    if spec.memory.optimizer not in ("auto", began) and {spec.memory.optimizer, began} != SAME_STATES:
        raise _refused(
            f"memory.optimizer is {spec.memory.optimizer}, and the checkpoints of job {job} hold states of {began}",
            "other_optimizer",
            f"set memory.optimizer: {began}, or auto, which is the same here; or leave resume_from out to start over",
            "memory.optimizer",
        )


def check_steps_left(spec: JobSpec, data: DataPlan, source: str, state: TrainState) -> None:
    """Raise Rejected (`nothing_left`) if all steps of the run are already done, or it has ended early."""
    done = state.step
    steps, name = most_steps(spec, data)
    if done >= steps:
        key = f"training.{name}"
        raise _refused(
            f"nothing is left to do: {source} is at step {done}, and {key}={getattr(spec.training, name)} allows "
            f"{steps} steps in all",
            "nothing_left",
            f"raise {key}, which counts from step 0, or resume from an earlier checkpoint",
        )
    rule = spec.training.early_stopping
    if rule is not None and stops(state.evaluations, rule, spec.early_stopping_metric):
        raise _refused(
            f"nothing is left to do: {source} has had {rule.patience} evaluations that were no better by "
            f"{spec.early_stopping_metric}",
            "nothing_left",
            "raise training.early_stopping.patience, set training.early_stopping to null, or resume from an earlier "
            "checkpoint",
        )


def check_content(before: SourceJob, plan: Plan) -> None:
    """Raise Rejected (`other_run`) unless rows and model are those the run began with (`plan`: this job's)."""
    # Both folders are named after their content. A built-in model is made from the rows: with others it is another.
    names = [Path(str(each.model.folder)).name for each in (plan, before.plan)]
    same_rows = _same_rows(Path(str(plan.data.prepared)), Path(str(before.plan.data.prepared)))
    if names[0] != names[1] and (same_rows or plan.model.source not in BUILTIN_MODELS):
        raise _refused(
            f"the files of model {plan.model.source} are not those that job {before.run.id} began with",
            "other_run",
            "bring them back, or leave resume_from out to start over",
            "model",
        )
    if not same_rows:
        raise _refused(
            f"the rows of {plan.data.train} are not those that job {before.run.id} began with "
            f"({plan.data.rows} to learn from, {before.plan.data.rows} there)",
            "other_run",
            "bring the files back as they were, or leave resume_from out to start over",
            "data.train",
        )


def none_verifies(spec: JobSpec, defects: list[str]) -> Rejected:
    """None of the requested checkpoints is intact."""
    advice = "leave resume_from out to start over"
    job, _, named = str(spec.resume_from).partition("/")
    if named:
        advice = f"set resume_from: {job}, which resumes from the newest one that verifies; or {advice}"
    return _refused(f"resume_from = {spec.resume_from!r}: {'; '.join(defects)}", "no_checkpoint", advice)


def _same_rows(ours: Path, theirs: Path) -> bool:
    """Also if another version prepared them."""
    if ours.name == theirs.name:
        return True
    names = [f"{side}.{kind}" for side in SIDES for kind in ("tokens", "offsets")] + [f"{part}.rows" for part in PARTS]
    return theirs.is_dir() and all(filecmp.cmp(ours / name, theirs / name, shallow=False) for name in names)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Values by their dotted keys."""
    flat: dict[str, object] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _as_set(value: object) -> str:
    """As `--set` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def _refused(message: str, code: str, advice: str, param: str = "resume_from") -> Rejected:
    return Rejected(message, code=code, hint=advice, param=param)
