"""Kills an adoption at many points, and says what was found and what came of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.plan import DataPlan, ModelPlan, Plan, make_plan
from jobs.spec import CheckpointSpec, parse_spec
from tests.training.killed_saves import killed_at, lines_run
from worker.training.checkpoints import adoption, pruning, saving, tensorfile
from worker.training.checkpoints.adoption import ADOPTED, adopt
from worker.training.checkpoints.checkpoint import OPTIMIZER, WEIGHTS, TrainState, newest_first, verify
from worker.training.journal import Journal
from worker.training.steps.order import VERSION

OWN = {adoption.__file__, pruning.__file__, saving.__file__, tensorfile.__file__}


def make(folder: Path, name: str, **parts: object) -> tuple[RunDir, Plan]:
    """A prepared job of 100 steps."""
    spec = parse_spec({"data": {"train": "rows.jsonl"}, "training": {"epochs": 10, "batch_size": 1}, **parts})
    run, _ = create(folder, name, spec, JobSubmitted(name=name, model="x", spec_sha256=spec.sha256()))
    data = DataPlan(train="x", input="x", target="x", prepared="/prepared/a", rows=10, complete=True)
    plan = make_plan(spec, ModelPlan(source="x", folder="/models/a", parameters=1), data)
    run.write_plan(plan)
    return run, plan


def shas(run: RunDir) -> dict[str, str]:
    """By checkpoint the specification that it says it was made for. Raises ValueError where one does not verify."""
    return {folder.name: verify(folder).spec_sha256 for folder in newest_first(run)}


def killed_adoptions(folder: Path, points: int) -> Iterator[dict[str, Any]]:
    """Of each point where it was, which checkpoints were there under their names, all of which verified, and what
    adopting again then leaves in both jobs."""
    other, _ = make(folder, "job-1")
    run, plan = make(folder, "job-2", resume_from="job-1")
    journal = Journal(run.attempt_file("prepare"))
    for step, loss in ((1, 2.0), (2, 3.0)):  # the first is the best, and is taken, too
        tensors = {file: {"a": torch.full((64, 64), float(step))} for file in (WEIGHTS, OPTIMIZER)}
        state = TrainState(
            spec_sha256=other.spec().sha256(), order=VERSION, micro_batch=1, step=step, validation_loss=loss
        )
        saving.write(other, state, tensors, CheckpointSpec(keep=2), journal)
    before = shas(other)

    def take() -> object:
        return adopt(run, run.spec(), plan, journal)

    def forget() -> None:
        shutil.rmtree(run.checkpoints)
        (run.path / ADOPTED).unlink(missing_ok=True)

    total = [0]
    lines_run(take, lambda number, place: total.__setitem__(0, number + 1), OWN)
    for point in range(points):
        forget()
        place, killed = killed_at(take, point * total[0] // points, OWN)
        found = sorted(shas(run)) if run.checkpoints.exists() else []
        complete = (run.path / ADOPTED).exists()
        take()
        own = set(shas(run).values()) == {run.spec().sha256()}
        left = sorted(each.name for each in run.checkpoints.iterdir())
        said = {"place": place, "killed": killed, "found": found, "complete": complete}
        yield {**said, "left": left, "own": own, "other_untouched": shas(other) == before}
