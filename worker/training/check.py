"""Stage *check*: is the job possible at all? Answers within a minute, and needs neither weights nor a GPU.

Looks at the paths, the model's config and the first 10,000 rows; then, for rows of the longest lengths that the job
allows, at memory; and writes the provisional plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jobs.attempt import CheckResult
from jobs.companions import LEFT_OUT, NO_COMPANIONS, CompanionColumns, UnreadColumn
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, DoesNotFit, Mistakes, Rejected
from jobs.plan import CheckSummary, DataPlan, ModelPlan, SourcePlan, make_plan, resolve_dtype
from jobs.preview import LABELS_SHOWN, DataPreview, SourcePreview, of_rows
from jobs.spec import JobSpec
from worker.training.checkpoints import source_job
from worker.training.checkpoints.source_job import SourceJob
from worker.training.dataset.conversion import check_converted
from worker.training.dataset.inspection import (
    ROWS,
    FirstRows,
    Inspected,
    classifying,
    fields_offered,
    header_offered,
    inspect_rows,
    label_offered,
    like_labels,
    survey,
    texts_offered,
    unrecognized,
    without_earlier,
)
from worker.training.dataset.preview import preview_rows, rewriter_of
from worker.training.dataset.split import auto_fraction, split
from worker.training.journal import Journal
from worker.training.models import hub
from worker.training.models.model_files import find_folder, names_folder, readable_config, validate_folder
from worker.training.planning.stages import plan_stage
from worker.training.planning.time_plan import RowLengths, with_time
from worker.training.rows.characters import Rewriter
from worker.training.rows.chat import CHAT_FIELDS
from worker.training.rows.companions import companions_of, unread_columns
from worker.training.rows.csv_rows import CsvFormat
from worker.training.rows.labels import UNLABELLED, labels_alike
from worker.training.rows.origin import Allowance, Head, find_head
from worker.training.rows.reading import format_of, naming_part
from worker.training.rows.row import NO_LABEL, NOT_UTF8, REPAIRS, end_in_lf, reencode
from worker.training.rows.row_filter import UInt64
from worker.training.rows.text import UNUSED_TOOLS, Templates
from worker.training.settings import TrainerSettings
from worker.training.steps.order import rounded
from worker.training.tasks.causal.chat_templates import with_chat_template
from worker.training.tasks.columns import say_which
from worker.training.tasks.registry import assumed_task, builtin_of, task_for
from worker.training.tasks.task import Config, Task

_MANY_COLUMNS = 1000
_READINGS = 4
"""Of each source: for its columns, for what stands beside them, for its rows, and again for those by their labels."""
_ITEMS = 100
"""Of a list: those that are looked into."""
_TABLE = "a table needs a header line and as many fields in each row; a quote inside a quoted field is written twice"
_NEEDED = {
    "jsonl": 'JSON lines need one JSON object a line, such as {"input": "…", "target": "…"}',
    "csv": _TABLE,
    "tsv": _TABLE,
    "parquet": "Parquet needs text that is UTF-8",
    "workbook": "a sheet needs a row that names the columns, and rows below it",
}


@dataclass(frozen=True)
class ReadSource:
    """A source whose first rows were read."""

    head: Head
    templates: Templates
    rows: Inspected
    read_as: str | None = None
    """What its rows were recognized as; None: the job names its templates."""
    unread: tuple[UnreadColumn, ...] = ()

    @property
    def input(self) -> str | None:
        """Template of the input, as resolved."""
        input, _ = self.templates
        return None if input is None else input.source

    def again(self, spec: JobSpec, task: Task, rewriter: Rewriter | None) -> ReadSource:
        """Read by a task that knows its labels. Raises as `inspect_rows`."""
        target = self.templates[1]
        templates = self.templates[0], task.target_template(target.source, target.companions)
        return replace(self, templates=templates, rows=inspect_rows(self.head, spec.data, templates, task, rewriter))

    def planned(self, weight: float) -> SourcePlan:
        """As in the plan, with the rows of an epoch as they are estimated."""
        return SourcePlan(
            name=self.head.name, place=self.head.place, revision=self.head.revision, input=self.input,
            target=self.templates[1].source, companions=self.templates[1].companions, read_as=self.read_as,
            reading=self.rows.reading, weight=weight, rows=self.rows.estimated,
        )  # fmt: skip


def check(run: RunDir, settings: TrainerSettings, journal: Journal) -> CheckResult:
    """What goes into job.checked; preview.json and plan.json are written. Raises StageError.

    All that is wrong with data and model is raised together.
    """
    spec = run.spec()
    before = find_source_job(run, spec)
    names = [(param, name) for param, name in spec.data.names.items() if param != "data.validation"]
    began = before.plan.data.sources_of(before.spec) if before else []
    earlier = {param: each for (param, _), each in zip(names, began, strict=False)}
    mistakes = Mistakes()
    allowance = Allowance(_READINGS * len(spec.data.names))
    train: list[Head] = []
    for param, name in names:
        commit = earlier[param].revision if param in earlier else None
        with mistakes.kept_back():
            train.append(find_head(name, param, spec.data.format, settings, commit, allowance))
    own = spec.data.validation_name
    commit = before.plan.data.validation_revision if before else None
    validation = None
    if own:
        with mistakes.kept_back():
            validation = find_head(own, "data.validation", spec.data.format, settings, commit, allowance)
    journal.progress(0.1)
    with mistakes.kept_back():
        dtype = resolve_dtype(spec, settings.gpu, before.plan.resolved.dtype if before else None)
    with mistakes.kept_back():
        spec = spec if before else with_chat_template(spec, settings)
    task, state, rewriter = assumed_task(spec), None, None
    with mistakes.kept_back():
        model, config, tokenizer, task = inspect_model(spec, settings, before.plan.model.revision if before else None)
        task = task.reading_as(before.plan.data) if before else task
        check_metrics(spec, task.name)
        state = None if tokenizer is None else task.tokenizer(tokenizer)
        rewriter = rewriter_of(spec.data, state, of_bytes=task.builtin.of_bytes)
    journal.progress(0.3)
    weights = {each.source: each.weight for each in spec.data.sources}
    columns_by_source: dict[str, set[str]] = {}
    for head in [*train, *([validation] if validation else [])]:
        with mistakes.kept_back():
            columns_by_source[head.param] = columns_of(head, CsvFormat.of(spec.data))
    everywhere = set[str]().union(*columns_by_source.values())
    found: list[ReadSource] = []
    unread, table = [], CsvFormat.of(spec.data)
    for head in train:
        if (columns := columns_by_source.get(head.param)) is None:
            continue
        known = earlier[head.param].companions if head.param in earlier else None
        with mistakes.kept_back(), naming_part(head.files, head.param, head.format, table):
            try:
                templates, beside = read_by(head, columns, everywhere, spec, task, known)
            except BadData as error:
                unread.append(unrecognized(head, columns, spec.data))
                if error.detail_code == "no_usable_columns":
                    error.hint = better_hint(error, head, columns, spec, task)
                raise
            read_as = None if spec.data.target else task.row_format(columns)
            try:
                rows = inspect_rows(head, spec.data, templates, task, rewriter)
            except BadData as error:
                error.hint = fields_offered(head, str(error), templates, columns, spec.data) or error.hint
                raise
            found.append(ReadSource(head, templates, rows, read_as, beside))
    journal.progress(0.4)
    validating: ReadSource | None = None
    if validation and (columns := columns_by_source.get(validation.param)) is not None:
        with mistakes.kept_back(), naming_part(validation.files, validation.param, validation.format, table):
            known = before.plan.data.validation_companions if before else None
            templates, _ = read_by(validation, columns, everywhere, spec, task, known)
            rows = inspect_rows(validation, spec.data, templates, task, rewriter)
            validating = ReadSource(validation, templates, rows)
    if unread:  # people look at the rows, and name the columns
        run.write_preview(DataPreview(sources=[], unrecognized=tuple(unread)))
    mistakes.raise_all()
    looked_at = [*found, *([validating] if validating else [])]
    labels = sum((each.rows.labels for each in looked_at), Counter[str]())
    complete, usable = all(each.rows.all_rows for each in looked_at), sum(len(each.rows.keys) for each in looked_at)
    task = task.labelled(labels, config, complete=complete, usable=usable)
    if any(each.templates[0] and each.templates[0].pair for each in looked_at):
        task = task.of_pairs(state, config)
    if task.labels and not labels.keys() <= {label.name for label in task.labels}:  # some stand for others, or for none
        looked_at = [each.again(spec, task, rewriter) for each in looked_at]
    left = without_earlier([(each.head, each.rows) for each in looked_at])
    looked_at = [replace(each, rows=rows) for each, rows in zip(looked_at, left, strict=True)]
    found, validating = looked_at[: len(found)], looked_at[-1] if validating else None
    sources = [each.planned(weights[each.head.name]) for each in found]
    fraction = None
    if validating:
        held_out = validating.rows.estimated
    else:
        inspections = [each.rows for each in found]
        if spec.data.validation == "auto":
            fraction = before.validation_fraction if before else fraction_of(inspections)
        asked = spec.data.validation if fraction is None else fraction
        sources, held_out = without_validation(sources, inspections, asked)
    noticed_of_model = task.noticed(config)
    config = task.adapted(config)
    layout = task.layout(config)
    model = model.model_copy(update={"parameters": layout.parameters})
    embeddings = layout.shapes[layout.embedding][0]
    previews = []
    unshown: Counter[str] = Counter()
    examples = []
    for source, each in zip(sources, found, strict=True):
        if tokenizer is not None:
            check_converted(tokenizer, each.rows.first)
        described = source.model_dump(include={"name", "weight", "reading", "read_as", "input", "target", "companions"})
        described |= {"unread": each.unread, "duplicates": each.rows.duplicates, "all_rows": each.rows.all_rows}
        described["left_out"] = {why: count for why, count in each.rows.invalid.items() if why.startswith(LEFT_OUT)}
        learns = spec.learns_new_tokens and task.targets_apart
        shown = preview_rows(
            each.rows.shown, each.templates, spec.data, task, state, rewriter, embeddings, learns_new_tokens=learns
        )
        if not shown.rows and shown.rejected:
            raise rejected_by_tokenizer(shown.rejected, each.head)
        with_tools = each.rows.noticed[UNUSED_TOOLS]
        if not task.has_labels:
            described |= each.rows.layout | shown.layout
        previews.append(SourcePreview(**described, rows=shown.rows, rows_with_tools=with_tools))
        unshown += shown.rejected
        examples.append(source.model_copy(update={"rows": round(source.rows * shown.examples)}))
    held_out = round(held_out * sum(each.rows for each in examples) / sum(each.rows for each in sources))
    sources = examples
    run.write_preview(
        DataPreview(
            sources=previews,
            labels=task.labels[:LABELS_SHOWN],
            labels_in_all=len(task.labels),
            labels_alike=labels_alike([label.name for label in task.labels]),
            labels_noticed=noticed_of_labels(task, looked_at),
            validation_noticed=noticed_of_validation(validating),
            model_noticed=noticed_of_model,
            new_tensors=model.new,
        )
    )
    journal.progress(0.5)
    data = DataPlan(
        train=sources[0].place,
        train_revision=sources[0].revision,
        validation=validation.place if validation else None,
        validation_revision=validation.revision if validation else None,
        validation_input=validating and validating.input,
        validation_target=validating and validating.templates[1].source,
        validation_companions=validating.templates[1].companions if validating else NO_COMPANIONS,
        input=sources[0].input,
        target=sources[0].target,
        companions=sources[0].companions,
        sources=() if isinstance(spec.data.train, str) else tuple(sources),
        rows=sum(each.rows_per_epoch for each in sources),
        validation_fraction=fraction,
        validation_rows=held_out if spec.kind == "train" else sum(each.rows for each in sources),
        digests=tuple(each.head.digest for each in looked_at),
        evaluation_rows="random",
        labels_read=task.reads_labels,
        pairs_read=task.reads_pairs,
        separator=task.separator,
        by_reply=task.by_reply,
        chat_template=task.chat_template,
        ends_kept=task.keeps_ends,
        labels=task.labels,
    )
    longest = rounded(np.array(list(task.limits(spec.data).values())))
    widths = int(longest[0]), 1 if task.has_labels else int(longest[1])
    optimizer = before.optimizer if before else None
    try:
        memory = plan_stage(run, spec, task, config, widths, settings, journal, optimizer=optimizer, dtype=dtype)
    except DoesNotFit as error:  # what it would need can be looked at, and compared with other jobs
        run.write_plan(make_plan(spec, model, data, settings.device, error.memory, task=task.name))
        raise
    plan = with_time(
        make_plan(spec, model, data, settings.device, memory, task=task.name),
        spec,
        config,
        RowLengths.guessed(lengths_of(sources, [each.rows.characters for each in found]), spec.data, task),
        settings,
        done=before.step if before else 0,
    )
    if not run.plan_is_final():
        run.write_plan(plan)
    summary = CheckSummary(
        task=task.name,
        model=model.source if model.revision is None else f"{model.source} (commit {model.revision})",
        parameters=model.parameters,
        train=", ".join(each.text for each in sources),
        rows_looked_at=sum(each.rows.looked_at for each in looked_at),
        rows_estimated=sum(each.rows.estimated for each in found),
        invalid_rows=dict(sum((Counter(each.rows.invalid) for each in looked_at), unshown)),
        duplicates=sum(each.rows.duplicates for each in looked_at),
        all_rows=all(each.rows.all_rows for each in looked_at),
        input=data.input,
        target=data.target,
        reading="; ".join(dict.fromkeys(each.reading for each in sources if each.reading)) or None,
        read_as=", ".join(dict.fromkeys(each.read_as for each in sources if each.read_as)) or None,
        labels=len(task.labels) or None,
        new_tensors=list(model.new) or None,
        steps=plan.steps,
        limited_by=plan.limited_by,
        resolved=plan.resolved,
        time=plan.time and plan.time.summary(),
        memory=memory.summary(),
        resume_from=before and before.summary(spec, plan),
    )
    return CheckResult(plan=summary)


def noticed_of_labels(task: Task, read: list[ReadSource]) -> tuple[str, ...]:
    """What people should know of how labels are read, a sentence each."""
    if without := sum(each.rows.invalid.get(NO_LABEL, 0) for each in read):
        left_out = f"{UNLABELLED} is taken for no label, and {without:,} rows that have it are left out"
        return (f"{left_out}; to learn it, name all labels in task.labels", *task.labels_noticed)
    targets = sum((each.rows.targets for each in read), Counter[str]())
    templates = {(each.input, each.templates[1].source) for each in read}
    if not task.has_labels and all(each.rows.targets for each in read) and like_labels(targets) and len(templates) == 1:
        [(input, target)] = templates
        if input is None:  # of chats the reply, after all that comes before it
            chats = read[0].templates[1]
            if not (chats.of_chats and chats.alone):
                return task.labels_noticed
            input, target = (f"{{{chats.placeholders[0].column}.{field}}}" for field in CHAT_FIELDS)
        line = classifying(input, target)
        return (f"the targets look like {len(targets)} labels; a classifier learns them, with {line}",)
    return task.labels_noticed


def noticed_of_validation(read: ReadSource | None) -> tuple[str, ...]:
    """What people should know of validation rows of their own, a sentence each."""
    if read is None or not read.rows.duplicates:
        return ()
    of = of_rows(all_rows=read.rows.all_rows)
    return (
        f"{read.head.name}: left out: equal to a training row, or to an earlier one: {read.rows.duplicates:,} {of}",
    )


def read_by(
    head: Head,
    columns: set[str],
    everywhere: set[str],
    spec: JobSpec,
    task: Task,
    before: CompanionColumns | None,
) -> tuple[Templates, tuple[UnreadColumn, ...]]:
    """What the rows of a source are read by; and its columns that nobody reads, though they seem to mean something.

    `before`: the companions by which the job that is resumed from reads the same rows.

    Raises BadData and Rejected as `Task.templates`.
    """
    data = spec.data
    input, target = task.templates(data.input, data.target, columns, head.name, everywhere)
    values = survey(head, CsvFormat.of(data))
    read = {column for one in (input, target) if one for column in one.columns}
    recognized, held_out = data.target is None, head.param == "data.validation" or spec.kind == "evaluate"
    if (companions := before) is None:
        companions = companions_of(values, read, recognized=recognized, labelled=task.has_labels, held_out=held_out)
    unread = unread_columns(values, read | set(companions.names), labelled=task.has_labels, held_out=held_out)
    return (input, task.target_template(target.source, companions)), unread


def better_hint(error: BadData, head: Head, columns: set[str], spec: JobSpec, task: Task) -> str | None:
    """What helps where no columns are recognized, after a look at what is in them."""
    if task.squares:  # what looks like labels or texts is no score
        return header_offered(head, spec.data) or error.hint
    hint = header_offered(head, spec.data) or label_offered(head, columns, spec.data, classifies=task.has_labels)
    if hint is None and error.hint == say_which(columns):
        hint = texts_offered(head, columns, spec.data)
    return hint or error.hint


def check_metrics(spec: JobSpec, task: str) -> None:
    """Raise Rejected (`unknown_metric`) for a metric that the evaluations of the task do not have."""
    for key, why in spec.lacking_metrics(task).items():
        param = ".".join(key)
        raise Rejected(f"{param}: {why}", code="unknown_metric", param=param, hint="name one of these")


def rejected_by_tokenizer(rejected: Counter[str], head: Head) -> BadData:
    """The error where *prepare* would reject the rows: the first, the longest and the last all are, by reason."""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in rejected.most_common(3))
    [(most, _)] = rejected.most_common(1)
    looked_at = f"of {rejected.total()} rows of {head.name}, the first, the longest and the last"
    return BadData(
        f"{head.param}: {looked_at}, none can be used ({reasons})",
        code="no_rows",
        param=head.param,
        hint=REPAIRS.get(most, "repair these rows"),
    )


def without_validation(
    sources: list[SourcePlan], found: list[Inspected], validation: float | str
) -> tuple[list[SourcePlan], int]:
    """The sources less the rows that a fraction holds out, and how many those are."""
    assert isinstance(validation, float)
    total = sum(rows.estimated for rows in found)
    held_out = int(total * validation)
    if (together := all_keys(found)) is not None:
        held_out = len(split(together, [len(together)], validation)["validation"])
    shares = [round(each.rows * held_out / total) for each in sources]
    return [
        each.model_copy(update={"rows": max(1, each.rows - share)}) for each, share in zip(sources, shares, strict=True)
    ], held_out


def fraction_of(found: list[Inspected]) -> float:
    """What `data.validation` of `auto` becomes."""
    keys = all_keys(found)
    return auto_fraction(sum(rows.estimated for rows in found) if keys is None else len(keys), keys)


def all_keys(found: list[Inspected]) -> UInt64 | None:
    """[rows] as of `split`; None: not all rows were looked at."""
    keys = [rows.split_keys for rows in found if rows.split_keys is not None]
    return np.concatenate(keys) if len(keys) == len(found) else None


def lengths_of(sources: list[SourcePlan], characters: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Characters of rows that stand for an epoch: of one source, all; of several, as many of each as its share says."""
    if len(sources) == 1:
        return characters[0]
    total = sum(each.rows_per_epoch for each in sources)
    chosen = []
    for each, known in zip(sources, characters, strict=True):
        count = max(1, round(ROWS * each.rows_per_epoch / total))
        chosen += [known[place] for place in np.linspace(0, len(known) - 1, count).astype(int)]
    return chosen


def find_source_job(run: RunDir, spec: JobSpec) -> SourceJob | None:
    """The job to resume from, if the specification names one. Raises Rejected as `source_job.find`."""
    if spec.resume_from is None:
        return None
    return source_job.find(run, spec)


def inspect_model(
    spec: JobSpec, settings: TrainerSettings, commit: str | None = None
) -> tuple[ModelPlan, Config, Path | None, Task]:
    """Which weights, and how many, their config.json, the folder of their tokenizer, and the task; nothing is loaded.

    A built-in model has no tokenizer before *prepare*. `commit`: the one of a hub model that a run began with; None:
    what the name stands for now. Raises Rejected, for a folder also as the guards would later.
    """
    source = spec.model
    if (task := builtin_of(spec)) is not None:
        config = task.builtin.config
        return ModelPlan(source=source, parameters=task.layout(config).parameters), config, None, task
    if names_folder(source):
        folder = find_folder(settings, source)
        config = readable_config(folder, source)
        task = task_for(spec, config, source)
        found_in = validate_folder(folder, source, task)
        layout = task.layout(config)
        new = tuple(sorted(layout.shapes.keys() - found_in.keys() - set(layout.optional)))
        return ModelPlan(source=source, folder=str(folder), parameters=layout.parameters, new=new), config, folder, task
    found = hub.look_up(f"{source.partition('@')[0]}@{commit}" if commit else source, settings)
    task = task_for(spec, found.config, source)
    layout = task.layout(found.config)
    new = tuple(sorted(name for group in layout.new for name in group))
    plan = ModelPlan(source=source, revision=found.commit, parameters=layout.parameters, new=new)
    return plan, found.config, hub.folder_of(found, settings), task


def columns_of(head: Head, csv: CsvFormat | None = None) -> set[str]:
    """Names of the columns in the first rows, and of what is in them (`translation.en`, `messages[0].content`).

    Raises BadData (`no_rows`) when there is no row at all.
    """
    format = format_of(head.files[0], head.format, head.param)
    if format == "parquet":  # others may hold what cannot be read
        from worker.training.rows.parquet_rows import ParquetReader  # here: pyarrow starts a thread

        parquet = ParquetReader(head.files[0], head.param, ())
        if next(parquet.blocks(1), None) is not None:
            return set(parquet.names) | set(parquet.fields)
    columns: set[str] = set()
    unreadable: Counter[str] = Counter()
    row = None
    for row in FirstRows(head, csv=csv):
        if row.columns is None:
            unreadable[str(row.defect)] += 1
            continue
        columns |= row.columns.keys()
        columns |= {field for name, value in row.columns.items() for field in _fields_of(name, value)}
        # JSON objects may each have other keys; tables have one header.
        if len(columns) > _MANY_COLUMNS or format != "jsonl":
            break
    if row is None:
        raise BadData(
            f"{head.param}: {head.name} holds no row", code="no_rows", param=head.param, hint="was it written in full?"
        )
    if not columns and unreadable.keys() == {NOT_UTF8}:
        raise BadData(
            f"{head.param}: the first rows of {head.name} are not UTF-8", code="wrong_encoding", param=head.param,
            hint=reencode(head.name),
        )  # fmt: skip
    if not columns and unreadable:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in unreadable.most_common(3))
        repairs = REPAIRS
        if format == "jsonl" and "\r" in row.text.strip():
            repairs = dict.fromkeys(unreadable, end_in_lf(head.name))
        raise BadData(
            f"{head.param}: none of the first rows of {head.name} can be read ({reasons})",
            code="no_usable_columns",
            param=head.param,
            hint=repairs.get(
                unreadable.most_common(1)[0][0],
                f"{_NEEDED[format]}; if it is another format, say which in data.format",
            ),
        )
    return columns


def _fields_of(name: str, value: object) -> set[str]:
    """What is in an object, or in the objects of a list, as a template names it; of a list, by the first place."""
    if isinstance(value, dict):
        return {f"{name}.{key}" for key in value}
    items = value[:_ITEMS] if isinstance(value, list) else []
    return {f"{name}[0].{key}" for item in items if isinstance(item, dict) for key in item}
