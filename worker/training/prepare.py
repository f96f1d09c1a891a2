"""Stage *prepare*: all rows checked, tokenized and written down; the model's files in their place; the plan complete.

    source ─blocks─▶ pool: rows → checks → templates → normalized → tokens ─encoded blocks, in order─▶ assembly:
        duplicates rejected, files appended, committed every few blocks ─after the last─▶ split, report, manifest
        ─renamed─▶ prepared/<key>/   (reused if the same was prepared before)

Until the rename it is `prepared/partial-<key>/`: a preparation that was killed, or had no room on the disk, continues
there behind its last commit, and ends with the same bytes. What was rejected is in `rejected.jsonl` of the folder,
what there is to know about the rows in `dataset.json` and `dataset.png`; the run directory gets copies.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from jobs.attempt import PrepareResult
from jobs.data_names import uploaded_name
from jobs.dataset_report import PreparedSummary
from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, Rejected
from jobs.events import Adopted
from jobs.plan import DataPlan, ModelPlan, Plan, make_plan
from jobs.spec import DataSpec, JobSpec
from worker.training.dataset import tokens
from worker.training.dataset.assembly import PICTURE, REJECTED, REPORT, Assembly
from worker.training.dataset.data import FORMAT, PreparedDataset
from worker.training.dataset.encoding import Recipe
from worker.training.dataset.pool import EncoderPool, cores
from worker.training.journal import Journal
from worker.training.models import model_store
from worker.training.models.model_files import read_config, tokenizer_fingerprint
from worker.training.planning.stages import plan_stage
from worker.training.planning.time_plan import RowLengths, with_time
from worker.training.rows.characters import Rewriter
from worker.training.rows.csv_rows import CsvFormat
from worker.training.rows.origin import find_source
from worker.training.rows.reading import format_of, open_source
from worker.training.rows.row import Reader
from worker.training.rows.row_counts import RowCounts
from worker.training.rows.row_filter import RowFilter
from worker.training.rows.sources import Source
from worker.training.rows.text import RowReader, Template, template
from worker.training.settings import TrainerSettings
from worker.training.store import full_disk_named, make_once
from worker.training.tasks.registry import task_of

BLOCK_ROWS = 500
_MOST_COPIED = 1 << 20
"""Bytes of `rejected.jsonl` that the run directory gets."""

log = logging.getLogger("longhaul.trainer")


def prepare(run: RunDir, settings: TrainerSettings, journal: Journal) -> PrepareResult:
    """What goes into job.prepared; plan.json is completed. Raises StageError."""
    spec, plan, again = run.spec(), run.plan(), run.plan_is_final()
    sources = find_sources(spec.data, plan.data, settings, journal)
    hashes = [str(file.sha256) for source in sources for file in source.files]
    templates = template(plan.data.input, "data.input"), template(plan.data.target, "data.target")
    with full_disk_named(settings.models):
        facts = [hashes[: len(sources[0].files)], templates[0].source, templates[1].source]
        model = ready_model(plan.model, sources[0], facts, templates, spec, settings, journal, thorough=again)
    folder = settings.prepared / key_of(sources, hashes, templates, model, spec.data)

    def make(partial: Path) -> None:
        layout = task_of(spec).layout(read_config(model, plan.model.source))
        try:
            write(
                partial,
                sources=sources,
                templates=templates,
                model=model,
                embeddings=layout.shapes[layout.embedding][0],
                data=spec.data,
                journal=journal,
            )
        except BadData:  # nothing of it stays, but what is wrong with which rows has to be known
            if (partial / REJECTED).exists():  # as soon as there are rows
                copy_report(partial, run, REJECTED)
            raise

    def opens(folder: Path) -> bool:
        try:
            PreparedDataset.open(folder, thorough=again, progress=journal.progress)
        except BadData:
            return False
        return True

    if again:  # what is stored may have been found damaged: it is read whole
        refuse_other_content(run, plan, model, folder)
    with full_disk_named(settings.prepared):
        make_once(folder, make, opens, waiting=journal.progress, resumable=True)
    dataset = PreparedDataset.open(folder)
    copy_report(folder, run, REPORT, PICTURE, REJECTED)
    data = plan.data.model_copy(
        update={
            "input": templates[0].source,
            "target": templates[1].source,
            "prepared": str(folder),
            "rows": len(dataset.train),
            "validation_rows": len(dataset.validation),
            "complete": True,
        }
    )
    if again:  # its checkpoints continue: nothing is decided again
        placed = plan.model.model_copy(update={"folder": str(model)})
        complete = plan.model_copy(update={"model": placed, "data": data})
        run.write_plan(complete)
        return done(complete, dataset, None)
    config = read_config(model, plan.model.source)
    longest = task_of(spec).limit(dataset.train, 1).longest
    widths = longest.input_width, longest.target_width
    began = plan.resolved.optimizer if spec.resume_from is not None else None
    memory = plan_stage(run, spec, config, widths, settings, journal, plan.memory, optimizer=began)
    complete = make_plan(spec, plan.model.model_copy(update={"folder": str(model)}), data, settings.device, memory)
    adopted = take_over(run, spec, complete, journal)
    complete = with_time(
        complete,
        spec,
        config,
        RowLengths(dataset.train.input_lengths, dataset.train.target_lengths),
        settings,
        done=adopted.step if adopted else 0,
    )
    run.write_plan(complete)
    return done(complete, dataset, adopted)


def done(plan: Plan, dataset: PreparedDataset, adopted: Adopted | None) -> PrepareResult:
    """What goes into job.prepared."""
    return PrepareResult(
        data=PreparedSummary(**dataset.manifest.report.model_dump(), prepared=str(dataset.folder)),
        steps=plan.steps,
        time=plan.time and plan.time.summary(),
        memory=plan.memory and plan.memory.summary(),
        adopted=adopted,
    )


def refuse_other_content(run: RunDir, plan: Plan, model: Path, dataset: Path) -> None:
    """Rejected (`content_changed`) where a job that has trained would continue with another model or other rows."""
    for param, before, now in (
        ("model", plan.model.folder, model),
        ("data.train", plan.data.prepared, dataset),
    ):
        if param == "model" and plan.model.source == task_of(run.spec()).builtin.name:
            continue  # its tokenizer is made from the rows
        if before is not None and Path(before).name != now.name:
            what, hint = plan.model.source, "bring it back as it was"
            if param != "model":
                rows = [each for each in (run.spec().data.train, run.spec().data.validation) if isinstance(each, str)]
                what = " with ".join(rows)
                for name in filter(None, map(uploaded_name, rows)):
                    hint += f"; `longhaul datasets rm {name}` and `longhaul datasets add FILE --name {name}` do it"
            raise Rejected(
                f"{param}: {what} is not what this job has trained on so far ({now.name}, not {Path(before).name}); it "
                "has changed, or Longhaul has",
                code="content_changed",
                param=param,
                hint=hint,
            )


def take_over(run: RunDir, spec: JobSpec, plan: Plan, journal: Journal) -> Adopted | None:
    """Make the checkpoint that the specification names, if it does, the job's own. Raises as `adoption.adopt`."""
    if spec.resume_from is None:
        return None
    # Imported here: it needs torch, which encoding rows does not.
    from worker.training.checkpoints.adoption import adopt

    return adopt(run, spec, plan, journal)


def find_sources(data: DataSpec, plan: DataPlan, settings: TrainerSettings, journal: Journal) -> list[Source]:
    """The source of training rows, then that of validation rows if there is one; all files at hand and hashed."""
    found = [find_source(data.train, "data.train", data.format, plan.train_revision, settings, journal)]
    if isinstance(data.validation, str):
        revision = plan.validation_revision
        found.append(find_source(data.validation, "data.validation", data.format, revision, settings, journal))
    return [
        replace(source, files=tuple(file.known(source.param, journal.progress) for file in source.files))
        for source in found
    ]


def ready_model(
    plan: ModelPlan,
    train: Source,
    facts: list[Any],
    templates: tuple[Template, Template],
    spec: JobSpec,
    settings: TrainerSettings,
    journal: Journal,
    *,
    thorough: bool,
) -> Path:
    """The folder of config, tokenizer and bf16 safetensors in the model store; made now unless it is there, undamaged.

    `facts` about the training rows decide what the built-in model is learned from. `thorough`: what is there is read.
    """
    task, data, seed = task_of(spec), spec.data, spec.training.seed
    builtin = task.builtin
    if plan.source != builtin.name:
        return model_store.stored_model(plan, settings, task, journal, thorough=thorough)
    made_from = [builtin.version, *facts, data.csv_lists, data.csv_quoting, data.normalize, seed]
    folder = settings.models / f"{builtin.name.removeprefix('builtin:')}-{_hash(made_from)}"

    def build(empty: Path) -> None:
        builtin.build(empty, texts_of(train, templates, data, builtin.tokenizer_rows), seed)
        model_store.seal(empty, builtin.name)
        for file in train.files:  # what the name of the folder says was learned from
            file.refuse_changed(train.param)

    model_store.make_unless_there(folder, build, task, journal, thorough=thorough)
    return folder


def texts_of(train: Source, templates: tuple[Template, Template], data: DataSpec, most: int) -> list[str]:
    """Inputs and targets of the first rows, at least one and at most so many: what the tokenizer is learned from."""
    row_filter = _row_filter(train, templates, data, _typography(data))
    rows = list(islice(row_filter.good_rows(), most))
    if not rows:
        refuse_unusable(row_filter.counts, train, data)
    return [text for texts in rows for text in (texts.input, texts.target)]


def key_of(
    sources: list[Source], hashes: list[str], templates: tuple[Template, Template], model: Path, data: DataSpec
) -> str:
    """Name of the prepared dataset: whatever decides its bytes, hashed. The seed does not."""
    return _hash(
        [
            FORMAT,
            [[format_of(file, source.format) for file in source.files] for source in sources],
            hashes,
            [one.source for one in templates],
            tokenizer_fingerprint(model),
            data.max_input_tokens,
            data.max_target_tokens,
            data.csv_lists,
            data.csv_quoting,
            data.normalize,
            data.validation if isinstance(data.validation, float) else None,
            data.max_invalid_fraction,  # does not change a byte, but decides whether there is a dataset at all
        ]
    )


def write(
    folder: Path,
    *,
    sources: list[Source],
    templates: tuple[Template, Template],
    model: Path,
    embeddings: int,
    data: DataSpec,
    journal: Journal,
    workers: int | None = None,
) -> None:
    """Prepare all rows in `folder`, with so many processes (None: one a core); resumes where an earlier one stopped.

    Raises BadData (`too_many_invalid_rows`, `no_rows`), Rejected (`tokenizer_unusable`, `limit_too_small`), StageError
    (`worker_killed`).
    """
    limits = {"input": data.max_input_tokens, "target": data.max_target_tokens}
    tokenizer = tokens.TokenizerState.read(model)
    tokenizer.refuse_above(embeddings)
    rewrites = tokenizer.rewrites() if data.normalize else None
    rewriter = None if rewrites is None else Rewriter(rewrites)
    first = islice(_row_filter(sources[0], templates, data, rewriter).good_rows(), BLOCK_ROWS)
    tokenizer = tokenizer.tried([text for texts in first for text in (texts.input, texts.target)])
    tokenizer.refuse_without_room(limits)
    recipe = Recipe(*templates, tokenizer, data.max_input_tokens, data.max_target_tokens, rewrites)
    with Assembly(folder, tokenizer.size, len(sources)) as assembly:
        if any(assembly.blocks):
            log.info("resuming behind the %d rows that were prepared before", assembly.rows)
        with EncoderPool(recipe, cores() if workers is None else workers) as pool:
            for number, source in enumerate(sources):
                if number == len(assembly.ends):
                    reader = open_source(source, _columns(templates), CsvFormat.of(data))
                    _add_source(assembly, pool, reader, len(sources), journal)
                refuse_unusable(assembly.source_counts[number], source, data)
        assembly.finish([source.name for source in sources], limits, data.validation)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o444)  # other users read it; nobody writes


def _add_source(assembly: Assembly, pool: EncoderPool, reader: Reader, sources: int, journal: Journal) -> None:
    number = len(assembly.ends)

    def progressed() -> None:
        journal.progress((number + reader.fraction) / sources)

    blocks = reader.blocks(BLOCK_ROWS)
    for _ in islice(blocks, assembly.blocks[number]):  # read, but not parsed
        progressed()
    with closing(pool.encoded(blocks)) as encoded:
        for block in encoded:
            assembly.add(block)
            progressed()
    assembly.end_source()


def refuse_unusable(counts: RowCounts, source: Source, data: DataSpec) -> None:
    """Raise BadData (`too_many_invalid_rows`, `no_rows`) for a source whose rows do not do."""
    counts.refuse_too_many(data.max_invalid_fraction, source.name, counts.read)
    if not counts.kept:
        why = (
            f"{counts.read} read, {counts.invalid} unusable, {counts.duplicates} duplicates of earlier or training rows"
        )
        raise BadData(
            f"{source.param}: no row of {source.name} is left to use ({why})", code="no_rows", param=source.param
        )


def copy_report(folder: Path, run: RunDir, *names: str) -> None:
    """Copy the report into the run directory; of a long list of rejected rows only the beginning."""
    for name in names:
        content = (folder / name).read_bytes() if name != REJECTED else _beginning(folder / name)
        write_atomically(run.path / name, content)


def _beginning(file: Path) -> bytes:
    """The first lines of a file, as many as may be copied."""
    with open(file, "rb") as handle:
        first = handle.read(_MOST_COPIED)
    return first[: first.rfind(b"\n") + 1]


def _row_filter(
    source: Source, templates: tuple[Template, Template], data: DataSpec, rewrite: Rewriter | None
) -> RowFilter:
    blocks = open_source(source, _columns(templates), CsvFormat.of(data)).blocks(BLOCK_ROWS)
    return RowFilter(chain.from_iterable(block.rows() for block in blocks), RowReader(*templates, rewrite))


def _columns(templates: tuple[Template, Template]) -> set[str]:
    return {column for one in templates for column in one.columns}


def _typography(data: DataSpec) -> Rewriter | None:
    return Rewriter() if data.normalize else None


def _hash(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
