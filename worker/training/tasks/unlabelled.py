"""Tasks whose rows have no labels and whose models are trained as they come: what `Task` asks of them about either."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np
import torch

from jobs.companions import CompanionColumns
from jobs.evaluation_metrics import EvaluationMetric, LabelPlan, metrics_of
from jobs.plan import DataPlan
from jobs.preview import SpanPreview
from worker.training.dataset.data import Int64, Rows
from worker.training.dataset.encoding import LabelReport
from worker.training.dataset.tokens import TokenizerState
from worker.training.rows.text import Template, Texts, template
from worker.training.scores.statistics import Floats, Sums, quotient
from worker.training.tasks.evaluated import Answers
from worker.training.tasks.task import Config, Measured

_M = EvaluationMetric


class Unlabelled:
    """The methods are described in `Task`."""

    unit: ClassVar[str] = "target token"
    squares: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    labels: ClassVar[tuple[LabelPlan, ...]] = ()
    reads_labels: ClassVar[bool] = False
    reads_pairs: ClassVar[bool] = False
    separator: ClassVar[int | None] = None
    by_reply: bool = False
    chat_template: str | None = None
    keeps_ends: bool = False
    labels_noticed: ClassVar[tuple[str, ...]] = ()
    keeps_line_breaks: bool = False
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = metrics_of("seq2seq")

    def target_template(self, text: str, companions: CompanionColumns) -> Template:
        return replace(template(text, "data.target"), companions=companions)

    def labels_of(self, texts: Texts) -> Sequence[str]:
        return ()

    def label_report(self, tokenizer: TokenizerState) -> LabelReport:
        return lambda numbers, split_keys, parts, most: None

    def builtin_spans(self, texts: Texts) -> tuple[SpanPreview, ...]:
        return ()

    def of_pairs(self, tokenizer: TokenizerState | None, config: Config) -> Self:
        return self

    def reading_as(self, data: DataPlan) -> Self:
        return self

    def labelled(self, found: Mapping[str, int], config: Config, *, complete: bool, usable: int | None = None) -> Self:
        return self

    def counted(self, rows: Rows) -> tuple[LabelPlan, ...]:
        return ()

    def noticed(self, config: Config) -> tuple[str, ...]:
        return ()

    def adapted(self, config: Config) -> Config:
        return config

    def model_facts(self, seed: int) -> Sequence[object]:
        return ()

    def initialized(self, config: Config, names: Collection[str], seed: int) -> Mapping[str, torch.Tensor]:
        assert not names, names
        return {}

    def measured(self, rows: Rows, chosen: Int64, losses: Floats, answers: Answers) -> Measured:
        tokens = rows.target_lengths[chosen]
        return Measured(
            {
                _M.LOSS: Sums.ratio(_M.LOSS, losses, tokens),
                _M.PERPLEXITY: Sums.ratio(_M.PERPLEXITY, losses, tokens, _perplexity),
                _M.TOKEN_ACCURACY: Sums.ratio(_M.TOKEN_ACCURACY, answers, tokens),
            }
        )


def _perplexity(sums: Floats) -> Floats:
    with np.errstate(over="ignore"):  # of a model that is worse than any guess
        return np.exp(quotient(sums))
