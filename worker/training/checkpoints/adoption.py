"""A checkpoint of another job becomes this one's own (ADR 0005): from there on, resuming from it is an ordinary resume.

    runs/job-other/checkpoints/step-00000500/ ─linked, or copied─▶ runs/job-own/checkpoints/tmp-step-00000500/
        ─verified─▶ state.json and manifest.json of this job ─fsync, renamed─▶ step-00000500/

Weights and states are hard links: they take no room, and stay when the other job is deleted. What is verified is what
was taken, so that another trainer may save and prune meanwhile. The best checkpoint before that one is taken, too: the
final model is the best of the whole run. Last comes `adopted.json`: once it exists, a repeated preparation no longer
reads the other job; until then it starts again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from jobs.disk.files import sync_folder, write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import DiskFull
from jobs.evaluation_metrics import EvaluationMetric, cost_of, is_better
from jobs.events import Adopted
from jobs.plan import Plan
from jobs.spec import JobSpec
from jobs.text.units import bytes_alike
from worker.training import row_figures
from worker.training.checkpoints.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    TrainState,
    best_first,
    check_order,
    folder_of,
    newest_first,
    verify,
)
from worker.training.checkpoints.pruning import clean, remove
from worker.training.checkpoints.source_job import (
    SourceJob,
    check_content,
    check_steps_left,
    find,
    none_verifies,
)
from worker.training.checkpoints.tensorfile import write_bytes
from worker.training.journal import Journal

ADOPTED = "adopted.json"
PIECE = 1 << 26
"""Bytes copied at a time, where links are not possible."""
log = logging.getLogger("longhaul.trainer")


def adopt(run: RunDir, spec: JobSpec, plan: Plan, journal: Journal) -> Adopted:
    """Take over what `spec.resume_from` names; `plan` is of this job, with model and data in their place.

    Does nothing if an earlier call has done it. Raises Rejected as `source_job.find` and `check_content`,
    DiskFull where a copy is needed and would not fit.
    """
    done = run.path / ADOPTED
    if done.exists():
        return Adopted.model_validate_json(done.read_bytes())
    run.checkpoints.mkdir(exist_ok=True)
    clean(run)
    for folder in newest_first(run):
        remove(folder)
    before = find(run, spec)
    check_content(before, plan)
    adopted = Adoption(before, run, spec, plan, journal).all()
    write_atomically(done, adopted.model_dump_json(indent=1).encode() + b"\n")
    return adopted


@dataclass(frozen=True)
class Taken:
    """A checkpoint of the other job in a folder of our own, verified, and not yet ours."""

    folder: Path
    state: TrainState


class Adoption:
    """Takes over one checkpoint, and the best one before it."""

    def __init__(self, before: SourceJob, run: RunDir, spec: JobSpec, plan: Plan, journal: Journal) -> None:
        self._before, self._run, self._spec, self._plan, self._journal = before, run, spec, plan, journal
        self._passed_over: list[str] = []

    def all(self) -> Adopted:
        """Every step of it."""
        chosen = self._newest()
        check_order(chosen.state)
        own = folder_of(self._run, chosen.state.step)
        source = f"{self._before.run.id}/{own.name}"
        check_steps_left(self._spec, self._plan.data, source, chosen.state)
        for each in [*self._best_before(chosen.state), chosen]:
            self._make_own(each)
        if self._compares:
            self._take_base()
        for passed in self._passed_over:
            log.warning("job %s: passed over: %s", self._before.run.id, passed)
        return Adopted(
            source=source,
            step=chosen.state.step,
            path=str(own.relative_to(self._run.path)),
            first_loss=chosen.state.first_loss if self._compares else None,
            best_loss=chosen.state.best_loss if self._compares else None,
            passed_over=self._passed_over,
        )

    def _newest(self) -> Taken:
        tried: set[Path] = set()
        # Looked for again each time: a job that still runs saves new ones, and prunes old ones.
        while left := [folder for folder in self._before.folders() if folder not in tried]:
            tried.add(left[0])
            if (taken := self._take(left[0])) is not None:
                return taken
        raise none_verifies(self._spec, self._passed_over or ["its checkpoints are gone"])

    def _best_before(self, chosen: TrainState) -> list[Taken]:
        """The best of the older ones, unless `chosen` is better; none where they cannot be compared."""
        if not self._compares:
            return []
        until = folder_of(self._run, chosen.step).name
        metric = self._spec.checkpoint.best or EvaluationMetric.LOSS
        own = cost_of(metric, chosen.validation_loss, chosen.metrics)
        older = [folder for folder in newest_first(self._before.run) if folder.name < until]
        for folder, cost in best_first(older, metric).items():
            if is_better(own, cost):
                break
            if (taken := self._take(folder)) is not None:
                return [taken]
        return []

    def _take_base(self) -> None:
        """The other one's rows before step 1, where it has them: what this job's evaluations are compared with."""
        theirs, ours = (row_figures.file_of(run, 0) for run in (self._before.run, self._run))
        with contextlib.suppress(FileNotFoundError):
            content = theirs.read_bytes()
            ours.parent.mkdir(exist_ok=True)
            write_atomically(ours, content)

    @property
    def _compares(self) -> bool:
        """Whether losses of the other job are over the same rows as those of this one will be."""
        sides = ((self._spec, self._plan), (self._before.spec, self._before.plan))
        ours, theirs = ((spec.evaluation.max_rows, plan.data.evaluation_rows) for spec, plan in sides)
        return ours == theirs

    def _take(self, folder: Path) -> Taken | None:
        """None, and the reason is kept, where it does not verify, or is gone by now."""
        target = self._run.checkpoints / f"tmp-{folder.name}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        try:
            for name in (STATE, MANIFEST):  # rewritten later, so never links
                shutil.copyfile(folder / name, target / name)
            self._link(folder, target)
            return Taken(target, verify(target, progress=self._journal.progress))
        except FileNotFoundError as error:
            self._passed_over.append(f"{folder.name}: {Path(str(error.filename)).name} is missing")
        except ValueError as error:
            self._passed_over.append(f"{folder.name}: {error}")
        shutil.rmtree(target)
        return None

    def _link(self, folder: Path, target: Path) -> None:
        try:
            for name in (WEIGHTS, OPTIMIZER):
                os.link(folder / name, target / name)
            return
        except FileNotFoundError:
            raise
        except OSError as error:
            log.info("%s is copied, for it cannot be linked: %s", folder.name, error)
        needed = sum((folder / name).stat().st_size for name in (WEIGHTS, OPTIMIZER))
        free = shutil.disk_usage(target).free
        if 1.1 * needed > free:
            size, room = bytes_alike(needed, free)
            raise DiskFull(
                f"{folder.name} of job {self._before.run.id} ({size}) can only be copied, and the runs directory has "
                f"{room} free",
                code="no_room",
            )
        for name in (WEIGHTS, OPTIMIZER):
            (target / name).unlink(missing_ok=True)
            _copy(folder / name, target / name, self._journal)

    def _make_own(self, taken: Taken) -> None:
        state = self._own(taken.state)
        files = json.loads((taken.folder / MANIFEST).read_bytes())["files"]
        files[STATE] = write_bytes(taken.folder / STATE, state.model_dump_json(indent=1).encode())
        write_bytes(taken.folder / MANIFEST, json.dumps({"step": state.step, "files": files}, indent=1).encode())
        sync_folder(taken.folder)
        os.rename(taken.folder, folder_of(self._run, state.step))
        sync_folder(self._run.checkpoints)

    def _own(self, state: TrainState) -> TrainState:
        """The state as of a checkpoint of this job: what the other one's settings had led to is left out."""
        own: dict[str, object] = {"spec_sha256": self._run.spec_sha256(), "correction": None}
        resolved = self._plan.resolved
        if resolved != self._before.plan.resolved or self._spec.memory != self._before.spec.memory:
            # What memory has taught was about other settings.
            own |= {"micro_batch": resolved.micro_batch, "safe": {}}
        if not self._compares:
            own |= {"first_loss": None, "best_loss": None, "validation_loss": None, "verdict": None, "evaluated": False}
            own |= {"metrics": {}, "evaluations": []}
        return state.model_copy(update=own)


def _copy(source: Path, target: Path, journal: Journal) -> None:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while piece := reader.read(PIECE):
            writer.write(piece)
            journal.progress()
        writer.flush()
        os.fsync(writer.fileno())
