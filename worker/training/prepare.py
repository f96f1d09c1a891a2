"""Stage *prepare*: all rows checked, tokenized and written down; the model's files in their place; the plan complete.

The rows become `prepared/<key>/` (`dataset/writing.py`), reused if the same was prepared before. Until it is complete
it is `prepared/partial-<key>/`: a preparation that was killed, or had no room on the disk, continues there behind its
last commit, and ends with the same bytes. Rejected rows are in `rejected.jsonl` of the folder, what there is to know
about the rows in `dataset.json` and `dataset.png`; the run directory gets copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jobs.attempt import PrepareResult
from jobs.data_names import uploaded_name
from jobs.dataset_report import PreparedSummary
from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, DoesNotFit, Rejected
from jobs.events import Adopted
from jobs.memory_plan import DType
from jobs.plan import DataPlan, ModelPlan, Plan, make_plan, resolve_dtype
from jobs.spec import BUILTIN_MODELS, JobSpec
from worker.training.checkpoints.adoption import adopt
from worker.training.checkpoints.source_job import prepared_before
from worker.training.dataset.assembly import PICTURE, REJECTED, REPORT
from worker.training.dataset.data import EARLIER_FORMAT, PreparedDataset
from worker.training.dataset.inspection import inspect_rows
from worker.training.dataset.preview import preview_rows, rewriter_of
from worker.training.dataset.writing import dataset_key, first_texts, labels_of, write_dataset
from worker.training.journal import Journal
from worker.training.models import hub, model_store
from worker.training.models.model_files import find_folder, read_config, tokenizer_fingerprint
from worker.training.planning.stages import plan_stage
from worker.training.planning.time_plan import RowLengths, with_time
from worker.training.rows.origin import Head, find_source
from worker.training.rows.sources import Source
from worker.training.rows.text import Templates, input_template
from worker.training.settings import TrainerSettings
from worker.training.steps.order import mixture_of
from worker.training.store import content_key, full_disk_named, make_once
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Config, Task

log = logging.getLogger("longhaul.trainer")
_NAMED = 5
_MOST_COPIED = 1 << 20
"""Bytes of `rejected.jsonl` that the run directory gets."""


def prepare(run: RunDir, settings: TrainerSettings, journal: Journal) -> PrepareResult:
    """What goes into job.prepared; plan.json is completed. Raises StageError."""
    spec, plan, again = run.spec(), run.plan(), run.plan_is_final()
    dtype = plan.resolved.dtype
    if not again and settings.gpu is not None:  # check may have known of another one, or of none
        dtype = resolve_dtype(spec, settings.gpu, dtype if spec.resume_from is not None else None)
    task = task_of(spec, plan.task, plan.data if again else None)  # what has trained keeps its labels
    begun = again or spec.resume_from is not None
    task = task.reading_as(plan.data if begun else plan.data.model_copy(update={"by_reply": True}))
    planned = plan.data.sources_of(spec)
    sources = find_sources(spec, plan.data, settings, journal, first=not again)
    named = [(each.input, each.target, each.companions) for each in planned]
    if len(sources) > len(planned):  # validation rows of their own
        own, beside = (plan.data.validation_input, plan.data.validation_target), plan.data.validation_companions
        named.append(named[0] if own[1] is None else (own[0], own[1], beside))

    def read_by(task: Task) -> list[tuple[Source, Templates]]:
        inputs = [None if one is None else input_template(one) for one, _, _ in named]
        targets = [task.target_template(other, beside) for _, other, beside in named]
        return list(zip(sources, zip(inputs, targets, strict=True), strict=True))

    read = read_by(task)
    if task.has_labels:
        base = base_config(plan.model, task, settings)
        task = task.labelled(labels_of(read, spec.data, task, journal), base, complete=True)
        read = read_by(task)
    with full_disk_named(settings.models):
        model = ready_model(plan.model, read[: len(planned)], spec, task, settings, journal, dtype, thorough=again)
    asked = spec.data
    if (fraction := plan.data.validation_fraction) is not None:
        asked = asked.model_copy(update={"validation": fraction})
    key = partial(dataset_key, read, tokenizer_fingerprint(model), asked, task)
    folder, before = (settings.prepared / key(format) for format in (None, EARLIER_FORMAT))
    trained_on = plan.data.prepared if again else prepared_before(run, spec)
    if trained_on is not None and Path(trained_on).name == before.name:
        folder = before

    def make(partial: Path) -> None:
        check_preparable(task, spec, earlier=folder == before)
        layout = task.layout(read_config(model, plan.model.source))
        try:
            write_dataset(
                partial,
                sources=read,
                model=model,
                embeddings=layout.shapes[layout.embedding][0],
                data=asked,
                task=task,
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
        check_content(run, plan, model, folder)
    with full_disk_named(settings.prepared):
        make_once(folder, make, opens, waiting=journal.progress, resumable=True)
    dataset = PreparedDataset.open(folder)
    copy_report(folder, run, REPORT, PICTURE, REJECTED)
    if plan.model.source == task.builtin.name and not again:
        preview_tokens(run, read[: len(planned)], spec, task, model)
    rows = dataset.rows_of_sources(len(planned))
    mixture = mixture_of(planned, rows, spec.training.seed)
    planned = [each.model_copy(update={"rows": count}) for each, count in zip(planned, rows, strict=True)]
    lost = model_store.underflow(model)
    if lost:
        log.warning(
            "%d of %d weights are too small for %s and have become 0; they are in %s",
            sum(lost.values()), plan.model.parameters, dtype, ", ".join(sorted(lost)[:_NAMED]),
        )  # fmt: skip
    config = read_config(model, plan.model.source)
    size = task.layout(config).parameters
    found = {
        "folder": str(model), "parameters": size, "new": model_store.new_tensors(model),
        "underflow": sum(lost.values()),
    }  # fmt: skip
    placed = plan.model.model_copy(update=found)
    data = plan.data.model_copy(
        update={
            "sources": tuple(planned) if plan.data.sources else (),
            "prepared": str(folder),
            "rows": mixture.rows,
            "validation_rows": len(dataset.validation if spec.kind == "train" else dataset.train),
            "labels": task.counted(dataset.train),
            "by_reply": task.by_reply,
            "complete": True,
        }
    )
    if again:  # its checkpoints continue: nothing is decided again
        complete = plan.model_copy(update={"model": placed, "data": data})
        run.write_plan(complete)
        return done(complete, dataset, None)
    longest = [task.limit(part, 1).longest for part in (dataset.train, dataset.validation) if len(part)]
    widths = max(shape.input_width for shape in longest), max(shape.target_width for shape in longest)
    began = plan.resolved.optimizer if spec.resume_from is not None else None
    earlier = plan.memory if size == plan.model.parameters else None  # more labels are a larger head
    try:
        memory = plan_stage(run, spec, task, config, widths, settings, journal, earlier, optimizer=began, dtype=dtype)
    except DoesNotFit as error:
        run.write_plan(make_plan(spec, placed, data, settings.device, error.memory, task=task.name))
        raise
    complete = make_plan(spec, placed, data, settings.device, memory, task=task.name)
    adopted = take_over(run, spec, complete, journal)
    epoch = mixture.epoch(0)
    complete = with_time(
        complete,
        spec,
        config,
        RowLengths(dataset.train.input_lengths[epoch], dataset.train.target_lengths[epoch]),
        settings,
        done=adopted.step if adopted else 0,
    )
    run.write_plan(complete)
    return done(complete, dataset, adopted)


def preview_tokens(
    run: RunDir, train: Sequence[tuple[Source, Templates]], spec: JobSpec, task: Task, model: Path
) -> None:
    """Write preview.json again with the tokens of its rows: *check* had no tokenizer of a built-in model."""
    preview = run.preview()
    layout = task.layout(task.builtin.config)
    embeddings = layout.shapes[layout.embedding][0]
    state = task.tokenizer(model)
    rewriter = rewriter_of(spec.data, state)
    learns = spec.learns_new_tokens and task.targets_apart
    sources = []
    for shown, (source, templates) in zip(preview.sources, train, strict=True):
        head = Head(source.name, source.param, source.format, source.files, source.name)
        chosen = inspect_rows(head, spec.data, templates, task, rewriter).shown
        # For a further token, the tokenizer would be made with one less.
        found = preview_rows(
            chosen, templates, spec.data, task, state, rewriter, embeddings + 1, learns_new_tokens=learns
        )
        sources.append(shown.model_copy(update={"rows": found.rows, **found.layout}))
    run.write_preview(preview.model_copy(update={"sources": sources}))


def done(plan: Plan, dataset: PreparedDataset, adopted: Adopted | None) -> PrepareResult:
    """What goes into job.prepared."""
    return PrepareResult(
        data=PreparedSummary(**dataset.manifest.report.model_dump(), prepared=str(dataset.folder)),
        rows_per_epoch=plan.data.rows if plan.data.rows != len(dataset.train) else None,
        steps=plan.steps,
        limited_by=plan.limited_by,
        time=plan.time and plan.time.summary(),
        memory=plan.memory and plan.memory.summary(),
        adopted=adopted,
    )


def check_preparable(task: Task, spec: JobSpec, *, earlier: bool) -> None:
    """Rejected (`content_changed`) where a job would continue with rows that an earlier version has prepared, and that
    are lost. `earlier`: their name says so; of chats `by_reply` does, too."""
    if earlier or (task.name == "causal" and not task.by_reply):
        raise Rejected(
            f"data.train: the prepared rows of {' with '.join(spec.data.names.values())} that this job has trained on "
            "so far are missing or damaged; an earlier version of Longhaul prepared them, and this one prepares rows "
            "otherwise",
            code="content_changed",
            param="data.train",
            hint="bring back the folder of prepared rows, or train anew in another job, without resume_from",
        )


def check_content(run: RunDir, plan: Plan, model: Path, dataset: Path) -> None:
    """Rejected (`content_changed`) where a job that has trained would continue with another model or other rows."""
    for param, before, now in (
        ("model", plan.model.folder, model),
        ("data.train", plan.data.prepared, dataset),
    ):
        if param == "model" and plan.model.source in BUILTIN_MODELS:
            continue  # its tokenizer is made from the rows
        if before is not None and Path(before).name != now.name:
            what, hint = plan.model.source, "bring it back as it was"
            if param != "model":
                rows = list(run.spec().data.names.values())
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
    return adopt(run, spec, plan, journal)


def find_sources(
    spec: JobSpec, plan: DataPlan, settings: TrainerSettings, journal: Journal, *, first: bool
) -> list[Source]:
    """The sources of training rows, then that of validation rows if there is one; all files at hand and hashed.

    `first`: of what was prepared before, others see that it is the same. Raises BadData (`file_changed`).
    """
    revisions = [*(each.revision for each in plan.sources_of(spec)), plan.validation_revision]
    found = [
        find_source(name, param, spec.data.format, revision, settings, journal)
        for (param, name), revision in zip(spec.data.names.items(), revisions, strict=False)
    ]
    known = [
        replace(source, files=tuple(file.known(source.param, journal.progress) for file in source.files))
        for source in found
    ]
    for source, digest in zip(known, plan.digests if first else (), strict=False):
        if digest not in (None, source.files[0].digest(source.param)):
            raise BadData(
                f"{source.param}: {source.name} has changed since it was checked: plan and preview are those of other "
                "rows",
                code="file_changed", param=source.param, hint="submit again, so that it is checked as it is now",
            )  # fmt: skip
    return known


def ready_model(
    plan: ModelPlan,
    train: Sequence[tuple[Source, Templates]],
    spec: JobSpec,
    task: Task,
    settings: TrainerSettings,
    journal: Journal,
    dtype: DType,
    *,
    thorough: bool,
) -> Path:
    """The folder of config, tokenizer and safetensors in the model store; made now unless it is there, undamaged.

    The built-in model is learned from `train`, the training rows. `dtype`: of the weights. `thorough`: what is there is
    read.
    """
    data, seed, builtin = spec.data, spec.training.seed, task.builtin
    if plan.source != builtin.name:
        return model_store.stored_model(plan, settings, task, journal, dtype=dtype, seed=seed, thorough=thorough)
    facts = [[source.hashes, *(each and each.decides for each in both)] for source, both in train]
    learned_from = facts[0] if len(facts) == 1 else facts
    made_from = [
        builtin.version,
        *learned_from,
        data.csv_lists,
        data.csv_quoting,
        data.normalize,
        seed,
        *task.model_facts(seed),
    ]
    folder = settings.models / f"{builtin.name.removeprefix('builtin:')}-{content_key(made_from)}"

    def build(empty: Path) -> None:
        builtin.build(empty, first_texts(train, data, builtin.tokenizer_rows), seed)
        model_store.seal(empty, builtin.name)
        for source, _ in train:
            for file in source.files:  # what the name of the folder says was learned from
                file.check_unchanged(source.param)

    model_store.make_unless_there(folder, build, task, journal, thorough=thorough)
    if dtype == "bfloat16":
        return folder
    converted = folder.with_name(f"{folder.name}-{dtype}")

    def convert(empty: Path) -> None:
        model_store.convert(folder, empty, builtin.name, task, journal, seed, dtype)

    model_store.make_unless_there(converted, convert, task, journal, thorough=thorough)
    return converted


def base_config(plan: ModelPlan, task: Task, settings: TrainerSettings) -> Config:
    """The config.json of the model that the job names."""
    if plan.source == task.builtin.name:
        return task.builtin.config
    if plan.revision is None:
        return read_config(find_folder(settings, plan.source), plan.source)
    return hub.look_up(f"{plan.source.partition('@')[0]}@{plan.revision}", settings).config


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
