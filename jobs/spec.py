"""JobSpec: what a user asks for. Frozen; unknown keys are refused; every field says what it does.

What `auto` becomes is decided in `jobs/plan.py`.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jobs.data_names import DATA_SUFFIXES, UPLOADED, DataFormat, data_format, hub_data
from jobs.errors import UserError
from jobs.evaluation_metrics import EvaluationMetric, metrics_of
from jobs.frozen import Part
from jobs.integrations import IntegrationsSpec
from jobs.memory_plan import OptimizerName
from jobs.wrong_spec import ONE_SOURCE, SOURCES, explain, quantized, shorten

Auto = Literal["auto"]
MOST_GPUS = 16
"""That train one job together."""
LrScheduler = Literal["linear", "cosine", "constant"]
ALL_LINEAR = "all-linear"
DEFAULT_MODEL = "google/flan-t5-xl"


def _known_metric(name: object) -> object:
    """`validation_loss` is what `loss` was called."""
    name = EvaluationMetric.LOSS.value if name == "validation_loss" else name
    if isinstance(name, str) and name not in {metric.value for metric in EvaluationMetric}:
        *names, last = (repr(metric.value) for metric in EvaluationMetric)
        raise PydanticCustomError("unknown_metric", "must be {expected}", {"expected": f"{', '.join(names)} or {last}"})
    return name


MetricName = Annotated[
    EvaluationMetric,
    Field(strict=False),
    BeforeValidator(_known_metric),
    WithJsonSchema({"type": "string", "enum": [metric.value for metric in EvaluationMetric]}),
]
GENERATED = 64
"""Texts that are scored at each evaluation, where the job does not say how many."""
NOT_IN_NAMES = re.compile(
    "[^A-Za-z0-9 _.\\-\u00aa-\U0010ffff]|[\u061c\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ud800-\uf8ff\ufeff]"
)
"""ASCII but for what names hold; and of the rest what reorders, breaks or hides text."""
JOB_ID = r"job-[a-z0-9_-]{1,60}"
RESUME_FROM = rf"^{JOB_ID}(/step-[0-9]{{8,12}})?$"


TaskName = Literal["seq2seq", "causal", "classification", "regression"]
BUILTIN_MODELS: Mapping[str, TaskName] = {
    "builtin:t5-tiny": "seq2seq", "builtin:qwen-tiny": "causal", "builtin:roberta-tiny": "classification",
}  # fmt: skip
"""Small models that need no download, and what each is made for."""


def builtin_task(model: str, asked: str) -> TaskName | None:
    """The task for which a job with this `task.type` takes a built-in model: an encoder gives scores as well as labels.
    None: it is another model."""
    made_for = BUILTIN_MODELS.get(model)
    return "regression" if (made_for, asked) == ("classification", "regression") else made_for


MOST_LABELS = 10_000
"""Classes that a classifier can have."""


_Text = Annotated[str, Field(min_length=1, max_length=512)]
Label = Annotated[
    _Text,
    BeforeValidator(lambda value: str(value) if type(value) is int else value, json_schema_input_type=_Text | int),
]
"""A class by its name. Numbers are taken for the texts that they are in the rows."""


class TaskSpec(Part):
    """What the model learns."""

    type: Literal["auto", "seq2seq", "causal", "classification", "regression"] = "auto"
    """`seq2seq`: an encoder-decoder model (T5) writes `target` given `input`. `causal`: a language model (Qwen, Llama,
    Mistral, Gemma, Phi and others) writes the replies of chats, completions of prompts, or plain text.
    `classification`: an encoder (BERT, RoBERTa, DeBERTa, ModernBERT and others) tells which label `target` a text
    `input` has. `regression`: an encoder gives a text a score, a number (docs/data.md). `auto`: what the model is made
    for; of an encoder `classification`."""
    loss_on: Literal["replies", "all"] = "replies"
    """Task `causal`: which tokens are learned. `replies`: those of the assistant (or of the completion), with the token
    that ends each. `all`: of the prompts, too. Of plain text all are, in any case."""
    multi_label: bool = False
    """Task `classification`: a row has any number of labels, a list that may be empty; false: one."""
    class_weights: Literal["none", "balanced"] = "none"
    """Task `classification`: `balanced` gives every class the same weight in the loss, however rare it is."""
    labels: Annotated[list[Label], Field(min_length=1)] | None = None
    """Task `classification`: the labels, in the order of their numbers, at most 10,000; a row with another one is
    rejected. Null: those that the rows have, sorted."""

    @field_validator("labels")
    @classmethod
    def _all_different(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(value) > MOST_LABELS:
            raise ValueError(f"there are {len(value):,} labels, and a classifier has {MOST_LABELS:,} at most")
        twice = [label for label, count in Counter(value or ()).items() if count > 1]
        if twice:
            raise ValueError(f"the label {shorten(twice[0])} is named twice")
        return value

    @model_validator(mode="after")
    def _no_option_of_another_task(self) -> TaskSpec:
        if self.type != "auto" and (foreign := self.options_of_others(self.type)):
            raise ValueError(self.foreign_option(foreign, self.type))
        return self

    def options_of_others(self, task: str) -> str | None:
        """The first option that the job sets, and that this task does not have."""
        others = {name: field.default for name, field in type(self).model_fields.items() if name != "type"}
        return next(
            (
                name
                for name, default in others.items()
                if _TASK_OF_OPTION[name] != task and getattr(self, name) != default
            ),
            None,
        )

    @staticmethod
    def foreign_option(option: str, task: str) -> str:
        """What is wrong with such an option."""
        return f"`{option}` is an option of the task {_TASK_OF_OPTION[option]}, and the task is {task}: leave it out"


_TASK_OF_OPTION: Mapping[str, TaskName] = {
    "loss_on": "causal", "multi_label": "classification", "class_weights": "classification", "labels": "classification",
}  # fmt: skip


def _spelled_out(value: object) -> object:
    """A part by its type alone."""
    return {"type": value} if isinstance(value, str) else value


class FullMethod(Part):
    """Every weight of the model is trained."""

    type: Literal["full"] = "full"
    """Which weights are trained; `"method": "lora"` is short for `{"type": "lora"}`."""


class LoraMethod(Part):
    """The model stays as it is; beside its linear layers small matrices are trained, the adapters (docs/lora.md)."""

    type: Literal["lora"]
    """Always `lora`."""
    rank: Annotated[int, Field(ge=1, le=8192)] = 16
    """Width of an adapter: for a layer of m inputs and n outputs it has rank × (m + n) weights. High ranks (128) come
    close to full fine-tuning."""
    alpha: Annotated[float, Field(gt=0.0, le=65_536.0)] | None = None
    """What an adapter adds is multiplied by alpha / rank. Null: alpha is the rank, the factor 1."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout rate of what goes into the adapters; that of the model is `training.dropout`."""
    targets: (
        Annotated[str, Field(min_length=1, max_length=1024)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=1, max_length=1024)]
    ) = ALL_LINEAR
    """Which layers get an adapter. `all-linear`: every linear layer but the output head, routers of experts
    and gates of width 1. A list: those whose names end so, such as `["q", "v"]`. Another text: a regular expression for
    whole names. All must be linear layers, and every ending must occur."""
    rslora: bool = False
    """Multiply by alpha / √rank in place of alpha / rank (rank-stabilized LoRA)."""
    dora: bool = False
    """Train the length of each weight vector apart from its direction (DoRA): slower, and takes more memory."""
    base_dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Type of the model. `auto`: bfloat16; float16 where the GPU that the job is planned for has no native bfloat16
    (Turing). `float16` scales the loss, and skips the update of a step whose gradients overflow (docs/lora.md)."""
    adapter_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the adapters. `auto`: bfloat16, and float32 beside a model in float16, where nothing else is possible.
    `float32` casts what goes into every adapter, and takes more memory."""
    merge: bool = False
    """Deliver the whole model with the adapters merged into it, and the adapters beside it in `model/adapter/`."""

    @property
    def scale(self) -> float:
        """`alpha`, decided."""
        return float(self.rank) if self.alpha is None else self.alpha

    @field_validator("targets")
    @classmethod
    def _a_regular_expression(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            try:
                with warnings.catch_warnings(action="ignore"):  # of what a pattern may mean one day
                    re.compile(value)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"{value!r} is no regular expression ({error}); for the endings of names write a list"
                ) from None
        return value

    @model_validator(mode="after")
    def _wide_adapters_beside_float16(self) -> LoraMethod:
        if (self.base_dtype, self.adapter_dtype) == ("float16", "bfloat16"):
            raise ValueError("beside a model in float16 adapters are float32: leave `adapter_dtype` at auto")
        return self


METHODS = ("full", "lora")


def _named_method(value: object) -> object:
    """`"lora"` stands for `{"type": "lora"}`, and an empty object for the default."""
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        return value
    if value and "type" not in value:
        raise ValueError(f"`type` is missing: {' or '.join(map(repr, METHODS))}")
    if (kind := value.get("type", "full")) not in METHODS:
        known = " or ".join(map(repr, METHODS))
        if why := quantized(kind):
            raise ValueError(f"type {shorten(kind)} is not known: {known}{why}")
        said = {"shown": shorten(kind), "expected": known, "given": kind}
        raise PydanticCustomError("unknown_type", "type {shown} is not known: {expected}", said)
    return value or {"type": "full"}


Method = Annotated[
    Annotated[FullMethod | LoraMethod, Discriminator("type")],
    BeforeValidator(_named_method, json_schema_input_type=FullMethod | LoraMethod | Literal["full", "lora"]),
]

CsvQuoting = Literal["auto", "rfc4180", "none"]


Name = Annotated[str, Field(min_length=1, max_length=1024)]


class WeightedSource(Part):
    """One of several sources of training rows."""

    source: Name
    """A file, uploaded data set or hub data set, as `data.train` names one."""
    weight: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """How often each of its rows occurs in an epoch. With 2, twice. With 0.5 each epoch has half of them, the next one
    the other half."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: object) -> object:
        return {"source": given} if isinstance(given, str) else given


Learn = Literal["all", "answer", "reasoning"]
NamedChatTemplate = Literal["alpaca", "chatml", "gemma", "llama-3", "mistral", "vicuna"]
CHAT_TEMPLATE_CHARACTERS = 100_000
"""The longest chat templates of models have some 20,000."""
_CHAT_TEMPLATE_FILE = ".jinja"
PAIR = "{}"
"""In `data.input`: what is before it and what is behind it are two texts, a pair."""


def _pair_as_text(given: object) -> object:
    """A list of two columns or templates as one text."""
    if not isinstance(given, list | tuple):
        return given
    if len(given) != 2 or not all(isinstance(one, str) and one.strip() for one in given):
        raise ValueError("a list is a pair of texts: it names two columns or templates")
    first, second = (one if "{" in one or "}" in one else f"{{{one}}}" for one in given)
    return f"{first} {PAIR} {second}"


_Column = Annotated[str, Field(min_length=1, max_length=10_000)]


class DataSpec(Part):
    """Which training rows and how a row becomes input and target text."""

    train: Annotated[
        Annotated[Name, Tag(ONE_SOURCE)]
        | Annotated[list[WeightedSource], Field(min_length=1, max_length=16), Tag(SOURCES)],
        Discriminator(lambda given: SOURCES if isinstance(given, list | tuple) else ONE_SOURCE),
    ]
    """File of training rows, relative to the data directory; an uploaded data set, `dataset:NAME`; or a hub data set,
    `org/name`, with `@revision` (a branch, tag or commit) and `:split` (default: train) or `:configuration/split` if
    you like. With `format` auto, whatever has that form and ends in no known file ending is a hub data set; `./` in
    front makes it a file. Or a list of several: names, or `{"source": …, "weight": …}`."""
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] | Literal["auto"] | Name = "auto"
    """Fraction of the rows held out for evaluation, by whole inputs (refused where that would take more than twice as
    much), or a file, uploaded data set or hub data set of its own (such as `org/name:validation`). 0: no evaluation.
    `auto`: 1 %, of fewer than 10,000 rows 100 of them, and 20 % at most; with `resume_from` as there."""
    format: Literal["auto", DataFormat] = "auto"
    """File format; `auto` goes by the ending of the file name: .jsonl, .ndjson, .json (one object per line, or an array
    of objects), .csv, .tsv, each also with .gz or .zst, .parquet, .xlsx, .xlsm, .xls and .ods (a sheet), or .zip with
    one of these files. For other names say it; the value then is a file in any case."""
    input: Annotated[
        _Column | None,
        BeforeValidator(
            _pair_as_text,
            json_schema_input_type=_Column | Annotated[list[_Column], Field(min_length=2, max_length=2)] | None,
        ),
    ] = None
    """Column name, or a template over columns such as `"{title}: {ingredients}"`, with paths (`{messages[0].content}`),
    objects as JSON (`{output|json}`) and optional parts (`{input?}`). Of an encoder: two of these in a list,
    such as `["premise", "hypothesis"]`, are a pair of texts; the job keeps it as `"{premise} {} {hypothesis}"`, which
    may also be given. Null: recognized by column names."""
    target: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """Column name or template of the text to learn. Null: recognized by column names. Task `causal`: without `input`, a
    column of chats (`messages`), or of plain text. Task `classification`: the label, or with `task.multi_label` a list
    of labels. Task `regression`: the score."""
    max_input_tokens: Annotated[int, Field(ge=8, le=32768)] = 512
    """Tasks `seq2seq`, `classification` and `regression`: longer inputs are cut to this many tokens, and counted."""
    max_target_tokens: Annotated[int, Field(ge=8, le=32768)] = 512
    """Task `seq2seq`: longer targets are cut to this many tokens, and counted."""
    max_tokens: Annotated[int, Field(ge=8, le=32768)] = 2048
    """Task `causal`: longer rows (prompt and replies together) are cut to this many tokens, at the end, and counted."""
    learn: Learn = "all"
    """Task `causal`: what of the replies of chats is learned: `all`, the reasoning with what ends it (`reasoning`; rows
    without any are rejected), or what comes after it, with the token that ends the reply (`answer`). The rest is read.
    Reasoning is `<think>…</think>` in a reply, or its `reasoning_content`, `reasoning` or `thinking`."""
    chat_template: Annotated[str, Field(min_length=1, max_length=CHAT_TEMPLATE_CHARACTERS)] | None = None
    """Task `causal`: how chats are written, in place of the tokenizer's chat template, which base models lack:
    `alpaca`, `chatml`, `gemma`, `llama-3`, `mistral` or `vicuna`; a file in the data directory that ends in `.jinja`;
    or a Jinja template itself. The token that ends a reply must be a special token of the tokenizer. The delivered
    model has the template."""
    max_invalid_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """Unusable rows are rejected and reported up to this fraction; above it the job fails."""
    csv_lists: bool = False
    """CSV and TSV: a field that holds a JSON array of texts is a list, and joined as the lists of other formats are."""
    csv_quoting: CsvQuoting = "auto"
    """CSV and TSV: what double quotes mean. `rfc4180`: a field in quotes may hold delimiters, line breaks and doubled
    quotes. `none`: nothing, they are part of the text. `auto`: as in RFC 4180, except for a quoted field whose lines
    could all be rows; how the rest of the table uses quotes decides between the two, or the lines are rejected."""
    normalize: bool = True
    """Compose letters and their accents into one character (NFC), whatever the tokenizer, and rewrite characters that
    it does not know (½ becomes 1/2); both are counted. A tokenizer that falls back to bytes knows every character."""
    keep_line_breaks: bool = False
    """Task `seq2seq`, method `full`: a tokenizer that reads line breaks as spaces, as T5's, gets a token for them, in a
    row of the model's embedding that no other token has. Other tokenizers stay as they are."""

    @property
    def sources(self) -> list[WeightedSource]:
        """Those of the training rows, one or more."""
        return [WeightedSource(source=self.train)] if isinstance(self.train, str) else self.train

    @property
    def names(self) -> dict[str, str]:
        """Every file and data set that is named, by its dotted key."""
        if isinstance(self.train, str):
            found = {"data.train": self.train}
        else:
            found = {f"data.train.{number}.source": each.source for number, each in enumerate(self.train)}
        return found | ({} if self.validation_name is None else {"data.validation": self.validation_name})

    @property
    def chat_template_file(self) -> str | None:
        """The file of `chat_template`; None: it says it itself, or there is none."""
        given = self.chat_template or ""
        return given if given.endswith(_CHAT_TEMPLATE_FILE) and "{" not in given else None

    @property
    def validation_name(self) -> str | None:
        """The file or data set of `validation`; None: rows of the training files are held out, or none."""
        return self.validation if isinstance(self.validation, str) and self.validation != "auto" else None

    @field_validator("train", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: object) -> object:
        return [given] if isinstance(given, dict) else given

    @field_validator("chat_template")
    @classmethod
    def _names_a_template(cls, given: str | None) -> str | None:
        named = get_args(NamedChatTemplate)
        if given is None or given in named or "{" in given or given.endswith(_CHAT_TEMPLATE_FILE):
            return given
        names = ", ".join(named)
        raise ValueError(f"give one of {names}, a file that ends in {_CHAT_TEMPLATE_FILE}, or a Jinja template")

    @model_validator(mode="after")
    def _no_input_alone(self) -> DataSpec:
        if self.input is not None and self.target is None:
            raise ValueError("give both `input` and `target`, or neither (task causal: `target` alone)")
        return self


class EarlyStoppingSpec(Part):
    """When a run ends before its last step: decided after each evaluation, by all that there were so far."""

    metric: MetricName | None = None
    """By what: a metric that the evaluations have. Null: that of `checkpoint.best`, or the loss."""
    patience: Annotated[int, Field(ge=1, le=10_000)] = 3
    """The run ends after so many evaluations in a row that are no better than the best before them."""
    min_delta: Annotated[float, Field(ge=0.0, le=1_000_000.0)] = 0.0
    """Better is what is better by more than this, in units of the metric."""


def _early_stopping(value: object) -> object:
    """What `true` and `false` stand for."""
    return (EarlyStoppingSpec() if value else None) if isinstance(value, bool) else value


class TrainingSpec(Part):
    """How long and how fast to learn."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = 5
    """Passes over all rows."""
    max_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """The run has at most so many optimizer steps, however many the epochs have. Null: those of all epochs."""
    max_hours: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """The run has as many steps as fit into so many hours, never more than the epochs have, and the learning rate is
    scheduled for that number. What counts is time in attempts of this job, not while it is paused or waits. The plan
    turns hours into steps by the pace that it expects on the GPU; after 200 steps, or a tenth of the run, their number
    is corrected by the measured pace, evaluations and checkpoints included, and again each time half of the hours left
    are over, five times at most. A run that is much slower than that at its end stops after 5 % more than these
    hours, wherever its learning rate is. Null: no limit."""
    early_stopping: Annotated[
        EarlyStoppingSpec | None,
        BeforeValidator(_early_stopping, json_schema_input_type=EarlyStoppingSpec | bool | None),
    ] = None
    """The run ends when it gets no better. Null or false: it does all its steps. True: the defaults."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Rows of one optimizer step, exactly; cut into micro-batches as memory allows, whose gradients are added up."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-4
    """Peak learning rate. LoRA wants about ten times that of full fine-tuning."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.03
    """Share of all steps over which the learning rate rises linearly from 0."""
    lr_scheduler: LrScheduler = "linear"
    """What the learning rate does after the warm-up; linear and cosine end at 0."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Decoupled weight decay, applied in fp32; not to biases and layer norms."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Gradients are scaled down to this global norm. Null: no clipping."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout rate. Null: the model's own."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    """Order of rows and dropout follow from it (the split follows from the rows themselves)."""


class MemorySpec(Part):
    """How the GPU's memory is used."""

    budget: Auto | Annotated[float, Field(gt=0.0, le=1024.0)] = "auto"
    """GiB that the job may use. `auto`: what the GPU has; on a CPU, what the host has free."""
    micro_batch: Auto | Annotated[int, Field(ge=1, le=65_536)] = "auto"
    """Rows (of the longest shape) that go through the model at once. `auto`, here and in the next two: what is
    fastest and best within the budget (`longhaul plan` shows what was tried)."""
    activation_checkpointing: Auto | Annotated[int, Field(ge=0, le=1024)] = "auto"
    """Recompute activations of every n-th layer in the backward pass; 0: none, 1: every layer."""
    optimizer: Auto | OptimizerName = "auto"
    """`adamw` keeps an fp32 master copy and fp32 states beside the bf16 weights (14 bytes a weight with these);
    `adamw_offload` the same in the host's memory, whose CPU then makes the update, for which the GPU waits;
    `adamw_8bit` states of one byte (4 bytes a weight), `adafactor` next to none; both round weights stochastically."""
    empty_cache_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 50
    """Steps between two clearings of the allocator's cache; 0: never."""
    on_oom: Literal["recover", "fail"] = "recover"
    """Out of memory inside a step: redo the same step in smaller micro-batches, or fail."""
    other_processes: Literal["wait", "fail"] = "wait"
    """Another trainer on the GPU: wait for it or refuse."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _no_nearest_rounding(cls, value: Any) -> Any:
        if isinstance(value, str) and re.search("bf16|bfloat16", value, re.IGNORECASE):
            raise ValueError(
                "bf16 weights updated in bf16 are refused: rounding to the nearest loses 94 % of Adam's updates at a "
                "learning rate of 1e-5 (docs/bf16.md); use adamw or adamw_offload (fp32 master copy), adamw_8bit or "
                "adafactor (stochastic rounding); the weights are bf16 with each of them"
            )
        return value


class ResourcesSpec(Part):
    """Which GPUs may train the job. Where no worker has such a GPU, it waits for one."""

    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS), BeforeValidator(lambda given: 1 if given == "auto" else given)] = (
        1  # `auto`: of earlier versions, which took several for a job that did not fit one
    )
    """GPUs that train the job together: each has the whole model, and goes through its share of the rows of a step.
    The result is that of one GPU but for rounding and dropout. On a worker without a GPU: processes."""
    gpu_memory_gib: Annotated[float, Field(gt=0.0, le=1024.0)] | None = None
    """GiB of memory that the GPU must have in all: what nvidia-smi reports, rounded up to whole GiB (32 for an
    RTX 5090). Null: as much as the job needs."""
    gpu_name: Annotated[str, StringConstraints(pattern=r"^[ -~]{1,128}$")] | None = None
    """Words of the GPU's name, in upper or lower case, such as `h100`. Null: any."""
    engine: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")] | None = None
    """The engine that trains the job, by its name in LONGHAUL_ENGINES. Null: a machine of Longhaul's own."""


class SpeedSpec(Part):
    """Switches that change the speed and never the result."""

    compile: Auto | bool = "auto"
    """Compile the layers of the model for training (the first start takes minutes). `auto`: on CUDA, where it pays."""
    fused: bool = True
    """Faster modules and optimizer kernels in place of the stock ones: the same formulas, with other random numbers."""

    @model_validator(mode="after")
    def _compile_what_is_fused(self) -> SpeedSpec:
        if self.compile is True and not self.fused:
            raise ValueError("`compile: true` needs `fused: true`: only the fused layers are compiled")
        return self

    def compiled_on(self, device: str) -> bool:
        """Whether layers that can be compiled are, on `cpu` or `cuda`."""
        # Measured on the CPU: compiled layers take longer than fused ones.
        return device == "cuda" and self.fused if self.compile == "auto" else self.compile


class LogSpec(Part):
    """What is written down while training."""

    every_steps: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Steps between two rows of metrics (each the mean since the last)."""


class CheckpointSpec(Part):
    """When the run is saved and what is kept."""

    every_minutes: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = 30
    """A checkpoint is due at the first evaluation after this long without one."""
    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """A checkpoint is due at every n-th step as well."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """Newest checkpoints kept; the best one is kept besides."""
    best: MetricName | None = EvaluationMetric.LOSS
    """The final model is the evaluated checkpoint that is the best by this metric, of equals the earliest: `loss`, or
    another one that the evaluations of the task have. A checkpoint is due at every evaluation that is better than each
    checkpoint so far. Null: the last step's, and no evaluation makes a checkpoint due."""


class EvaluationSpec(Part):
    """Looking at the model on rows it does not learn from."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 500
    """Steps between two evaluations; there is one before the first step and one after the last, too."""
    max_rows: Annotated[int, Field(ge=1, le=1_000_000)] = 2000
    """Validation rows used at most: of more of them random ones, the same every time and in every job."""
    samples: Annotated[int, Field(ge=0, le=64)] = 8
    """Generated texts that are shown of each evaluation; of a classifier, predicted labels."""
    generate_rows: Auto | Annotated[int, Field(ge=0, le=100_000)] = "auto"
    """Validation rows, chosen like those of `max_rows`, for which a text is generated at each evaluation and scored;
    the samples are some of these texts, and generated in any case. `auto`: 64; 0 where `samples` is 0 and `metrics`
    names none that is measured on texts."""
    metrics: Auto | Annotated[list[MetricName], Field(min_length=1)] = "auto"
    """What is measured beside the loss. `auto`: all that the task has."""
    sample_tokens: Auto | Annotated[int, Field(ge=1, le=32768)] = "auto"
    """Tokens of such a text at most. `auto`: as many as 99 % of the targets have at most."""

    @model_validator(mode="after")
    def _texts_to_score(self) -> EvaluationSpec:
        if self.generate_rows == 0 and (named := [each for each in self.named if each.of_texts]):
            raise ValueError(
                f"`metrics` names {named[0]}, which is measured on generated texts, and `generate_rows` is 0: raise "
                "`generate_rows`, or leave the metric out"
            )
        return self

    @property
    def named(self) -> list[EvaluationMetric]:
        """The metrics that the job names."""
        return [] if self.metrics == "auto" else self.metrics

    def measured(self, metrics: Iterable[EvaluationMetric]) -> list[EvaluationMetric]:
        """Which of the metrics that the task has are measured."""
        asked = [each for each in metrics if self.metrics == "auto" or each in self.metrics]
        return [each for each in asked if self.scored_rows or not each.of_texts]

    @property
    def scored_rows(self) -> int:
        """Rows whose generated texts are scored, if there are as many."""
        if self.metrics != "auto" and not any(each.of_texts for each in self.metrics):
            return 0
        if self.generate_rows == "auto":
            return GENERATED if self.samples or self.named else 0
        return self.generate_rows


_OF_TRAINING = ("training", "checkpoint", "method", "resume_from")
"""Parts of a job that an evaluation has no use for."""


class JobSpec(Part):
    """What a user asked for. Only `data.train` is required."""

    kind: Literal["train", "evaluate"] = "train"
    """`train`: the model learns the rows. `evaluate`: it stays as it is, and is measured on the rows of `data.train`
    (at most `evaluation.max_rows` of them)."""
    name: Annotated[str, Field(min_length=1, max_length=64)] = "job"
    """Shown wherever the job is; need not be unique. Letters and digits of any script, spaces, and `_.-` behind the
    first; not `last`, nor what looks like an id."""
    model: Annotated[str, Field(min_length=1, max_length=512)] = DEFAULT_MODEL
    """Hub id (`org/name`, `org/name@revision`), folder in the data directory (`./my-model`), the id of a job that has
    delivered a whole model, or a built-in one: `builtin:t5-tiny`, `builtin:qwen-tiny`, `builtin:roberta-tiny`."""
    task: Annotated[TaskSpec, BeforeValidator(_spelled_out, json_schema_input_type=TaskSpec | str)] = TaskSpec()
    """What the model learns; a name alone, such as `causal`, is its `type`."""
    method: Method = FullMethod()
    """Which weights are trained: all (`full`), or adapters beside them (`lora`)."""
    data: DataSpec
    training: TrainingSpec = TrainingSpec()
    memory: MemorySpec = MemorySpec()
    resources: ResourcesSpec = ResourcesSpec()
    speed: SpeedSpec = SpeedSpec()
    log: LogSpec = LogSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    integrations: IntegrationsSpec = IntegrationsSpec()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Higher runs first; equals run in the order they were submitted."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 5
    """Restarts after crashes without progress in between."""
    resume_from: (
        Annotated[
            str,
            Field(
                max_length=256,
                json_schema_extra={"pattern": RESUME_FROM, "examples": ["job-1a2b3c/step-00000500"]},
            ),
        ]
        | None
    ) = None
    """Another job to resume from: `job-…` (its newest checkpoint that verifies) or `job-…/step-00000500`. Its `model`,
    `task`, `method`, `data`, `training.batch_size` and `training.seed` must be the same, and its optimizer is kept; all
    else may differ, and counts from that step on. `training.epochs` are those of the whole run; where the other ended
    with a shorter step, the rows that would have filled it are not seen in the epoch that follows. It may have ended in
    any way, be paused, or still run: what counts is the newest checkpoint that it has when this job is prepared. From
    then on that is this job's own, and the other may be deleted."""
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field({})
    """Your own labels: at most 16, keys up to 64 and values up to 512 characters."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_held_out(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("kind") == "evaluate" and isinstance(given.get("data"), Mapping):
            return {**given, "data": {"validation": 0.0, **given["data"]}}
        return given

    @model_validator(mode="after")
    def _nothing_to_train(self) -> JobSpec:
        if self.kind == "train":
            return self
        fields = type(self).model_fields
        named = [name for name in _OF_TRAINING if getattr(self, name) != fields[name].default]
        named += ["data.validation"] if self.data.validation != 0.0 else []
        named += ["data.keep_line_breaks"] if self.data.keep_line_breaks else []
        if named:
            raise ValueError(f"a job of kind evaluate trains nothing and holds nothing out: leave {named[0]} out")
        return self

    @model_validator(mode="after")
    def _parts_of_replies(self) -> JobSpec:
        if self.data.learn != "all" and (self.task.type not in ("auto", "causal") or self.task.loss_on == "all"):
            raise ValueError(
                f"`data.learn: {self.data.learn}` takes parts of the replies of chats: leave it out, or set "
                "`task: causal` with `loss_on: replies`"
            )
        return self

    @model_validator(mode="after")
    def _chats_to_write(self) -> JobSpec:
        if self.data.chat_template is not None and self.task.type not in ("auto", "causal"):
            raise ValueError("`data.chat_template` writes chats: leave it out, or set `task: causal`")
        return self

    @model_validator(mode="after")
    def _line_breaks_to_learn(self) -> JobSpec:
        if self.data.keep_line_breaks and not isinstance(self.method, FullMethod):
            raise ValueError(
                "`data.keep_line_breaks` adds a token, which adapters alone do not learn: leave it out, or set "
                "`method: full`"
            )
        return self

    @property
    def learns_new_tokens(self) -> bool:
        """Whether a token that is added to the tokenizer would be learned."""
        return self.kind == "train" and isinstance(self.method, FullMethod) and self.resume_from is None

    @model_validator(mode="after")
    def _what_several_gpus_need(self) -> JobSpec:
        gpus = self.resources.gpus
        if gpus > 1 and self.kind != "train":
            raise ValueError(f"`resources.gpus: {gpus}`: a job of kind {self.kind} runs on one GPU")
        if gpus > 1 and self.memory.optimizer == "adamw_offload":
            raise ValueError(
                f"`resources.gpus: {gpus}` goes with every optimizer but `memory.optimizer: adamw_offload`"
            )
        if gpus > self.training.batch_size:
            raise ValueError(
                f"`resources.gpus: {gpus}` needs a `training.batch_size` of at least {gpus}, a row for each GPU: it is "
                f"{self.training.batch_size}"
            )
        return self

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if value[0] in " _.-" or NOT_IN_NAMES.search(value):
            raise ValueError(
                "a name holds letters and digits of any script, spaces, underscores, dots and hyphens, and begins with "
                "a letter or digit"
            )
        return value

    @field_validator("metadata")
    @classmethod
    def _short_metadata(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            if not 1 <= len(key) <= 64 or len(text) > 512:
                raise ValueError(f"metadata key {key[:64]!r}: keys have 1 to 64 characters, values at most 512")
        return value

    @field_validator("model")
    @classmethod
    def _known_model_form(cls, value: str) -> str:
        if value in BUILTIN_MODELS or value.startswith(("./", "/")):
            return value
        # A revision names a file in the hub's cache: `..` would lead out of it.
        if ".." in value or not re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?(@[\w.\-/]+)?", value):
            raise ValueError(
                f"{value!r} is not a hub id such as google/flan-t5-xl (with @revision if you like), "
                f"nor a folder such as ./my-model inside the data directory, nor the whole id of a job such as "
                f"job-1a2b3c, nor {' or '.join(BUILTIN_MODELS)}"
            )
        return value

    @field_validator("resume_from")
    @classmethod
    def _known_resume_form(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(RESUME_FROM, value):
            raise ValueError(
                "it is the id of a job, such as job-1a2b3c (then its newest checkpoint is taken), or one of its "
                "checkpoints, such as job-1a2b3c/step-00000500"
            )
        return value

    @property
    def early_stopping_metric(self) -> EvaluationMetric:
        """By what the run ends early, where it does."""
        rule = self.training.early_stopping
        return (rule and rule.metric) or self.checkpoint.best or EvaluationMetric.LOSS

    def lacking_metrics(self, task: str) -> dict[tuple[str, ...], str]:
        """What is wrong with metrics that the evaluations of this task do not have, by key."""
        known = self.evaluation.measured(metrics_of(task, multi_label=self.task.multi_label))
        has = list(dict.fromkeys(metric.value for metric in (EvaluationMetric.LOSS, *known)))
        rule = self.training.early_stopping
        asked: dict[tuple[str, ...], str | None] = {("checkpoint", "best"): self.checkpoint.best}
        asked["training", "early_stopping", "metric"] = None if rule is None else rule.metric
        wrong = {}
        for key, name in asked.items():
            if name is not None and name not in has:
                near = get_close_matches(name, has, n=1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                kind = " with several labels a row" if self.task.multi_label else ""
                left_out = "" if self.evaluation.metrics == "auto" else " by evaluation.metrics"
                wrong[key] = f"the task {task}{kind} has {', '.join(has)}{left_out}, and not {str(name)!r}{meant}"
        return wrong

    @property
    def needs_native_bf16(self) -> bool:
        """Whether the job cannot be trained with its model in float16."""
        method = self.method
        return isinstance(method, FullMethod) or "bfloat16" in (method.base_dtype, method.adapter_dtype)

    def sha256(self) -> str:
        """Hash of the canonical JSON, with the defaults of this version."""
        return canonical_sha256(self.model_dump(mode="json"))


def canonical_sha256(content: object) -> str:
    """Hash of parsed JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_spec(raw: object) -> JobSpec:
    """A JobSpec from parsed JSON, or UserError naming the dotted key, the value, and what to do."""
    if not isinstance(raw, Mapping):
        raise UserError(
            f"a job is a JSON object, not {shorten(raw)}",
            hint='the minimum is {"data": {"train": "rows.jsonl"}}',
        )
    data = raw.get("data")
    named = _named(data) if isinstance(data, Mapping) else {}
    odd = _odd_endings(named) if isinstance(data, Mapping) and data.get("format", "auto") == "auto" else {}
    wrong = _named_again(named) | _quoted_fraction({key: named[key] for key in odd})
    odd = {key: why for key, why in odd.items() if key not in wrong}
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        raise explain(error, JobSpec, further=wrong | odd) from None
    for key, why in (odd or wrong or _wrong_metrics(spec)).items():
        hint = "rename the file, or set data.format to jsonl, csv or parquet" if odd else None
        raise UserError(f"{'.'.join(key)}: {why}", param=".".join(key), hint=hint)
    return spec


def _wrong_metrics(spec: JobSpec) -> dict[tuple[str, ...], str]:
    """Metrics that no evaluation of the job has, as far as that is known without a look at the model, by key."""
    if spec.training.early_stopping is not None and spec.data.validation == 0:
        return {("training", "early_stopping"): "there is nothing to go by, since data.validation is 0"}
    task = builtin_task(spec.model, spec.task.type) or spec.task.type
    return {} if task == "auto" else spec.lacking_metrics(task)


def _named(data: Mapping[object, object]) -> dict[tuple[str, ...], str]:
    """Every file and data set that is named, by its key."""
    train = data.get("train")
    named: dict[tuple[str, ...], object] = {("data", "train"): train}
    several = [train] if isinstance(train, Mapping) else train if isinstance(train, list) else []
    for number, each in enumerate(several):
        named["data", "train", str(number), "source"] = each.get("source") if isinstance(each, Mapping) else each
    named["data", "validation"] = None if data.get("validation") == "auto" else data.get("validation")
    return {key: name for key, name in named.items() if isinstance(name, str) and name}


def _named_again(named: Mapping[tuple[str, ...], str]) -> dict[tuple[str, ...], str]:
    """Rows that the job names twice: duplicates, of which none would be left."""
    seen: set[str] = set()
    wrong = {}
    for key, name in named.items():
        path = name.startswith(("./", "/")) or (data_format(name) is not None and not name.startswith(UPLOADED))
        plain = posixpath.normpath(name) if path else name
        if plain in seen and key[1] == "validation":
            wrong[key] = f"{name} is trained on: name other rows, or a fraction to hold out, such as 0.01"
        elif plain in seen:
            wrong[key] = f"{name} is named twice: name it once, with its weight"
        seen.add(plain)
    return wrong


def _quoted_fraction(named: Mapping[tuple[str, ...], str]) -> dict[tuple[str, ...], str]:
    """A fraction as `data.validation` that was written as text."""
    key = ("data", "validation")
    if (given := named.get(key)) is None or not re.fullmatch(r"[01](\.\d*)?|\.\d+", given):
        return {}
    return {key: f"must be a number, or the name of rows (got {given!r}); did you mean {given}, without quotes?"}


def _odd_endings(named: Mapping[tuple[str, ...], str]) -> dict[tuple[str, ...], str]:
    """Files whose names do not say their format: what is wrong, by key."""
    return {
        key: f"{name!r} is neither a hub data set (org/name) nor a file whose name says what it is: the "
        f"endings known are {', '.join(DATA_SUFFIXES)}"
        for key, name in named.items()
        if data_format(name) is None and hub_data(name, "auto") is None
    }
