"""Stage *check*: is the job possible at all? Answers within a minute, and needs neither torch nor a card.

Looks at the paths, the model's config and the first 10,000 rows, and writes the provisional plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import BadData, Refused
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.rundir import RunDir
from jobs.spec import DataSpec, JobSpec
from worker.training import builtin, hub
from worker.training.journal import Journal
from worker.training.layout import t5_parameters
from worker.training.model_files import look_at_folder
from worker.training.settings import TrainerSettings
from worker.training.sieve import Seen, Sieve
from worker.training.sources import Line, LineReader, find_file, find_path
from worker.training.text import Defect, RowReader, Template, choose_templates, parse_row

ROWS = 10_000
"""Rows looked at."""
_MANY_COLUMNS = 1000


def check(run: RunDir, settings: TrainerSettings, journal: Journal) -> dict[str, Any]:
    """What goes into job.checked; plan.json is written. Raises StageError."""
    spec = run.spec()
    train = find_file(settings.data, spec.data.train, "data.train")
    own = spec.data.validation if isinstance(spec.data.validation, str) else None
    validation = find_file(settings.data, own, "data.validation") if own else None
    journal.progress(0.1)
    model = look_at_model(spec, settings)
    journal.progress(0.3)
    templates = choose_templates(spec.data.input, spec.data.target, columns_of(train, spec.data.train))
    rows = look_at_rows(train, spec.data.train, "data.train", spec.data, templates)
    journal.progress(0.9)
    held_out = int(rows.estimated * spec.data.validation) if isinstance(spec.data.validation, float) else 0
    if validation and own:
        held_out = look_at_rows(validation, own, "data.validation", spec.data, templates).estimated
    data = DataPlan(
        train=str(train),
        validation=str(validation) if validation else None,
        input=templates[0].source,
        target=templates[1].source,
        rows=rows.estimated if validation else max(1, rows.estimated - held_out),
        validation_rows=held_out,
    )
    plan = make_plan(spec, model, data)
    run.write_plan(plan)
    return {
        "plan": {
            "model": model.source if model.revision is None else f"{model.source} (commit {model.revision})",
            "parameters": model.parameters,
            "rows_looked_at": rows.looked_at,
            "rows_estimated": rows.estimated,
            "invalid_rows": dict(rows.invalid),
            "duplicates": rows.duplicates,
            "input": data.input,
            "target": data.target,
            "steps": plan.steps,
            "resolved": plan.resolved.model_dump(),
        }
    }


def look_at_model(spec: JobSpec, settings: TrainerSettings) -> ModelPlan:
    """Which weights, and how many; nothing is loaded. Raises Refused, for a folder also as the guards would later."""
    source = spec.model
    if source == builtin.NAME:
        return ModelPlan(source=source, parameters=t5_parameters(builtin.CONFIG))
    if source.startswith(("./", "/")):
        folder = find_model_folder(source, settings)
        parameters = sum(stored.elements for stored in look_at_folder(folder, source).values())
        return ModelPlan(source=source, folder=str(folder), parameters=parameters)
    found = hub.look_up(source, settings)
    return ModelPlan(source=source, revision=found.commit, parameters=t5_parameters(found.config))


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


def columns_of(path: Path, name: str) -> set[str]:
    """Names of the columns in the first rows. Raises BadData (`no_rows`) when there is no row at all."""
    columns: set[str] = set()
    any_line = False
    for line in _First(LineReader(path, name, "data.train")):
        any_line = True
        try:
            columns |= parse_row(line.text or "").keys()
        except Defect:
            continue
        if len(columns) > _MANY_COLUMNS:
            break
    if not any_line:
        raise BadData(
            f"data.train: {name} holds no row", code="no_rows", param="data.train", hint="one JSON object a line"
        )
    if not columns:
        raise BadData(
            f"data.train: none of the first rows of {name} is a JSON object",
            code="no_usable_columns",
            param="data.train",
            hint='the file needs one JSON object a line, such as {"input": "…", "target": "…"}',
        )
    return columns


@dataclass(frozen=True)
class Look:
    """What the first rows of a file say about all of it."""

    looked_at: int
    estimated: int
    """Usable rows in the whole file."""
    invalid: dict[str, int]
    duplicates: int


def look_at_rows(path: Path, name: str, param: str, data: DataSpec, templates: tuple[Template, Template]) -> Look:
    """Check the first rows. Raises BadData (`no_rows`, `too_many_invalid_rows`)."""
    lines = LineReader(path, name, param)
    sieve = Sieve(_First(lines), RowReader(*templates, normalise=data.normalise), Seen())
    for _ in sieve.good_rows():
        pass
    # Of all rows, so that too many means: even if no later row is bad.
    total = sieve.read if sieve.read < ROWS else max(ROWS, round(ROWS / max(lines.fraction, 1e-9)))
    sieve.refuse_too_many(data.max_invalid_fraction, name, total)
    if not sieve.kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sieve.set_aside.most_common(3))
        raise BadData(f"{param}: no row of {name} can be used ({reasons})", code="no_rows", param=param)
    estimated = max(1, round(sieve.kept / sieve.read * total))
    return Look(sieve.read, estimated, dict(sieve.set_aside), sieve.duplicates)


class _First:
    """The first ROWS lines of a file."""

    def __init__(self, lines: LineReader) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[Line]:
        for count, line in enumerate(self._lines, start=1):
            yield line
            if count == ROWS:
                return
