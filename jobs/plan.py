"""plan.json: what check and prepare found out, and what every `auto` of the job became."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic.json_schema import SkipJsonSchema

from jobs.companions import NO_COMPANIONS, CompanionColumns
from jobs.errors import Rejected
from jobs.evaluation_metrics import LabelPlan
from jobs.frozen import Frozen, left_out
from jobs.gpus import REFERENCE, GpuFacts, short_name
from jobs.memory_plan import DType, MemoryPlan, MemorySummary, OptimizerName
from jobs.spec import PAIR, FullMethod, JobSpec, TrainingSpec
from jobs.text.units import durations_alike, format_duration, format_figure, format_number, format_share
from jobs.verdict import LEAST_ROWS

EXPECTED_SHARE = 0.4
"""Share of a GPU's limit that a job is expected to reach while nothing was measured; recomputation counts as work.

Five sixths of what our roofline model gives XL on an RTX 5090 with T5 as shipped (48 %). Others report, of model FLOPs
alone: T5-base on an A100, compiled (nanoT5), 62 %; FLAN-T5-XL under ZeRO-3 on eight A100, 21 %.
"""

FEW_STEPS = 50
"""A run of fewer hardly moves the weights."""

StepLimit = Literal["epochs", "max_steps", "max_hours", "early_stopping"]
"""What decides how many steps a run has: a key of `training`."""

RowChoice = Literal["first", "random"]
"""Which of the rows that are held out an evaluation looks at, where it does not look at all."""


class ModelPlan(Frozen):
    """Which weights exactly."""

    source: str
    """As in the job: hub id, folder, or builtin."""
    revision: str | None = None
    """Commit of a hub model; every attempt uses this one."""
    folder: str | None = None
    """Absolute path of the safetensors, config and tokenizer; known after prepare."""
    parameters: int
    """Counted from the config, without loading a weight."""
    new: tuple[str, ...] = ()
    """Tensors that the model named does not have, and that training begins with at random: a classifier's head. Of a
    hub model exact after prepare."""
    underflow: int = 0
    """Weights that are too small for float16 and have become 0; known after prepare, where the model is float16."""


class SourcePlan(Frozen):
    """One source of training rows."""

    name: str
    """As in the job."""
    place: str
    """Absolute path of the file, or the hub data set as in the job."""
    revision: str | None = None
    """Commit of a hub data set; every attempt uses this one."""
    input: str | None
    """Template, as resolved; null: there is a target alone."""
    target: str
    """Template, as resolved."""
    reading: str | None = None
    """What of the file is read, and how, where its name does not say: the sheet of a workbook, the file in an archive,
    the encoding of the first rows; null: nothing of that."""
    read_as: str | None = None
    """What its rows were recognized as by their columns; null: the job names its templates."""
    companions: CompanionColumns = NO_COMPANIONS
    """Columns beside input and target that its rows are read by."""
    weight: float = 1.0
    """How often each row occurs in an epoch."""
    rows: int = 0
    """Training rows; before prepare, as estimated by check."""

    @property
    def text(self) -> str:
        """Its name, with what is special about it."""
        named = self.name if self.revision is None else f"{self.name} (commit {self.revision})"
        return named if self.weight == 1 else f"{named} (weight {self.weight:g})"

    @property
    def rows_per_epoch(self) -> int:
        """As the weight says, rounded; at least one of any."""
        return max(1, round(self.weight * self.rows)) if self.rows else 0


class DataPlan(Frozen):
    """Which rows exactly."""

    train: str
    """Absolute path of the source file, or the hub data set as in the job."""
    train_revision: str | None = None
    """Commit of a hub data set; every attempt uses this one."""
    validation: str | None = None
    """Absolute path of the source file of validation rows (or hub data set), if they have one of their own."""
    validation_revision: str | None = None
    """Commit of theirs."""
    validation_input: str | None = None
    """Their template, as resolved. Null: they have none."""
    validation_target: str | None = None
    """Likewise. Null: they have no file of their own, or it is read like the training rows."""
    validation_companions: CompanionColumns = NO_COMPANIONS
    """Columns beside these that validation rows of their own are read by."""
    input: str | None
    """Template, as resolved; of several sources the first one's. Null: there is a target alone."""
    target: str
    """Template, as resolved; as the input's."""
    companions: CompanionColumns = NO_COMPANIONS
    """Columns beside input and target that rows are read by; of several sources the first one's."""
    sources: tuple[SourcePlan, ...] = ()
    """Where `data.train` names several: all of them; else empty."""
    digests: tuple[str | None, ...] = ()
    """By which *prepare* finds that a file is another than *check* read, by its size and its first and last 8 MiB: of
    the files of training rows in their order, then of that of validation rows. Null: a hub data set. Empty in plans of
    earlier versions."""
    prepared: str | None = None
    """Absolute path of the prepared dataset; known after prepare."""
    rows: int
    """Rows of an epoch: all training rows, or as many as the weights of several sources make of them. Before prepare,
    as estimated by check."""
    validation_rows: int = 0
    """Rows held out; before prepare, as estimated by check."""
    validation_fraction: float | None = None
    """Of the rows, held out: what `data.validation` of `auto` has become. Null: the job says it."""
    evaluation_rows: RowChoice = "first"
    """Which of them an evaluation looks at, where it does not look at all: always the same `random` ones. Plans of
    earlier versions do not say it, and their runs stay with the first."""
    labels_read: bool = False
    """Task `classification`: whether a label of a row may stand for another (`1.0` for `1`), for several, or for none.
    False in plans of earlier versions, whose rows keep the labels that are written there."""
    pairs_read: bool = False
    """Of an encoder: whether two texts that are recognized are a pair. False in plans of earlier versions,
    which read them as one text with words in front."""
    separator: int | None = None
    """Of an encoder: the token behind which, the first of its row, the token types of a pair are 1. Null: the
    rows are no pairs, or the model is told of no types."""
    by_reply: bool = False
    """Task `causal`: whether each reply of a chat is learned as the chat template writes it where it is the last. False
    in plans of earlier versions, which took all replies from the text of the whole chat."""
    chat_template: str | None = None
    """Task `causal`: the Jinja text of `data.chat_template`, as it was read by check. Null: the tokenizer's own."""
    ends_kept: bool = False
    """Task `causal`: whether texts keep the white space that they begin and end with. False in plans of earlier
    versions, whose rows lost it."""
    labels: tuple[LabelPlan, ...] = ()
    """Task `classification`: the classes, in the order of their numbers; before prepare, those of the first rows."""
    complete: bool = False
    """Whether all rows have been looked at."""

    def sources_of(self, spec: JobSpec) -> Sequence[SourcePlan]:
        """Every source of training rows, also where there is one."""
        [name, *_] = spec.data.sources
        alone = SourcePlan(
            name=name.source, place=self.train, revision=self.train_revision, input=self.input, target=self.target,
            companions=self.companions, rows=self.rows,
        )  # fmt: skip
        return self.sources or (alone,)


class Resolved(Frozen):
    """Every `auto` of the job, decided."""

    micro_batch: int
    """Rows of the longest shape that go through the model at once."""
    activation_checkpointing: int
    """Activations of every n-th layer are recomputed; 0: none."""
    optimizer: OptimizerName = "adamw"
    """Which one."""
    dtype: DType = "bfloat16"
    """Type of the model in memory (`method.base_dtype`); beside `float16`, adapters are float32, and the loss is
    scaled."""
    compile: bool = False
    """Whether layers run compiled."""
    gpus: int = 1
    """That train together (`resources.gpus`)."""


class EvaluationTime(Frozen):
    """What the evaluations of a job take, before the first is measured: an expectation."""

    count: int
    """Evaluations, that before the first step included."""
    seconds: float
    """Of each: all its rows once through the model, then a token at a time of the texts that it generates."""
    share: float
    """Of the whole run, 0 to 1."""

    @property
    def text(self) -> str:
        """For people, such as `13 evaluations of about 40 s, 2 % of the run`."""
        times = f"{self.count:,} evaluation{'s' if self.count > 1 else ''} of"
        return f"{times} about {format_duration(self.seconds)}, {format_share(self.share)} of the run"


class TimeFigures(Frozen):
    """How long all steps of the job take, before the first is measured. Evaluations and checkpoints are not in it, nor
    the steps that another job did (`resume_from`)."""

    model_flops: float
    """Forward and backward over all rows of these steps, at their real lengths."""
    recomputed_flops: float
    """What `resolved.activation_checkpointing` adds: forward passes made a second time."""
    estimated: bool
    """Lengths were guessed from the characters of the first rows; false: the tokens of all rows were counted."""
    gpu: str | None
    """The one that the job is planned for, as its driver names it: of those that train workers report and that meet
    `resources`, the largest. Null: the job trains on a CPU."""
    gpus: int = 1
    """How many of it train the job together (`resources.gpus`)."""
    assumed: bool = False
    """No worker has reported a GPU that can take the job: this is the reference GPU."""
    measured: bool = False
    """The GPU's peak is what `longhaul doctor` measured; false: what its data sheet says."""
    hours_at_limit: float | None
    """`model_flops` at the GPU's peak; null without a GPU whose peak is known."""
    hours_expected: float | None
    """All FLOPs at the rate that training reached on this GPU with a model of as many parameters, compiled or not as in
    this job, in steps of a quarter to four times the FLOPs; else at `EXPECTED_SHARE` of the peak. An expectation: the
    measured pace of the job replaces it."""
    expected_from_training: bool = False
    """Whether `hours_expected` comes from training; false: from the peak."""
    evaluations: EvaluationTime | None = None
    """What evaluations take besides; null without any, where no time is expected, and in plans of earlier versions."""


class TimeSummary(TimeFigures):
    """The plan of a job's time for events and lists."""

    text: str | None
    """For people; null on a CPU."""


class TimePlan(TimeFigures):
    """How long all steps of the job take, before the first is measured. Evaluations and checkpoints are not in it, nor
    the steps that another job did (`resume_from`)."""

    @property
    def text(self) -> str | None:
        """For people, such as `about 5 d 11 h at the measured peak of an RTX 5090 (about 18 d 2 h expected)`.

        None on a CPU.
        """
        if self.gpu is None:
            return None
        if self.hours_expected is None:
            return f"time unknown: its peak speed is not in Longhaul's table ({self.gpu})"
        name = short_name(self.gpu)
        named = f"{self.gpus} × {name}" if self.gpus > 1 else f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"
        doubts = [
            *(["no worker has reported a GPU for it yet"] if self.assumed else []),
            *(["estimated from the first rows"] if self.estimated else []),
            *([f"besides {self.evaluations.text}"] if self.evaluations is not None else []),
        ]
        source = " from training on it" if self.expected_from_training else ""
        if self.hours_at_limit is None:
            remarks = "; ".join([f"expected{source}", *doubts])
            return f"about {format_duration(3600 * self.hours_expected)} on {named} ({remarks})"
        limit, expected = durations_alike(3600 * self.hours_at_limit, 3600 * self.hours_expected)
        remarks = "; ".join([f"about {expected} expected{source}", *doubts])
        kind = "measured" if self.measured else "nominal"
        return f"about {limit} at the {kind} peak of {named} ({remarks})"

    def times(self, share: float) -> TimePlan:
        """Of this share of the steps."""
        amounts = {
            "model_flops": self.model_flops, "recomputed_flops": self.recomputed_flops,
            "hours_at_limit": self.hours_at_limit, "hours_expected": self.hours_expected,
        }  # fmt: skip
        return self.model_copy(update={name: each and share * each for name, each in amounts.items()})

    def summary(self) -> TimeSummary:
        """Every figure, and the text."""
        return TimeSummary(**self.model_dump(), text=self.text)


def make_time_plan(
    *,
    model_flops: float,
    recomputed_flops: float,
    estimated: bool,
    device: str,
    gpu: GpuFacts | None,
    parameters: int,
    compiled: bool,
    step_flops: float,
    updates_s: float = 0.0,
    gpus: int = 1,
) -> TimePlan:
    """The time on this GPU (None: the reference GPU is assumed), or so many of them; on `cpu` without a GPU no time is
    predicted.

    `step_flops`: of `model_flops` those of one step. `updates_s`: of all steps, what GPUs wait for the host, or for
    each other.
    """
    assumed = gpu is None and device != "cpu"
    facts = REFERENCE if assumed else gpu
    peak = None if facts is None else facts.peak_flops
    reached = None if facts is None else facts.training_flops(parameters, compiled, step_flops / gpus)
    expected = reached or (None if peak is None else EXPECTED_SHARE * peak)
    seconds = None if expected is None else (model_flops + recomputed_flops) / (gpus * expected) + updates_s
    return TimePlan(
        model_flops=model_flops,
        recomputed_flops=recomputed_flops,
        estimated=estimated,
        gpu=None if facts is None else facts.name,
        assumed=assumed,
        measured=facts is not None and facts.measured is not None and facts.measured.gemm_flops is not None,
        gpus=gpus,
        hours_at_limit=None if peak is None else model_flops / (gpus * peak) / 3600,
        hours_expected=None if seconds is None else seconds / 3600,
        expected_from_training=reached is not None,
    )


class Plan(Frozen):
    """plan.json."""

    task: str = "seq2seq"
    """What the model learns: as in the job, or what the model is made for."""
    model: ModelPlan
    data: DataPlan
    resolved: Resolved
    time: TimePlan | None = None
    """Null in plans of earlier versions, as is `memory`."""
    memory: MemoryPlan | None = None
    """What the run needs at its peak, and what was tried; null in plans of earlier versions."""
    steps: int
    """Optimizer steps of the whole run (provisional until `data.complete`); of an evaluation 0."""
    limited_by: StepLimit = "epochs"
    """What decides their number."""
    warmup_steps: int
    """Steps over which the learning rate rises."""

    def limit_text(self, max_hours: float | None) -> str:
        """What decides the number of steps, for people; '' where the epochs do. `max_hours`: that of the job."""
        if self.limited_by != "epochs":
            return limit_words(self.limited_by)
        known = self.time is not None and self.time.hours_expected is not None and not self.time.assumed
        return "" if max_hours is None or known else "training.max_hours becomes steps once the pace is measured"

    def few_steps(self, training: TrainingSpec) -> str | None:
        """For people, where the epochs make so few steps that a model hardly learns: how many, and what makes more."""
        if self.limited_by != "epochs" or not 0 < self.steps < FEW_STEPS:
            return None
        seen = self.data.rows * training.epochs
        smaller = min(training.batch_size, 1 << max(0, (seen // FEW_STEPS).bit_length() - 1))
        epochs = max(training.epochs, math.ceil(FEW_STEPS * smaller / self.data.rows))
        changed = {"batch_size": (training.batch_size, smaller), "epochs": (training.epochs, epochs)}
        remedy = " and ".join(f"training.{key}={value}" for key, (was, value) in changed.items() if value != was)
        steps, rows = self.steps, self.data.rows
        made_of = f"rows: {rows:,}, epochs: {training.epochs:,}, batch size: {training.batch_size:,}"
        return f"only {steps} {'step' if steps == 1 else 'steps'} ({made_of}): try {remedy}"

    def few_held_out(self, spec: JobSpec) -> str | None:
        """For people, where too few rows are held out to say whether the model is better: how many, and what makes
        more of them. None where there are enough, or none are asked for."""
        held_out, most = self.data.validation_rows, spec.evaluation.max_rows
        if spec.kind != "train" or spec.resume_from or not 0 < min(held_out, most) < LEAST_ROWS:
            return None
        remedies = [f"evaluation.max_rows={LEAST_ROWS}"] if most < LEAST_ROWS else []
        if held_out < LEAST_ROWS:
            rows = held_out + sum(each.rows for each in self.data.sources_of(spec))
            # Whole inputs may come to half of what is asked for.
            share = math.ceil(200 * LEAST_ROWS / rows) / 100
            by_share = spec.data.validation_name is None and share <= 0.5
            remedies += [f"data.validation={share:g}" if by_share else "a larger file as data.validation"]
        count = f"{min(held_out, most)} {'row' if min(held_out, most) == 1 else 'rows'}"
        return (
            f"evaluations look at only {count} that the model does not learn; to say whether it is better than before "
            f"takes {LEAST_ROWS}: try {' and '.join(remedies)}"
        )


class SourceSummary(Frozen):
    """Whose checkpoint the job resumes from."""

    job: str
    """Its id."""
    step: int
    """Optimizer steps done, in the checkpoint asked for or in the newest that looks whole."""
    optimizer: OptimizerName
    """The one whose states the checkpoint holds."""
    loss: float | None = None
    """Validation loss of that checkpoint; null: it was not evaluated, or by an earlier version."""
    learning_rate: float | None = None
    """Of the step that led to it; null: by an earlier version."""
    next_learning_rate: float | None = None
    """Of this job's first step. Its schedule is that of the whole run as this job has it, so that the rate jumps where
    the number of steps is another."""

    @property
    def text(self) -> str:
        """For people: where it continues, and whether the learning rate jumps there."""
        loss = "" if self.loss is None else f", where the validation loss was {format_figure(self.loss)}"
        before, then = self.learning_rate, self.next_learning_rate
        rate = ""
        if before is not None and then is not None and not 0.5 * before <= then <= 2 * before:
            rate = f"; the learning rate goes from {format_number(before)} to {format_number(then)}"
        return f"continues from step {self.step:,} of {self.job}{loss}{rate}"


class CheckSummary(Frozen):
    """The plan in short: from the first rows; `time` and `memory` from all of them, once those were read."""

    task: str = "seq2seq"
    """What the model learns: as in the job, or what the model is made for."""
    model: str
    """As in the job, with the commit of a hub model."""
    parameters: int
    """Counted from the config."""
    train: str
    """As in the job, with the commit of a hub data set."""
    rows_looked_at: int
    """First rows that were read, also of validation rows of their own."""
    rows_estimated: int
    """Usable training rows, by those."""
    invalid_rows: dict[str, int]
    """Rows among those looked at that are not used, by reason."""
    duplicates: int
    """Rows equal to an earlier one among those looked at, in all sources together, and in validation rows of their
    own."""
    all_rows: bool = False
    """Whether all rows were looked at; else of a source only the first ones."""
    input: str | None
    """Template, as resolved; null: there is a target alone."""
    target: str
    """Template, as resolved."""
    reading: str | SkipJsonSchema[None] = left_out()
    """What of the files is read, and how, where their names do not say: the sheet of a workbook, the file in an
    archive, the encoding of the first rows; left out where there is nothing of that."""
    read_as: str | None = None
    """What the rows were recognized as by their columns, such as `OpenAI chat`, each of several sources; null: the job
    names its templates."""
    labels: int | SkipJsonSchema[None] = left_out()
    """Task `classification`: classes, among the rows looked at or as the job or the model names them."""
    new_tensors: list[str] | SkipJsonSchema[None] = left_out()
    """Tensors that training begins with at random because the model named has none: a classifier's head; left out where
    it has all."""
    steps: int
    """Optimizer steps of the whole run, by these rows."""
    limited_by: StepLimit = "epochs"
    """What decides their number: the epochs, or a key of `training` that allows fewer."""
    resolved: Resolved
    """Every `auto`, decided."""
    time: TimeSummary | None
    """What the run needs."""
    memory: MemorySummary
    """What it needs at its peak, what was tried and chosen."""
    resume_from: SourceSummary | SkipJsonSchema[None] = left_out()
    """The job that it resumes from; left out where it begins at the start."""

    @property
    def of_pairs(self) -> bool:
        """Whether the rows are pairs of texts."""
        return self.input is not None and f" {PAIR} " in self.input

    def prepared(self, time: TimeSummary | None, memory: MemorySummary | None) -> CheckSummary:
        """With time and memory as planned again for all rows, where they were."""
        change: Mapping[str, object] = {"time": time or self.time}
        if memory is not None:
            decided = ("micro_batch", "activation_checkpointing", "optimizer", "compile", "dtype", "gpus")
            chosen = {key: getattr(memory, key) for key in decided}
            change = {**change, "memory": memory, "resolved": self.resolved.model_copy(update=chosen)}
        return self.model_copy(update=change)


def resolve_dtype(spec: JobSpec, gpu: GpuFacts | None, begun: DType | None = None) -> DType:
    """The type of the model on this GPU (None: a CPU, or none is known). `begun`: that of the run to continue.

    Raises Rejected (`no_native_bf16`) where the GPU cannot train the job so.
    """
    method = spec.method
    asked = "auto" if isinstance(method, FullMethod) else method.base_dtype
    native = gpu is None or gpu.native_bf16
    if begun is not None:
        dtype = begun
    elif asked != "auto":
        dtype = asked
    else:
        dtype = "bfloat16" if native or spec.needs_native_bf16 else "float16"
    if dtype == "bfloat16" and gpu is not None and not native:
        if isinstance(method, FullMethod):
            param, hint = "method", "set method: lora, which trains adapters beside a model in float16 there"
        elif begun is not None:
            param = "resume_from"
            hint = "leave resume_from out, and both types in method at auto, to start over in float16"
        else:
            param = "method.base_dtype" if asked == "bfloat16" else "method.adapter_dtype"
            hint = f"leave {param} at auto: the model is then float16, and its adapters are float32"
        raise Rejected(
            f"the job trains in bfloat16, and {gpu.name} has no native bf16",
            code="no_native_bf16",
            param=param,
            hint=f"{hint}; or use a GPU of compute capability 8.0 or newer (RTX 30, A100, and newer)",
        )
    return dtype


def resolve(spec: JobSpec, memory: MemoryPlan | None, device: str = "cpu") -> Resolved:
    """Memory as planned; without a plan as the job says, and for `auto` the plainest."""
    asked = spec.memory
    if memory is not None:
        chosen = memory.micro_batch, memory.activation_checkpointing, memory.optimizer
    else:
        rows, every = (8 if asked.micro_batch == "auto" else asked.micro_batch, asked.activation_checkpointing)
        optimizer: OptimizerName = "adamw" if asked.optimizer == "auto" else asked.optimizer
        chosen = min(spec.training.batch_size, rows), 0 if every == "auto" else every, optimizer
    return Resolved(
        micro_batch=chosen[0],
        activation_checkpointing=chosen[1],
        optimizer=chosen[2],
        dtype=resolve_dtype(spec, None) if memory is None else memory.dtype,
        compile=spec.speed.compiled_on(device) if memory is None else memory.compile,
        gpus=memory.gpus if memory is not None else spec.resources.gpus,
    )


def make_plan(
    spec: JobSpec,
    model: ModelPlan,
    data: DataPlan,
    device: str = "cpu",
    memory: MemoryPlan | None = None,
    *,
    task: str = "seq2seq",
) -> Plan:
    """Plan for this model and so many rows, on `cpu` or `cuda`; `training.max_hours` is not looked at yet."""
    steps, limited_by = most_steps(spec, data)
    return Plan(
        task=task,
        model=model,
        data=data,
        resolved=resolve(spec, memory, device),
        memory=memory,
        steps=steps,
        limited_by=limited_by,
        warmup_steps=warmup_steps(spec, steps),
    )


def limit_words(limited_by: StepLimit | None) -> str:
    """For people; '' where nothing but the epochs limits the run."""
    if limited_by == "early_stopping":
        return "ended early by training.early_stopping"
    return "" if limited_by in (None, "epochs") else f"limited by training.{limited_by}"


def limit_text(limited_by: StepLimit | None) -> str:
    """The same behind a number of steps."""
    return f", {words}" if (words := limit_words(limited_by)) else ""


def most_steps(spec: JobSpec, data: DataPlan) -> tuple[int, StepLimit]:
    """The steps of all epochs, or `training.max_steps`, and which of the two.

    Rows left at an epoch's end open the next: only the last step of all epochs is short.
    """
    if spec.kind == "evaluate":
        return 0, "epochs"
    steps, most = math.ceil(data.rows * spec.training.epochs / spec.training.batch_size), spec.training.max_steps
    return (steps, "epochs") if most is None or most >= steps else (most, "max_steps")


def rows_of_steps(spec: JobSpec, data: DataPlan, steps: int) -> int:
    """How many rows so many steps see: of the last step of all epochs, those that are left."""
    return min(data.rows * spec.training.epochs, steps * spec.training.batch_size)


def warmup_steps(spec: JobSpec, steps: int) -> int:
    """Steps over which the learning rate rises, of a run of so many."""
    return math.ceil(steps * spec.training.warmup_ratio)
