"""The task `classification`, as the trainer asks for it. What needs torch is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from jobs.companions import CompanionColumns
from jobs.errors import Rejected
from jobs.evaluation_metrics import EvaluationMetric, LabelPlan, metrics_of
from jobs.plan import DataPlan
from jobs.preview import SpanPreview
from jobs.spec import DataSpec, JobSpec
from worker.training.dataset.data import Int64, Rows
from worker.training.dataset.encoding import LabelReport, Limits
from worker.training.dataset.tokens import TokenizerState, guessed_tokens
from worker.training.journal import Journal
from worker.training.rows.labels import KnownLabels, LabelTemplate, labels_in
from worker.training.rows.text import Template, Templates, Texts, input_template
from worker.training.scores.statistics import Floats
from worker.training.steps.shape import Lengths, MicroBatchShape, SafeSize
from worker.training.tasks.classification import batches, builtin, layout, metrics
from worker.training.tasks.classification.batches import ClassBatch, ClassLimit
from worker.training.tasks.classification.fused import ClassLoss, HeadLoss, balanced, configure
from worker.training.tasks.classification.labels import (
    ClassEncoder,
    ClassTokenizer,
    check_no_vectors,
    chosen_labels,
    how_read,
    rows_of_labels,
)
from worker.training.tasks.classification.layout import ClassFlops
from worker.training.tasks.classification.pairs import decoded, end_of, token_types
from worker.training.tasks.classification.report import ClassReport
from worker.training.tasks.columns import (
    LABELLED,
    LABELLED_BEFORE,
    RowFormat,
    asked_input,
    choose_templates,
    recognize,
)
from worker.training.tasks.evaluated import Answers
from worker.training.tasks.layout import Layout, check_positions
from worker.training.tasks.task import BuiltinModel, Config, Measured, Prompt, Usage
from worker.training.tasks.widths import InputWidths

FAMILIES = frozenset(
    {
        "bert", "roberta", "deberta", "deberta-v2", "modernbert", "distilbert", "electra", "xlm-roberta", "camembert",
        "mpnet",
    }
)  # fmt: skip
"""`model_type` of encoders. Others are taken by their architecture, and check themselves."""
_ARCHITECTURES = ("ForMaskedLM", layout.CLASSIFIER)


@dataclass(frozen=True)
class Classification:
    """Which label, or which labels, a text has. The methods are described in `Task`."""

    several: bool = False
    """A row has any number of labels."""
    named: tuple[str, ...] | None = None
    """Labels that the job names."""
    labels: tuple[LabelPlan, ...] = ()
    """Empty until rows were looked at."""
    weights: tuple[float, ...] | None = None
    """Of the labels, in the loss."""
    positions: int = 0
    """Tokens of a text at most, as the job says."""
    labels_noticed: tuple[str, ...] = ()
    as_written: bool = False
    """Labels of rows stand for themselves alone (`DataPlan.labels_read`)."""
    joined: bool = False
    """Two texts that are recognized are read as one (`DataPlan.pairs_read`)."""
    pairs: bool = False
    """Rows are pairs of texts."""
    separator: int | None = None
    """See `DataPlan.separator`."""
    name: ClassVar[str] = "classification"
    targets_apart: ClassVar[bool] = False
    limit_keys: ClassVar[tuple[str, ...]] = ("data.max_input_tokens",)
    unit: ClassVar[str] = "row"
    squares: ClassVar[bool] = False
    has_labels: ClassVar[bool] = True
    keeps_line_breaks: ClassVar[bool] = False
    keeps_ends: ClassVar[bool] = False
    formats: ClassVar[Sequence[RowFormat]] = LABELLED
    """What rows are recognized as."""
    formats_before: ClassVar[Sequence[RowFormat]] = LABELLED_BEFORE
    """The same in plans that read two texts as one."""
    models: ClassVar[str] = "BERT, RoBERTa, DeBERTa, ModernBERT, DistilBERT and other encoders"

    @classmethod
    def of(cls, spec: JobSpec, data: DataPlan | None = None) -> Classification:
        """As the job sets it."""
        asked, labels = spec.task, () if data is None else data.labels
        weights = None
        if data is not None and asked.class_weights == "balanced":
            rows = sum(source.rows for source in data.sources) or data.rows
            weights = balanced(labels, rows, several=asked.multi_label)
        named = None if asked.labels is None else tuple(asked.labels)
        made = cls(asked.multi_label, named, labels, weights, spec.data.max_input_tokens)
        return made if data is None else made.reading_as(data)

    def reading_as(self, data: DataPlan) -> Classification:
        """See `Task`."""
        inputs = [data.input, data.validation_input, *(source.input for source in data.sources)]
        pairs = any(input is not None and input_template(input).pair for input in inputs)
        return replace(
            self, as_written=not data.labels_read, joined=not data.pairs_read, pairs=pairs, separator=data.separator
        )

    by_reply: ClassVar[bool] = False
    chat_template: ClassVar[None] = None

    @property
    def reads_labels(self) -> bool:
        return not self.as_written

    @property
    def reads_pairs(self) -> bool:
        return not self.joined

    # -- rows --------------------------------------------------------------------------------------------------------

    @property
    def label_names(self) -> list[str]:
        """By number."""
        return [label.name for label in self.labels]

    @property
    def variant(self) -> object:
        return [self.several, self.label_names] + ["read"] * self.reads_labels

    def templates(
        self,
        input: str | None,
        target: str | None,
        columns: Collection[str],
        source: str,
        elsewhere: Collection[str] = (),
    ) -> Templates:
        if input is None and target is not None:
            raise Rejected(
                "data.target is set without data.input, the text that it is of",
                code="no_input",
                param="data.input",
                hint="set data.input, too, or leave both out",
            )
        text, label = choose_templates(input, target, columns, source, self._formats, elsewhere, pairs=True)
        return text, self.target_template(label.source, label.companions)

    def target_template(self, text: str, companions: CompanionColumns) -> Template:
        names = self.label_names or self.named
        known = None if names is None else self._reading(names)
        return LabelTemplate.of(
            text, "data.target", companions, several=self.several, known=known, as_written=self.as_written
        )

    def _reading(self, names: Sequence[str]) -> KnownLabels:
        return KnownLabels.of(names, several=self.several, as_written=self.as_written)

    def row_format(self, columns: Collection[str]) -> str | None:
        """See `Task`."""
        found = recognize(columns, self._formats)
        return None if found is None else found.name

    @property
    def _formats(self) -> Sequence[RowFormat]:
        return self.formats_before if self.joined else self.formats

    def of_pairs(self, tokenizer: TokenizerState | None, config: Config) -> Classification:
        """Raises Rejected (`bad_config`, `tokenizer_unusable`)."""
        separator = None
        if isinstance(tokenizer, ClassTokenizer) and layout.token_types_of(config) > 1:
            separator = tokenizer.types_begin
        return replace(self, pairs=True, separator=separator)

    def labels_of(self, texts: Texts) -> Sequence[str]:
        return labels_in(texts.target, several=self.several)

    def builtin_spans(self, texts: Texts) -> tuple[SpanPreview, ...]:
        return ()

    def label_report(self, tokenizer: TokenizerState) -> LabelReport:
        return ClassReport(self.label_names, tokenizer, self.labels_noticed)

    def labelled(
        self, found: Mapping[str, int], config: Config, *, complete: bool, usable: int | None = None
    ) -> Classification:
        """Raises Rejected (`other_labels`), BadData (`doubtful_label`, `too_few_labels`, `too_many_labels`)."""
        if self.labels:
            return self
        if self.several and self.named is None and not self.as_written and usable is not None:
            check_no_vectors(found, usable)
        known = layout.labels_of(config) if layout.is_classifier(config) else None
        least = 1 if self.several or not complete else 2
        chosen = chosen_labels(
            found, named=self.named, known=known, least=least, several=self.several, as_written=self.as_written
        )
        rows = rows_of_labels(found, self._reading(chosen))
        labels = tuple(LabelPlan(name=label, rows=rows[label]) for label in chosen)
        noticed = () if self.as_written else how_read(found, chosen, several=self.several)
        return replace(self, labels=labels, labels_noticed=noticed)

    def counted(self, rows: Rows) -> tuple[LabelPlan, ...]:
        counts = rows.occurrences("target", len(self.labels)).tolist()
        return tuple(LabelPlan(name=label.name, rows=count) for label, count in zip(self.labels, counts, strict=True))

    def limits(self, data: DataSpec) -> Limits:
        return {"input": data.max_input_tokens, "target": max(1, len(self.labels)) if self.several else 1}

    def guessed_lengths(self, characters: Sequence[tuple[int, int]], data: DataSpec) -> tuple[Lengths, Lengths]:
        around = 4 if self.pairs else 2
        tokens = np.minimum(guessed_tokens(characters)[:, 0] + around, data.max_input_tokens)
        return tokens, np.ones_like(tokens)

    def tokenizer(self, folder: Path) -> ClassTokenizer:
        return ClassTokenizer.read(folder)

    def tried(self, tokenizer: TokenizerState, texts: Sequence[Texts], limits: Limits) -> ClassTokenizer:
        """Raises Rejected (`tokenizer_unusable`, `limit_too_small`)."""
        assert isinstance(tokenizer, ClassTokenizer), "of `tokenizer`"
        found, limit = tokenizer.as_it_is([text for one in texts for text in one.read]), limits["input"]
        found.check_limits({self.limit_keys[0]: limit})
        pairs = [one.read for one in texts if one.second]
        if not pairs and not self.pairs:
            return found
        found = found.framed(pairs)
        assert found.frame is not None
        found.check_limits({self.limit_keys[0]: limit}, found.frame.size + 1)  # a token of each text
        return found

    def encoder(self, tokenizer: TokenizerState, limits: Limits) -> Callable[[], ClassEncoder]:
        assert isinstance(tokenizer, ClassTokenizer), "of `tokenizer`"
        return partial(ClassEncoder, tokenizer, limits, self.label_names, several=self.several)

    # -- models as files ---------------------------------------------------------------------------------------------

    def takes(self, config: Config) -> bool:
        named = config.get("architectures") or []
        made_for_it = any(str(each).endswith(_ARCHITECTURES) for each in named)
        return config.get("model_type") in FAMILIES or (made_for_it and not config.get("is_encoder_decoder"))

    @property
    def builtin(self) -> BuiltinModel:
        config = self.adapted(builtin.CONFIG)
        return BuiltinModel(
            builtin.NAME, builtin.VERSION, config, builtin.TOKENIZER_ROWS, partial(builtin.write, config)
        )

    def noticed(self, config: Config) -> tuple[str, ...]:
        return ()

    def adapted(self, config: Config) -> Config:
        """Raises Rejected (`bad_config`, `limit_too_large`)."""
        check_positions(self.limit_keys[0], self.positions, layout.positions_of(config))
        if len(self.labels) < (1 if self.several else 2):  # the first rows have one: there must be another further down
            return config
        kind = "multi_label_classification" if self.several else "single_label_classification"
        return layout.adapted(config, self.label_names, kind)

    def model_facts(self, seed: int) -> Sequence[object]:
        return [self.label_names, self.several, seed]

    def initialized(self, config: Config, names: Collection[str], seed: int) -> Mapping[str, torch.Tensor]:
        return layout.initialized(config, names, seed)

    def layout(self, config: Config) -> Layout:
        return layout.layout_of(config)

    def layers(self, config: Config) -> int:
        return layout.layers_of(config)

    def flops(self, config: Config) -> ClassFlops:
        return ClassFlops.of_config(config)

    def recomputed_flops(self, config: Config, every: int) -> ClassFlops:
        return ClassFlops.recomputed(config, every)

    def generation(self, folder: Path) -> None:
        """It writes nothing."""

    def usage(self, data: DataSpec, new_tokens: int) -> Usage:
        one = "model.config.id2label[model(**inputs).logits[0].argmax().item()]"
        several = '"; ".join(model.config.id2label[n] for n, each in enumerate(model(**inputs).logits[0]) if each > 0)'
        return Usage(
            inputs=f'tokenizer({"*" * self.pairs}text, return_tensors="pt", truncation=True, '
            f"max_length={data.max_input_tokens})",
            shown=several if self.several else one,
            text=["your text, written as in the table above", "the text beside it"] if self.pairs
            else "your text, written as in the table above",
        )  # fmt: skip

    def asked(self, tokenizer: TokenizerState, texts: Texts, data: DataSpec) -> Prompt:
        if not texts.second:
            return asked_input(tokenizer, texts, data.max_input_tokens)
        found = self.encoder(tokenizer, self.limits(data))().encode_read([texts.read])
        types = () if self.separator is None else token_types(found.tokens, self.separator).tolist()
        cut = bool(found.full_lengths[0] > found.lengths[0])
        return Prompt(found.tokens.tolist(), "\n".join(texts.read), cut, types=types)

    def prompt(
        self, rows: Rows, row: int, tokenizer: PreTrainedTokenizerBase, data: DataSpec
    ) -> str | Sequence[str] | None:
        given = rows.input(row).tolist()
        texts = decoded(given, end_of(tokenizer), partial(tokenizer.decode, skip_special_tokens=True))
        # A decoded text may begin with a space that the row does not.
        for each in ([text.strip() for text in texts], texts):
            if tokenizer(*each, truncation=True, max_length=data.max_input_tokens)["input_ids"] == given:
                return each if self.pairs else each[0]
        return None

    # -- rows as micro-batches ---------------------------------------------------------------------------------------

    @property
    def loss(self) -> HeadLoss:
        """What is learned."""
        return ClassLoss(max(1, len(self.labels)), self.several, self.weights)

    @property
    def metrics(self) -> tuple[EvaluationMetric, ...]:
        return metrics_of("classification", multi_label=self.several)

    def measured(self, rows: Rows, chosen: Int64, losses: Floats, answers: Answers) -> Measured:
        return metrics.measured(rows, chosen, losses, answers.astype(np.int64), self.label_names, several=self.several)

    def widths(self, rows: Rows) -> InputWidths:
        return InputWidths(rows)

    def limit(self, rows: Rows, micro_batch: int, safe: Mapping[str, SafeSize] | None = None) -> ClassLimit:
        return replace(ClassLimit.of(rows, micro_batch, safe).with_loss(self.loss), separator=self.separator)

    def empty_batch(self, shape: MicroBatchShape, *, padded: bool, device: torch.device) -> ClassBatch:
        typed = self.separator is not None
        return batches.empty_batch(shape, padded=padded, device=device, loss=self.loss, typed=typed)

    # -- models in memory --------------------------------------------------------------------------------------------

    def auto_class(self) -> Any:
        return AutoModelForSequenceClassification

    def bare(self, config: Config, dtype: torch.dtype) -> PreTrainedModel:
        return layout.build(config, dtype)

    def configure(self, model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
        configure(model, fused=fused, dropout=dropout)

    def uncompiled(self, model: PreTrainedModel, *, recomputed: bool) -> str:
        return "layers of encoders run as they are"

    def compile(self, model: PreTrainedModel, journal: Journal) -> str:
        return self.uncompiled(model, recomputed=False)
