"""Whether a model is better than before training, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jobs.evaluation_metrics import EvaluationMetric, higher_is_better, is_of_texts, metric_figure, metric_words
from jobs.frozen import Frozen

LEAST_ROWS = 20
"""Fewer rows say too little: intervals of them are too narrow (`benchmarks/evaluation.py`: coverage)."""
Outcome = Literal["better", "worse", "mixed", "no_better", "not_compared"]


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
    validation loss says the opposite, as surely; `not_compared`: there is no evaluation of the same rows before step 1,
    or there are too few rows."""
    metric: str
    """Name of the metric."""
    value: float
    """Of the model."""
    interval: ConfidenceInterval | None
    """Null: there are too few rows."""
    against_base: BaseDifference | None
    """Null as above."""
    text: str
    """For people, such as `chrF 41.2 (38.9 to 43.6), 12.3 better than the base model (10.1 to 14.6)`."""

    @classmethod
    def of(
        cls,
        metric: str,
        value: float,
        interval: ConfidenceInterval | None,
        against_base: BaseDifference | None,
        loss_against_base: BaseDifference | None = None,
    ) -> Verdict:
        """By this metric, unless the loss contradicts it."""
        outcome, remark = _judged(metric, against_base, certain=interval is not None)
        by_loss, other = _judged(EvaluationMetric.LOSS, loss_against_base, certain=True)
        if {outcome, by_loss} == {"better", "worse"}:
            outcome, remark = "mixed", f"{remark}, but by {EvaluationMetric.LOSS.words} {other}"
        return cls(
            outcome=outcome,
            metric=metric,
            value=value,
            interval=interval,
            against_base=against_base,
            text=f"{metric_words(metric)} {measured_text(metric, value, interval)}, {remark}",
        )


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


def _judged(metric: str, found: BaseDifference | None, *, certain: bool) -> tuple[Outcome, str]:
    if found is None:
        if certain:
            why = "there is no evaluation of the same rows before step 1; jobs of kind evaluate can measure both"
        else:
            why = f"it takes {LEAST_ROWS} rows; hold out more of them (data.validation, evaluation.max_rows"
            why += ", evaluation.generate_rows)" if is_of_texts(metric) else ")"
        return "not_compared", f"not compared with the base model: {why}"
    sign = 1 if higher_is_better(metric) else -1
    gain, *ends = (sign * each for each in (found.difference, found.low, found.high))
    low, high = sorted(ends)
    said, least, most = (metric_figure(metric, abs(each)) for each in (gain, low, high))
    if low > 0:
        return "better", f"{said} better than the base model ({least} to {most})"
    if high < 0:
        return "worse", f"{said} worse than the base model ({most} to {least})"
    if low == high == 0:
        return "no_better", "no better than the base model (the same)"
    return "no_better", f"no better than the base model (between {least} worse and {most} better)"
