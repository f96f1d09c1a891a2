"""What the trainer asks of a task: how its models and rows look, how rows go through a model, and what it learns.

Code that checks, prepares, plans or trains gets a `Task` and knows nothing else about what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jobs.evaluation_metrics import ConfusionMatrix, EvaluationMetric, LabelPlan
from jobs.plan import DataPlan
from jobs.spec import DataSpec
from jobs.trainer_facts import Sample
from worker.training.dataset.data import Int64, Rows
from worker.training.dataset.encoding import RowTask
from worker.training.dataset.tokens import TokenizerState
from worker.training.journal import Journal
from worker.training.rows.chat import Turn
from worker.training.rows.text import Templates, Texts
from worker.training.scores.statistics import Floats, Statistics
from worker.training.steps.order import Widths
from worker.training.steps.shape import Lengths, MicroBatchShape, SafeSize
from worker.training.tasks.evaluated import Answers, Evaluated
from worker.training.tasks.layout import Layout

Config = Mapping[str, Any]
"""The content of a model's config.json."""


@dataclass(frozen=True)
class BuiltinModel:
    """A small model that *prepare* makes by itself, with a tokenizer learned from the data."""

    name: str
    """As a job writes it."""
    version: int
    """Goes up whenever the same data and seed would give another model."""
    config: Config
    tokenizer_rows: int
    """Rows that the tokenizer is learned from, at most."""
    build: Callable[[Path, Iterable[str], int], None]
    """Writes tokenizer, config and weights: empty folder, texts, seed."""
    of_bytes: bool = True
    """Whether its tokenizer knows every character, whatever it is learned from."""


@dataclass(frozen=True)
class Usage:
    """How a finished model is used from Python, in a snippet that has `tokenizer`, `model` and a `text`."""

    inputs: str
    """An expression for what goes into the model."""
    shown: str
    """An expression for what it says, as text, given `inputs`."""
    text: str | Sequence[str]
    """What the text is, for people; of a pair, what both are."""


@dataclass(frozen=True)
class Prompt:
    """What a model reads before it answers."""

    ids: Sequence[int]
    """Tokens."""
    text: str
    """The same as text, whole."""
    cut: bool
    """Whether tokens were cut off its end, as in training."""
    called: Callable[[str], Turn | None] = lambda reply: None
    """What a reply to it says and calls; None: it calls nothing."""
    types: Sequence[int] = ()
    """The type of each token, of a pair for a model that is told of them; else none."""


@dataclass(frozen=True)
class Measured:
    """How well a model does, besides its loss."""

    statistics: Mapping[EvaluationMetric, Statistics] = field(default_factory=dict)
    """Of every metric that the task has, but for those of generated texts."""
    commonest: Mapping[EvaluationMetric, Statistics] = field(default_factory=dict)
    """Of a classifier that always answers the commonest class of these rows, of a regression the mean of their scores;
    no loss."""
    confusion: ConfusionMatrix | None = None
    """Of a classifier with one label a row."""


class Flops(Protocol):
    """FLOPs of a model, or of some of its layers, for rows of so many input and target tokens: [rows] each."""

    def rows(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """Forward and backward."""

    def forward(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """One forward pass."""


class Batch(Protocol):
    """Rows that go through the model at once."""

    @property
    def rows(self) -> Int64:
        """[B] their numbers in the dataset."""

    @property
    def shape(self) -> MicroBatchShape:
        """Rows and padded widths."""

    @property
    def target_tokens(self) -> int:
        """Those that the loss counts."""

    def loss_sum(self, model: PreTrainedModel) -> torch.Tensor:
        """Negative log likelihood summed over the target tokens (0-dim, nats), or squared errors over rows, in fp32 or
        better."""

    def evaluated(self, model: PreTrainedModel) -> Evaluated:
        """`loss_sum`, and what the metrics of the task are computed from; without gradients."""

    def by_row(self, seen: Evaluated) -> tuple[Floats, Answers]:
        """[B] the loss of each row, [B, …] what the model answers; on the CPU."""

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> list[Sample]:
        """What the model writes for each row, beside input and target."""


class Limit(Protocol):
    """How much goes through the model at once, and what memory has taught about it, by length bucket."""

    @property
    def micro_batch(self) -> int:
        """Rows of the longest shape that the data has."""

    @property
    def longest(self) -> MicroBatchShape:
        """One row of that shape."""

    @property
    def safe(self) -> Mapping[str, SafeSize]:
        """Buckets that have a size of their own, which is never more than `micro_batch`."""

    def size(self, bucket: str) -> int:
        """Of a bucket, in rows of the longest shape."""

    def of_texts(self, together: int) -> Limit:
        """For so many rows whose texts are written at once: a short row may get a text as long as any."""

    def shapes(self, rows: Rows, groups: Sequence[Int64]) -> list[MicroBatchShape]:
        """Of the micro-batches of these groups, in order."""

    def batches(self, rows: Rows, groups: Sequence[Int64], pad_id: int) -> Sequence[Batch]:
        """The rows of these groups in micro-batches, on the CPU."""

    def lowered(self, rows: Rows, groups: Sequence[Int64], failed: MicroBatchShape, *, passing: bool) -> Limit | None:
        """With a smaller size for the bucket of a micro-batch of these groups that `failed`; None at one row.

        `passing`: the cause may be gone by the next epoch, which then begins with the present size again.
        """

    def regrown(self) -> Limit:
        """At the beginning of an epoch: what was lowered for a cause that may have passed is as it was before."""


class Task(RowTask, Protocol):
    """What a model learns. The order below is that of a job: its data, its model as files, then in memory.

    Of its rows, `RowTask` has the rest.
    """

    def templates(
        self,
        input: str | None,
        target: str | None,
        columns: Collection[str],
        source: str,
        elsewhere: Collection[str] = (),
    ) -> Templates:
        """What a row is made of: as the job says, else recognized by the columns of the data.

        `elsewhere`: columns of the job's other sources, which this one may lack where they are optional.

        Raises BadData (`unknown_column`, `no_usable_columns`), Rejected (`bad_template`).
        """

    def reading_as(self, data: DataPlan) -> Task:
        """The same task, reading rows as this plan of them does, of the job or of the one that is resumed from."""

    @property
    def reads_labels(self) -> bool:
        """See `DataPlan.labels_read`."""

    @property
    def reads_pairs(self) -> bool:
        """See `DataPlan.pairs_read`."""

    @property
    def separator(self) -> int | None:
        """See `DataPlan.separator`."""

    def of_pairs(self, tokenizer: TokenizerState | None, config: Config) -> Task:
        """The same task, for rows that are pairs of texts, with a tokenizer (None: it will be made of the rows) and the
        model of this config.json. Raises Rejected (`bad_config`, `tokenizer_unusable`)."""

    @property
    def by_reply(self) -> bool:
        """See `DataPlan.by_reply`."""

    @property
    def chat_template(self) -> str | None:
        """See `DataPlan.chat_template`."""

    @property
    def keeps_ends(self) -> bool:
        """See `DataPlan.ends_kept`."""

    def labelled(self, found: Mapping[str, int], config: Config, *, complete: bool, usable: int | None = None) -> Task:
        """The same task, knowing labels and how many rows have each; itself where it has none or knows them.

        Its `target_template` then reads rows by them. `config`: of the model that the job names, which may have labels.
        `complete`: these are all. `usable`: rows that they are of; None: not counted.

        Raises Rejected (`other_labels`), BadData (`doubtful_label`, `too_few_labels`, `too_many_labels`).
        """

    @property
    def labels(self) -> tuple[LabelPlan, ...]:
        """Those that are known, in the order of their numbers; of a task without labels none."""

    @property
    def labels_noticed(self) -> tuple[str, ...]:
        """What people should know of how labels are read, a sentence each."""

    def counted(self, rows: Rows) -> tuple[LabelPlan, ...]:
        """The same, with how many of these rows have each."""

    def row_format(self, columns: Collection[str]) -> str | None:
        """What rows with these columns are recognized as, for people, such as `OpenAI chat`; None: nothing."""

    @property
    def unit(self) -> str:
        """What the loss is a mean over, for people."""

    @property
    def squares(self) -> bool:
        """Whether the loss is a squared error; else it is a negative log likelihood."""

    @property
    def metrics(self) -> tuple[EvaluationMetric, ...]:
        """By which its models can be judged."""

    @property
    def targets_apart(self) -> bool:
        """Whether targets go through the model beside the inputs; else they are part of these, or no tokens."""

    @property
    def limit_keys(self) -> tuple[str, ...]:
        """The job keys that limit the tokens of a row: the input's and the target's, or one of both."""

    def guessed_lengths(self, characters: Sequence[tuple[int, int]], data: DataSpec) -> tuple[Lengths, Lengths]:
        """[rows] numbers of each side, guessed from the characters that are only read, and those that are learned."""

    # -- models as files ------------------------------------------------------------------------------------------

    def takes(self, config: Config) -> bool:
        """Whether a model with this config.json is one of its models."""

    @property
    def models(self) -> str:
        """Which models these are, for people."""

    @property
    def builtin(self) -> BuiltinModel:
        """The model that needs no download."""

    def adapted(self, config: Config) -> Config:
        """The config.json of the model that is trained, given that of the model that the job names."""

    def noticed(self, config: Config) -> tuple[str, ...]:
        """What of the model that the job names is not trained as its config.json says, a sentence each."""

    @property
    def keeps_line_breaks(self) -> bool:
        """Whether a tokenizer that reads line breaks as spaces gets a token for them."""

    def model_facts(self, seed: int) -> Sequence[object]:
        """What else than files decides the model that is trained; JSON."""

    def initialized(self, config: Config, names: Collection[str], seed: int) -> Mapping[str, torch.Tensor]:
        """First values for tensors of an adapted model that no file has (`Layout.new`)."""

    def layout(self, config: Config) -> Layout:
        """Which tensors the model has. Raises Rejected (`bad_config`)."""

    def layers(self, config: Config) -> int:
        """How many layers the model has."""

    def flops(self, config: Config) -> Flops:
        """Of the whole model. Raises Rejected (`bad_config`)."""

    def recomputed_flops(self, config: Config, every: int) -> Flops:
        """Of the layers whose activations are recomputed: every n-th; 0: none."""

    def generation(self, folder: Path) -> Mapping[str, object] | None:
        """What generation_config.json must say beside what that of the model in a folder says; None: there is none."""

    def usage(self, data: DataSpec, new_tokens: int) -> Usage:
        """The same for every row. `new_tokens`: room for a target."""

    def asked(self, tokenizer: TokenizerState, texts: Texts, data: DataSpec) -> Prompt:
        """The input as in training; `texts` has no target. Raises Defect."""

    def prompt(
        self, rows: Rows, row: int, tokenizer: PreTrainedTokenizerBase, data: DataSpec
    ) -> str | Sequence[str] | None:
        """The text, or both of a pair, from which `usage` makes what the model was given of this row; None: there is
        none."""

    # -- rows as micro-batches ------------------------------------------------------------------------------------

    def measured(self, rows: Rows, chosen: Int64, losses: Floats, answers: Answers) -> Measured:
        """[chosen] rows, and what `by_row` gave for each."""

    def widths(self, rows: Rows) -> Widths:
        """By what rows are grouped."""

    def limit(self, rows: Rows, micro_batch: int, safe: Mapping[str, SafeSize] | None = None) -> Limit:
        """For the longest of these rows."""

    def empty_batch(self, shape: MicroBatchShape, *, padded: bool, device: torch.device) -> Batch:
        """A micro-batch without values. `padded`: some inputs are shorter than the widest."""

    # -- models in memory -----------------------------------------------------------------------------------------

    def auto_class(self) -> Any:
        """The class of transformers with `from_pretrained`."""

    def bare(self, config: Config, dtype: torch.dtype) -> PreTrainedModel:
        """The model that config.json describes, on the device in use. Raises whatever transformers does."""

    def configure(self, model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
        """Exchange modules for faster ones; set the rate of every dropout (None: it stays). Weights stay."""

    def uncompiled(self, model: PreTrainedModel, *, recomputed: bool) -> str | None:
        """Why the layers of a fused model run as they are, whatever the job says; None: they can be compiled.

        `recomputed`: activations of some are. The model may be on the device "meta".
        """

    def compile(self, model: PreTrainedModel, journal: Journal) -> str | None:
        """Compile the layers of a fused model for training, as the phase `compile`; why compiling failed, if so.

        Only for a model of which `uncompiled` says nothing.
        """
