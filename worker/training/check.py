"""Stage *check*: is the job possible at all? Answers within a minute, and needs neither weights nor a card.

Looks at the paths, the model's config and the first 10,000 rows; then, for rows of the longest lengths that the job
allows, at memory; and writes the provisional plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.errors import BadData, Refused
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.rundir import RunDir
from jobs.spec import DataSpec, JobSpec
from worker.training.journal import Journal
from worker.training.models import builtin, hub
from worker.training.models.layout import t5_parameters
from worker.training.models.model_files import look_at_folder, read_config
from worker.training.planning.stages import plan_stage
from worker.training.planning.time_plan import RowLengths, with_time
from worker.training.rows.characters import Rewriter
from worker.training.rows.origin import Head, find_head
from worker.training.rows.reading import Row, format_of, open_files
from worker.training.rows.sieve import Sieve
from worker.training.rows.sources import find_path
from worker.training.rows.text import RowReader, Template, choose_templates
from worker.training.settings import TrainerSettings
from worker.training.steps.order import rounded

if TYPE_CHECKING:
    from worker.training.checkpoints.predecessor import Predecessor

ROWS = 10_000
"""Rows looked at."""
_MANY_COLUMNS = 1000
_BLOCK = 500


def check(run: RunDir, settings: TrainerSettings, journal: Journal) -> dict[str, Any]:
    """What goes into job.checked; plan.json is written. Raises StageError."""
    spec = run.spec()
    before = find_predecessor(run, spec)
    commit = before.plan.data.train_revision if before else None
    train = find_head(spec.data.train, "data.train", spec.data.format, settings, commit)
    own = spec.data.validation if isinstance(spec.data.validation, str) else None
    commit = before.plan.data.validation_revision if before else None
    validation = find_head(own, "data.validation", spec.data.format, settings, commit) if own else None
    journal.progress(0.1)
    model, config = look_at_model(spec, settings, before.plan.model.revision if before else None)
    journal.progress(0.3)
    templates = choose_templates(spec.data.input, spec.data.target, columns_of(train))
    rows = look_at_rows(train, spec.data, templates)
    journal.progress(0.5)
    held_out = int(rows.estimated * spec.data.validation) if isinstance(spec.data.validation, float) else 0
    if validation:
        held_out = look_at_rows(validation, spec.data, templates).estimated
    data = DataPlan(
        train=train.place,
        train_revision=train.revision,
        validation=validation.place if validation else None,
        validation_revision=validation.revision if validation else None,
        input=templates[0].source,
        target=templates[1].source,
        rows=rows.estimated if validation else max(1, rows.estimated - held_out),
        validation_rows=held_out,
    )
    longest = rounded(np.array([spec.data.max_input_tokens, spec.data.max_target_tokens]))
    memory = plan_stage(
        run,
        spec,
        config,
        (int(longest[0]), int(longest[1])),
        settings,
        journal,
        optimizer=before.optimizer if before else None,
    )
    plan = with_time(
        make_plan(spec, model, data, settings.device, memory),
        spec,
        config,
        RowLengths.guessed(rows.characters, spec.data),
        settings,
        done=before.step if before else 0,
    )
    run.write_plan(plan)
    return {
        "plan": {
            "model": model.source if model.revision is None else f"{model.source} (commit {model.revision})",
            "parameters": model.parameters,
            "train": train.name if train.revision is None else f"{train.name} (commit {train.revision})",
            "rows_looked_at": rows.looked_at,
            "rows_estimated": rows.estimated,
            "invalid_rows": dict(rows.invalid),
            "duplicates": rows.duplicates,
            "input": data.input,
            "target": data.target,
            "steps": plan.steps,
            "resolved": plan.resolved.model_dump(),
            "time": plan.time and plan.time.told(),
            "memory": memory.told(),
            **({"resume_from": before.told()} if before else {}),
        }
    }


def find_predecessor(run: RunDir, spec: JobSpec) -> Predecessor | None:
    """The job to go on from, if the specification names one. Raises Refused as `predecessor.find`."""
    if spec.resume_from is None:
        return None
    # Imported here: torch takes seconds, which others need not wait for.
    from worker.training.checkpoints.predecessor import find

    return find(run, spec)


def look_at_model(
    spec: JobSpec, settings: TrainerSettings, commit: str | None = None
) -> tuple[ModelPlan, dict[str, Any]]:
    """Which weights, and how many, and their config.json; nothing is loaded.

    `commit`: the one of a hub model that a run began with; None: what the name stands for now. Raises Refused, for a
    folder also as the guards would later.
    """
    source = spec.model
    if source == builtin.NAME:
        return ModelPlan(source=source, parameters=t5_parameters(builtin.CONFIG)), builtin.CONFIG
    if source.startswith(("./", "/")):
        folder = find_model_folder(source, settings)
        parameters = sum(stored.elements for stored in look_at_folder(folder, source).values())
        return ModelPlan(source=source, folder=str(folder), parameters=parameters), read_config(folder, source)
    found = hub.look_up(f"{source.partition('@')[0]}@{commit}" if commit else source, settings)
    return ModelPlan(source=source, revision=found.commit, parameters=t5_parameters(found.config)), found.config


def find_model_folder(source: str, settings: TrainerSettings) -> Path:
    """A folder inside the data directory. Raises Refused (`path_outside_data`, `model_not_found`)."""
    try:
        folder = find_path(settings.data, source, "model")
    except BadData as error:
        if error.detail_code != "file_missing":
            raise
        raise Refused(
            f"model: there is no folder {source} in the data directory",
            code="model_not_found",
            param="model",
            hint="put the model there, or name a hub id without ./ in front",
        ) from None
    if not folder.is_dir():
        raise Refused(
            f"model: {source} is a file", code="model_not_found", param="model", hint="name the folder that it is in"
        )
    return folder


def columns_of(head: Head) -> set[str]:
    """Names of the columns in the first rows. Raises BadData (`no_rows`) when there is no row at all."""
    columns: set[str] = set()
    unreadable: Counter[str] = Counter()
    for row in FirstRows(head):
        if row.columns is None:
            unreadable[str(row.defect)] += 1
            continue
        columns |= row.columns.keys()
        # JSON objects may each have other keys; tables have one header.
        if len(columns) > _MANY_COLUMNS or format_of(head.files[0], head.format) != "jsonl":
            break
    if not columns and not unreadable:
        raise BadData(
            f"{head.param}: {head.name} holds no row", code="no_rows", param=head.param, hint="was it written in full?"
        )
    if not columns:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in unreadable.most_common(3))
        raise BadData(
            f"{head.param}: none of the first rows of {head.name} can be read ({reasons})",
            code="no_usable_columns",
            param=head.param,
            hint='JSON lines need one JSON object a line, such as {"input": "…", "target": "…"}; '
            "if it is another format, say which in data.format",
        )
    return columns


@dataclass(frozen=True)
class Look:
    """What the first rows of a source say about all of it."""

    looked_at: int
    estimated: int
    """Usable rows in all of it."""
    invalid: dict[str, int]
    duplicates: int
    characters: list[tuple[int, int]]
    """Of input and target of every usable row looked at."""


def look_at_rows(head: Head, data: DataSpec, templates: tuple[Template, Template]) -> Look:
    """Check the first rows. Raises BadData (`no_rows`, `too_many_invalid_rows`)."""
    rows = FirstRows(head, {column for one in templates for column in one.columns})
    sieve = Sieve(rows, RowReader(*templates, Rewriter() if data.normalise else None))
    characters = [(len(texts.input), len(texts.target)) for texts in sieve.good_rows()]
    tally = sieve.tally
    # Of all rows, so that too many means: even if no later row is bad.
    total = tally.read if rows.all_of_them else max(tally.read, round(tally.read / max(rows.fraction, 1e-9)))
    tally.refuse_too_many(data.max_invalid_fraction, head.name, total)
    if not tally.kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in tally.set_aside.most_common(3))
        raise BadData(f"{head.param}: no row of {head.name} can be used ({reasons})", code="no_rows", param=head.param)
    estimated = max(1, round(tally.kept / tally.read * total))
    return Look(tally.read, estimated, dict(tally.set_aside), tally.duplicates, characters)


class FirstRows:
    """The first ROWS rows of a source, or fewer where reading on would take too long; `columns` as in `open_files`."""

    def __init__(self, head: Head, columns: Collection[str] | None = None) -> None:
        self._head = head
        self._reader = open_files(head.files, head.param, head.format, columns)
        self.all_of_them = False

    @property
    def fraction(self) -> float:
        """Share of the source that was read."""
        return self._reader.fraction

    def __iter__(self) -> Iterator[Row]:
        count, fetched = 0, self._head.fetched
        for block in self._reader.blocks(_BLOCK):
            for row in block.rows():
                if count == ROWS:
                    return
                yield row
                count += 1
            if self._head.fetched > fetched and self._head.spent:
                return
        self.all_of_them = True
