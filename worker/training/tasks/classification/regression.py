"""The task `regression`: a head of one output gives a text a score, a number.

Scores are learned as they stand in the rows, and the loss is the squared error in float32, as transformers computes it
for `problem_type="regression"`. The last layer of a new head begins with the mean of the scores as its bias, and with
weights as large as their standard deviation asks. So scores of 0 to 100 are learned like those of 0 to 1, and the model
answers in their unit at any time, also as it is delivered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from jobs.companions import CompanionColumns
from jobs.dataset_report import ScoreSummary
from jobs.errors import BadData, Rejected
from jobs.evaluation_metrics import EvaluationMetric, LabelPlan, metrics_of
from jobs.spec import DataSpec
from jobs.text.units import format_number, format_score
from worker.training.dataset.data import Int64, Rows, Tokens
from worker.training.dataset.encoding import LabelReport, Limits
from worker.training.dataset.tokens import TokenizerState
from worker.training.rows.row_filter import UInt64
from worker.training.rows.scores import ScoreTemplate, number_in
from worker.training.rows.text import Template, Texts, template
from worker.training.scores.statistics import Floats, RankCorrelation, Statistics, Sums, correlation, quotient
from worker.training.tasks.classification import builtin, layout
from worker.training.tasks.classification.fused import Words
from worker.training.tasks.classification.labels import ClassEncoder, ClassTokenizer
from worker.training.tasks.classification.report import Side
from worker.training.tasks.classification.task import Classification
from worker.training.tasks.columns import SCORED, RowFormat
from worker.training.tasks.evaluated import Answers
from worker.training.tasks.layout import check_positions
from worker.training.tasks.task import BuiltinModel, Config, Measured, Usage

_M = EvaluationMetric

# -- scores as numbers -------------------------------------------------------------------------------------------------
# A prepared dataset holds whole numbers of 16 or 32 bits, so a score is the four or two of them that its float64 has.

_PARTS = 4
"""At most."""
_FINE = 0.1
"""Of the standard deviation: a coarser step between the answers of a model is said."""


class ScoreEncoder(ClassEncoder):
    """By a tokenizer that was tried."""

    def __init__(self, tokenizer: ClassTokenizer, limits: Limits) -> None:
        super().__init__(tokenizer, limits, [], several=False)

    def numbers(self, target: str) -> list[int]:
        """Those that the float64 of a score has."""
        parts: list[int] = np.array([number_in(target)], "<f8").view(self._dtype).tolist()
        return parts


def scores_of(rows: Rows, chosen: Int64) -> Floats:
    """[chosen] scores."""
    parts = int(rows.target_lengths[:1].sum())
    return _joined(rows.gather("target", chosen, parts, 0), parts)


def _joined(numbers: Int64 | Tokens, parts: int) -> Floats:
    """Any shape, so many numbers a score -> [scores]."""
    of_a_score = np.ascontiguousarray(numbers, "<u2" if parts == _PARTS else "<u4")
    found: Floats = of_a_score.reshape(-1).view("<f8")
    return found


def summary(scores: Floats, rows: Floats | None = None) -> ScoreSummary:
    """Of [n] scores, each in so many rows."""
    counts = np.ones_like(scores) if rows is None else rows
    total = math.fsum(counts)
    mean = math.fsum(counts * scores) / total
    variance = math.fsum(counts * (scores - mean) ** 2) / total
    return ScoreSummary(low=float(scores.min()), high=float(scores.max()), mean=mean, deviation=math.sqrt(variance))


def too_far_from_zero(scores: ScoreSummary) -> tuple[str, ...]:
    """A sentence where they lie so far from 0 that the model, in bfloat16, cannot tell many of them apart."""
    largest = max(abs(scores.low), abs(scores.high))
    step = 2.0 ** (math.frexp(largest)[1] - 8)
    if step <= _FINE * scores.deviation:
        return ()
    near, mean = format_number(largest), format_number(scores.mean)
    return (
        f"near {near} a model in bfloat16 tells no scores apart that differ by less than {format_number(step)}: "
        f"subtract the mean, about {mean}, from all of them",
    )


@dataclass(frozen=True)
class ScoreReport:
    """As `LabelReport`."""

    def __call__(
        self, numbers: Mapping[str, Side], split_keys: UInt64, parts: Mapping[str, Int64], most: int
    ) -> ScoreSummary:
        """Of all rows."""
        found, ends = numbers["target"]
        return summary(_joined(found, int(ends[1]))[np.concatenate(list(parts.values()))])


# -- loss and metrics --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SquaredError:
    """The loss. The methods are described in `HeadLoss`."""

    def labels(self, rows: Rows, chosen: Int64) -> torch.Tensor:
        """[B] float64."""
        return torch.from_numpy(scores_of(rows, chosen))

    def empty_labels(self, rows: int, device: torch.device) -> torch.Tensor:
        return torch.empty(rows, dtype=torch.float64, device=device)

    def sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.of_rows(logits, labels).sum()

    def of_rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.mse_loss(wide[:, 0], labels.to(wide.dtype), reduction="none")

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, 0].double()

    def words(self, label: torch.Tensor, logits: torch.Tensor, known: Mapping[int, str]) -> Words:
        return Words(repr(float(label)), format_score(float(logits[0])))


def score_statistics(truth: Floats, told: Floats) -> dict[EvaluationMetric, Statistics]:
    """[rows] scores, and what a model says. A correlation with what is constant is no number."""
    errors = told - truth
    return {
        _M.MSE: Sums.ratio(_M.MSE, errors**2, 1),
        _M.RMSE: Sums.ratio(_M.RMSE, errors**2, 1, lambda sums: np.sqrt(quotient(sums))),
        _M.MAE: Sums.ratio(_M.MAE, np.abs(errors), 1),
        _M.PEARSON: Sums(_M.PEARSON, _moments(truth, told), _pearson),
        _M.SPEARMAN: RankCorrelation(truth, told),
    }


def _moments(truth: Floats, told: Floats) -> Floats:
    """[rows, 6] whose sums give a correlation; around the mean, so that little is cancelled."""
    x, y = (each - each.mean() if len(each) else each for each in (truth, told))
    return np.stack([np.ones_like(x), x, y, x * y, x * x, y * y], 1)


def _pearson(sums: Floats) -> Floats:
    rows, x, y, xy, xx, yy = sums.T
    of_x, of_y = (squares - each**2 / rows for squares, each in ((xx, x), (yy, y)))
    of_x, of_y = (np.where(each > _CONSTANT * squares, each, 0.0) for each, squares in ((of_x, xx), (of_y, yy)))
    return correlation(xy - x * y / rows, of_x, of_y)


_CONSTANT = 1e-12
"""Share of the squares that is left of numbers that are all equal, by rounding."""


# -- task --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression(Classification):
    """Which score a text has. The methods are described in `Task`."""

    spread: ScoreSummary | None = None
    """None until rows were looked at."""
    name: ClassVar[str] = "regression"
    squares: ClassVar[bool] = True
    formats: ClassVar[Sequence[RowFormat]] = SCORED
    formats_before: ClassVar[Sequence[RowFormat]] = SCORED

    # -- rows --------------------------------------------------------------------------------------------------------

    @property
    def variant(self) -> object:
        return "scores"

    def target_template(self, text: str, companions: CompanionColumns) -> Template:
        plain = template(text, "data.target")
        return ScoreTemplate(plain.source, plain.literals, plain.placeholders, companions)

    def labels_of(self, texts: Texts) -> Sequence[str]:
        """Rounded, so that there are not as many as rows."""
        return [format_score(number_in(texts.target))]

    def label_report(self, tokenizer: TokenizerState) -> LabelReport:
        return ScoreReport()

    def labelled(
        self, found: Mapping[str, int], config: Config, *, complete: bool, usable: int | None = None
    ) -> Regression:
        """Raises Rejected (`other_labels`), BadData (`too_few_labels`)."""
        if layout.is_classifier(config):
            known = layout.layout_of(config)
            if (outputs := known.shapes[known.head][0]) != 1:
                raise Rejected(
                    f"model: it is a classifier already, with {outputs} labels, and a regression has one output",
                    code="other_labels",
                    param="model",
                    hint="name the pretrained model that it was made from",
                )
        if not found:
            return self
        spread = summary(np.array([float(score) for score in found]), np.array(list(found.values()), np.float64))
        if complete and spread.low == spread.high:
            raise BadData(
                f"data.target: all rows have the score {format_score(spread.low)}, to six digits: nothing is learned",
                code="too_few_labels",
                param="data.target",
                hint="name another column",
            )
        return replace(self, spread=spread, labels_noticed=(spread.text, *too_far_from_zero(spread)))

    def counted(self, rows: Rows) -> tuple[LabelPlan, ...]:
        return ()

    def limits(self, data: DataSpec) -> Limits:
        return {"input": data.max_input_tokens, "target": _PARTS}

    def encoder(self, tokenizer: TokenizerState, limits: Limits) -> Callable[[], ClassEncoder]:
        assert isinstance(tokenizer, ClassTokenizer), "of `tokenizer`"
        return partial(ScoreEncoder, tokenizer, limits)

    # -- models as files ---------------------------------------------------------------------------------------------

    @property
    def builtin(self) -> BuiltinModel:
        config = self.adapted(builtin.CONFIG)
        write = partial(builtin.write, config, begin=partial(self._at_the_scores, config))
        return BuiltinModel(builtin.NAME, builtin.VERSION, config, builtin.TOKENIZER_ROWS, write)

    def adapted(self, config: Config) -> Config:
        """Raises Rejected (`bad_config`, `limit_too_large`)."""
        check_positions(self.limit_keys[0], self.positions, layout.positions_of(config))
        known = layout.labels_of(config) if layout.is_classifier(config) else []
        return layout.adapted(config, known if len(known) == 1 else ["LABEL_0"], "regression")

    def model_facts(self, seed: int) -> Sequence[object]:
        return ["regression", self.spread and [self.spread.mean, self.spread.deviation], seed]

    def initialized(self, config: Config, names: Collection[str], seed: int) -> Mapping[str, torch.Tensor]:
        found = super().initialized(config, names, seed)
        self._at_the_scores(config, found)
        return found

    def _at_the_scores(self, config: Config, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the last layer of a new head, as it was drawn, answer with the mean and in the spread of the scores."""
        weight = layout.layout_of(config).head
        bias = f"{weight.removesuffix('weight')}bias"
        if self.spread is not None and {weight, bias} <= tensors.keys():
            tensors[weight].mul_(self.spread.deviation or 1.0)
            tensors[bias].fill_(self.spread.mean)

    def usage(self, data: DataSpec, new_tokens: int) -> Usage:
        return replace(super().usage(data, new_tokens), shown='f"{model(**inputs).logits.item():.6g}"')

    # -- rows as micro-batches ---------------------------------------------------------------------------------------

    @property
    def loss(self) -> SquaredError:
        """What is learned."""
        return SquaredError()

    @property
    def metrics(self) -> tuple[EvaluationMetric, ...]:
        return metrics_of("regression")

    def measured(self, rows: Rows, chosen: Int64, losses: Floats, answers: Answers) -> Measured:
        truth = scores_of(rows, chosen)
        found = score_statistics(truth, answers.astype(np.float64))
        mean = score_statistics(truth, np.full_like(truth, truth.mean()))
        alone = {metric: each for metric, each in mean.items() if not metric.higher_is_better}
        return Measured({_M.LOSS: Sums.ratio(_M.LOSS, losses, 1), **found}, alone)
