"""Whether a model is better than before training, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jobs.evaluation_metrics import (
    EvaluationMetric,
    higher_is_better,
    is_of_numbers,
    is_of_texts,
    metric_figure,
    metric_words,
)
from jobs.frozen import Frozen

LEAST_ROWS = 20
"""Fewer rows say too little: intervals of them are too narrow (`benchmarks/evaluation.py`: coverage)."""
Outcome = Literal[
    "better", "worse", "mixed", "no_better", "not_compared", "commonest_class", "mean_score", "writes_nothing"
]
Base = Literal["pretrained", "untrained", "new_head", "at_chance"]
"""`untrained`: random weights; `new_head`: those of the head alone are; `at_chance`: its loss before step 1 is
that of a guess."""
_BASE_WORDS: Mapping[Base, str] = {
    "pretrained": "the base model",
    "untrained": "the untrained base model",
    "new_head": "the base model with an untrained head",
    "at_chance": "the base model, which does no better than chance",
}
_HEADLINES: Mapping[Outcome, str] = {
    "better": "better than before",
    "worse": "worse than before",
    "mixed": "better in one respect and worse in another",
    "no_better": "no better than before",
    "commonest_class": "no better than always answering the commonest class",
    "mean_score": "no better than always answering the mean score",
    "writes_nothing": "but it writes nothing",
}


class ConfidenceInterval(Frozen):
    """In which a figure lies with 95 % confidence, by the rows it was measured on."""

    low: float
    """2.5 % of resamples lie below."""
    high: float
    """2.5 % lie above."""


class BaseDifference(ConfidenceInterval):
    """A figure less that of the model before step 1, of the same rows. An interval without 0 says that they differ."""

    difference: float
    """Above 0: the figure has risen, which is worse for a loss."""


class Verdict(Frozen):
    """Whether the model is better than before training, by one metric."""

    outcome: Outcome
    """`better` or `worse` where the interval of the difference lies on one side of 0, else `no_better`; `mixed`: the
    validation loss or a metric of generated texts says the opposite, as surely; `not_compared`: there is no
    evaluation of the same rows before step 1, or there are too few rows; `commonest_class`: a classifier is not
    surely better than one that always answers the commonest class; `mean_score`: a regression is not surely better than
    always answering the mean; `writes_nothing`: all generated texts are empty."""
    metric: str
    """Name of the metric."""
    value: float
    """Of the model."""
    interval: ConfidenceInterval | None
    """Null: there are too few rows."""
    against_base: BaseDifference | None
    """Null as above."""
    base: Base = "pretrained"
    """What it is compared with."""
    text: str
    """For people, such as `chrF 41.2 (38.9 to 43.6), 12.3 better than the base model (10.1 to 14.6)`."""

    @classmethod
    def of(
        cls,
        metric: str,
        value: float,
        interval: ConfidenceInterval | None,
        against_base: Mapping[str, BaseDifference],
        *,
        base: Base = "pretrained",
        against_commonest: BaseDifference | None = None,
        all_empty: int = 0,
    ) -> Verdict:
        """By this metric, unless the loss or a metric of generated texts contradicts it; what random weights write
        contradicts nothing. `against_base`: of every metric, by name.
        `against_commonest`: a classifier's figure by this metric, less that of the commonest class alone; of a
        regression, less that of the mean score. `all_empty`:
        texts that were generated, if all of them are empty."""
        outcome, remark = _judged(metric, against_base.get(metric), base, certain=interval is not None)
        opposite: Outcome = "better" if outcome == "worse" else "worse"
        others = {
            name: words
            for name, each in against_base.items()
            if name != metric and (name == EvaluationMetric.LOSS or (is_of_texts(name) and base != "untrained"))
            for found, words in [_judged(name, each, base, certain=True)]
            if found == opposite
        }
        if others:
            outcome = "worse" if outcome == "not_compared" else outcome if outcome == "no_better" else "mixed"
            (first, words), *more = others.items()
            also = f", and {opposite} by {' and '.join(metric_words(name) for name, _ in more)}" if more else ""
            remark += f", but by {metric_words(first)} {words}{also}"
        if against_commonest is not None:
            low, high = sorted(_sign(metric) * each for each in (against_commonest.low, against_commonest.high))
            if low <= 0:
                always: Outcome = "mean_score" if is_of_numbers(metric) else "commonest_class"
                outcome = outcome if outcome == "worse" else always
                alone = metric_figure(metric, value - against_commonest.difference)
                than = "worse than" if high < 0 else "not surely better than"
                what = "mean score" if is_of_numbers(metric) else "commonest class"
                remark += f"; {than} always answering the {what} ({alone})"
        text = f"{metric_words(metric)} {measured_text(metric, value, interval)}, {remark}"
        if all_empty:
            empty = f"all {all_empty:,} texts are empty" if all_empty > 1 else "its only text is empty"
            outcome, text = "writes_nothing", f"the model writes nothing, {empty}: {text}"
        return cls(
            outcome=outcome,
            metric=metric,
            value=value,
            interval=interval,
            against_base=against_base.get(metric),
            base=base,
            text=text,
        )

    @property
    def headline(self) -> str | None:
        """For a title, such as `better than before`; None: it is not compared."""
        if self.outcome == "better" and self.base != "pretrained":
            return f"better than {_BASE_WORDS[self.base]}"
        return _HEADLINES.get(self.outcome)

    @property
    def warns(self) -> bool:
        """As of its outcome."""
        return warns(self.outcome)


def warns(outcome: str) -> bool:
    """Whether a person should look at a model of this outcome before anybody uses it."""
    return outcome not in ("better", "not_compared")


def measured(
    loss: float | None, metrics: Mapping[str, float], intervals: Mapping[str, ConfidenceInterval]
) -> dict[str, str]:
    """The loss and the metrics by their words, for people: `{"chrF": "41.2 (38.9 to 43.6)"}`. Of each the interval,
    where there is one."""
    known = {} if loss is None else {EvaluationMetric.LOSS.value: loss}
    return {
        metric_words(name): measured_text(name, value, intervals.get(name))
        for name, value in {**known, **metrics}.items()
    }


def measured_text(metric: str, value: float, interval: ConfidenceInterval | None) -> str:
    """A figure for people, with its interval where there is one: `41.2 (38.9 to 43.6)`."""
    figure = metric_figure(metric, value)
    if interval is None:
        return figure
    return f"{figure} ({metric_figure(metric, interval.low)} to {metric_figure(metric, interval.high)})"


def _judged(metric: str, found: BaseDifference | None, base: Base, *, certain: bool) -> tuple[Outcome, str]:
    than = _BASE_WORDS[base]
    if found is None:
        if certain:
            why = "there is no evaluation of the same rows before step 1; jobs of kind evaluate can measure both"
        else:
            why = f"it takes {LEAST_ROWS} rows; hold out more of them (data.validation, evaluation.max_rows"
            why += ", evaluation.generate_rows)" if is_of_texts(metric) else ")"
        return "not_compared", f"not compared with the base model: {why}"
    gain, *ends = (_sign(metric) * each for each in (found.difference, found.low, found.high))
    low, high = sorted(ends)
    said, least, most = (metric_figure(metric, abs(each)) for each in (gain, low, high))
    if low > 0:
        return "better", f"{said} better than {than} ({least} to {most})"
    if high < 0:
        return "worse", f"{said} worse than {than} ({most} to {least})"
    if low == high == 0:
        return "no_better", f"no better than {than} (the same)"
    return "no_better", f"no better than {than} (between {least} worse and {most} better)"


def _sign(metric: str) -> int:
    return 1 if higher_is_better(metric) else -1
