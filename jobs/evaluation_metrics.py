"""By what a model is judged: classes, and one row for each metric. What names, words or compares one reads it here.

On disk, in the API and in a job a metric is its name, a plain string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal

from jobs.frozen import Frozen
from jobs.text.units import format_figure

# -- labels ------------------------------------------------------------------------------------------------------------
# Classes of a classifier.

CONFUSION = "confusion.json"
"""In the run directory: a `ConfusionMatrix` of the newest evaluation."""


class LabelPlan(Frozen):
    """A class that a classifier knows."""

    name: str
    """As in the rows."""
    rows: int
    """Training rows that have it; before prepare, of those looked at."""


class ConfusionMatrix(Frozen):
    """Which class is taken for which other."""

    labels: tuple[str, ...]
    """Classes, the commonest first; the last may stand for all others together."""
    rows: tuple[tuple[int, ...], ...]
    """[class, class that it is taken for]: held-out rows."""


# -- evaluation metrics ------------------------------------------------------------------------------------------------

Basis = Literal["loss", "tokens", "texts", "labels", "label sets", "numbers"]
"""What a metric is computed from: the loss; the most probable tokens; generated texts; one label a row; several; or a
number."""
Scale = Literal["shares", "scores", "correlations"]
"""`shares` are 0 to 1, `scores` 0 to 100, `correlations` -1 to 1."""

_TASKS: Mapping[Basis, tuple[str, ...]] = {
    "loss": ("seq2seq", "causal", "classification", "regression"),
    "tokens": ("seq2seq", "causal"),
    "texts": ("seq2seq", "causal"),
    "labels": ("classification",),
    "label sets": ("classification",),
    "numbers": ("regression",),
}


class EvaluationMetric(StrEnum):
    """Everything that is known of a metric, but how it is computed."""

    words: str
    """As in a sentence, such as `macro F1`."""
    places: int
    """Digits after the point for people."""
    higher_is_better: bool
    """Else lower is."""
    scale: Scale | None
    """None: it has no end."""
    share_of_rows: bool
    """Each row counts as 0 or 1, and the metric is their mean."""
    bases: tuple[Basis, ...]
    """What it can be computed from."""
    judges: int | None
    """Its rank: of the metrics of an evaluation, that of the lowest one says whether the model is better than before
    training. None: it never does."""
    meaning: str
    """For the reference."""

    def __new__(
        cls,
        name: str,
        words: str,
        places: int,
        better: Literal["higher", "lower"],
        scale: Scale | Literal["share of rows"] | None,
        bases: tuple[Basis, ...],
        judges: int | None,
        meaning: str,
    ) -> EvaluationMetric:
        """One row."""
        metric = str.__new__(cls, name)
        metric._value_ = name
        metric.words, metric.places, metric.higher_is_better = words, places, better == "higher"
        metric.share_of_rows = scale == "share of rows"
        metric.scale = "shares" if scale == "share of rows" else scale
        metric.bases, metric.judges, metric.meaning = bases, judges, meaning
        return metric

    # Name, words, digits after the point, which figures are better, scale, what it is computed from, its rank, meaning.
    # chrF judges first: it needs no words, and so no tokenizer, of any language, and tells inflected forms from wrong
    # words.
    # fmt: off
    LOSS = ("loss", "validation loss", 4, "lower", None, ("loss",), 110,
            "Mean negative log likelihood of a target token (of a classifier: of a row), nats; of a regression the "
            "mean squared error, in float32.")
    PERPLEXITY = "perplexity", "perplexity", 3, "lower", None, ("tokens",), None, "e to the power of the loss."
    TOKEN_ACCURACY = ("token_accuracy", "token accuracy", 4, "higher", "shares", ("tokens",), None,
                      "Share of the target tokens that are the most probable one, given those before them.")
    EXACT_MATCH = ("exact_match", "exact match", 4, "higher", "share of rows", ("texts",), 60,
                   "Share of the generated texts that equal their targets, but for white space around them.")
    CHRF = ("chrf", "chrF", 1, "higher", "scores", ("texts",), 10,
            "F-score of character n-grams, 0 to 100 (as sacrebleu).")
    BLEU = ("bleu", "BLEU", 1, "higher", "scores", ("texts",), 50,
            "Precision of n-grams of words, 0 to 100 (as sacrebleu).")
    ROUGE1 = ("rouge1", "ROUGE-1", 4, "higher", "shares", ("texts",), 30,
              "F1 of words, the mean over rows (as rouge-score).")
    ROUGE2 = ("rouge2", "ROUGE-2", 4, "higher", "shares", ("texts",), 40,
              "F1 of pairs of words, the mean over rows (as rouge-score).")
    ROUGEL = ("rougeL", "ROUGE-L", 4, "higher", "shares", ("texts",), 20,
              "F1 of the longest common subsequence of words, the mean over rows (as rouge-score).")
    ACCURACY = ("accuracy", "accuracy", 4, "higher", "share of rows", ("labels",), 70,
                "Share of the rows whose label is predicted.")
    MACRO_F1 = ("macro_f1", "macro F1", 4, "higher", "shares", ("labels", "label sets"), 90,
                "Mean over the classes of their F1 (as scikit-learn).")
    MICRO_F1 = ("micro_f1", "micro F1", 4, "higher", "shares", ("label sets",), 80,
                "F1 of all labels of all rows (as scikit-learn).")
    SUBSET_ACCURACY = ("subset_accuracy", "subset accuracy", 4, "higher", "share of rows", ("label sets",), 100,
                       "Share of the rows of which exactly the labels are predicted.")
    MSE = ("mse", "mean squared error", 4, "lower", None, ("numbers",), None,
           "Mean squared difference of score and prediction, in squared units of the scores.")
    RMSE = ("rmse", "RMSE", 4, "lower", None, ("numbers",), 105,
            "Root of the mean squared error, in units of the scores.")
    MAE = ("mae", "mean absolute error", 4, "lower", None, ("numbers",), None,
           "Mean absolute difference of score and prediction, in units of the scores.")
    PEARSON = ("pearson", "Pearson r", 4, "higher", "correlations", ("numbers",), None,
               "Linear correlation of scores and predictions; left out where either are all equal.")
    SPEARMAN = ("spearman", "Spearman rho", 4, "higher", "correlations", ("numbers",), None,
                "The same of their ranks, equal ones sharing the mean of theirs.")
    # fmt: on

    def cost(self, value: float) -> float:
        """The same, or its negative: lower is better."""
        return -value if self.higher_is_better else value

    @property
    def of_texts(self) -> bool:
        """Whether it is measured on generated texts."""
        return "texts" in self.bases

    @property
    def tasks(self) -> tuple[str, ...]:
        """Which have it."""
        return tuple(dict.fromkeys(task for basis in self.bases for task in _TASKS[basis]))

    def figure(self, value: float) -> str:
        """Its value for people."""
        return format_figure(value, self.places)


def metrics_of(task: str, *, multi_label: bool = False) -> tuple[EvaluationMetric, ...]:
    """Those that a task has, in the order of the table. `multi_label`: its rows have several labels."""
    others: Basis = "labels" if multi_label else "label sets"
    bases = {basis for basis, tasks in _TASKS.items() if task in tasks} - {others}
    return tuple(metric for metric in EvaluationMetric if bases.intersection(metric.bases))


def judging_metrics(*, by_texts: bool) -> Iterator[EvaluationMetric]:
    """Those that may say whether a model is better, the one that should first. `by_texts`: texts that it writes may."""
    ranked = [(metric.judges, metric) for metric in EvaluationMetric if metric.judges is not None]
    return (metric for _, metric in sorted(ranked) if by_texts or not metric.of_texts)


def metric_words(name: str) -> str:
    """Of a metric that another version may have named."""
    found = _BY_NAME.get(name)
    return name.replace("_", " ") if found is None else found.words


def metric_figure(name: str, value: float) -> str:
    """The same of its value."""
    found = _BY_NAME.get(name)
    return format_figure(value) if found is None else found.figure(value)


def cost_of(metric: str, loss: float | None, metrics: Mapping[str, float]) -> float | None:
    """By this metric, lower is better; None where it was not computed."""
    found = _BY_NAME[metric]
    figure = loss if found is EvaluationMetric.LOSS else metrics.get(metric)
    return None if figure is None else found.cost(figure)


def is_better(cost: float | None, than: float | None) -> bool:
    """Whether it takes the place of the best before it, by their costs (None: there is none). As good is not better: of
    equals the earliest is the best."""
    return cost is not None and (than is None or cost < than)


def chosen_figure(chosen_by: str, loss: float | None, metrics: Mapping[str, float]) -> str | None:
    """The figure by which a checkpoint was chosen, for people; None where it is not known."""
    value = loss if chosen_by == EvaluationMetric.LOSS else metrics.get(chosen_by)
    return None if value is None else metric_figure(chosen_by, value)


def chosen_text(
    chosen_by: str,
    loss: float | None,
    metrics: Mapping[str, float],
    better_step: int | None = None,
    kept_from: str | None = None,
) -> str:
    """By what a checkpoint was chosen, for people, such as `the best by macro F1, 0.8934`. `better_step`: the step that
    was better, and whose checkpoint is missing. `kept_from`: the job that was resumed from, whose checkpoint it is."""
    figure = chosen_figure(chosen_by, loss, metrics)
    among, missing = "", ""
    if better_step is not None:
        among, missing = " of what was saved", f"; step {better_step:,} was better, and its checkpoint is missing"
    if kept_from is not None:
        missing += f"; no step since was better, so that it is still the model of {kept_from}"
    return f"the best by {metric_words(chosen_by)}{among}{'' if figure is None else f', {figure}'}{missing}"


def metric_scale(name: str) -> Scale | None:
    """The same of its scale."""
    found = _BY_NAME.get(name)
    return None if found is None else found.scale


def higher_is_better(name: str) -> bool:
    """The same of its direction."""
    found = _BY_NAME.get(name)
    return found is None or found.higher_is_better


def is_of_texts(name: str) -> bool:
    """The same of whether it is measured on generated texts."""
    found = _BY_NAME.get(name)
    return found is not None and found.of_texts


def is_of_numbers(name: str) -> bool:
    """The same of whether it compares numbers."""
    found = _BY_NAME.get(name)
    return found is not None and "numbers" in found.bases


_BY_NAME: Mapping[str, EvaluationMetric] = {metric.value: metric for metric in EvaluationMetric}
