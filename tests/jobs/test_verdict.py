"""What is said of a model, in words: better only where the interval of the difference leaves out 0."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.verdict import BaseDifference, ConfidenceInterval, Verdict


def change(difference: float, low: float, high: float) -> BaseDifference:
    return BaseDifference(difference=difference, low=low, high=high)


@pytest.mark.parametrize(
    ("metric", "value", "between", "change", "outcome", "text"),
    [
        (
            "chrf", 41.24, (38.91, 43.58), (12.3, 10.1, 14.6), "better",
            "chrF 41.2 (38.9 to 43.6), 12.3 better than the base model (10.1 to 14.6)",
        ),
        (
            "loss", 1.5, (1.4, 1.6), (-0.5, -0.6, -0.4), "better",
            "validation loss 1.5000 (1.4000 to 1.6000), 0.5000 better than the base model (0.4000 to 0.6000)",
        ),
        (
            "accuracy", 0.4, (0.3, 0.5), (-0.1, -0.15, -0.05), "worse",
            "accuracy 0.4000 (0.3000 to 0.5000), 0.1000 worse than the base model (0.0500 to 0.1500)",
        ),
        (
            "perplexity", 9.0, (8.0, 10.0), (1.0, -0.5, 2.5), "no_better",
            "perplexity 9.000 (8.000 to 10.000), no better than the base model (between 2.500 worse and 0.500 better)",
        ),
        (
            "rougeL", 0.0, (0.0, 0.0), (0.0, 0.0, 0.0), "no_better",
            "ROUGE-L 0.0000 (0.0000 to 0.0000), no better than the base model (the same)",
        ),
        (
            "bleu", 3.0, None, None, "not_compared",
            "BLEU 3.0, not compared with the base model: it takes 20 rows; hold out more of them (data.validation, "
            "evaluation.max_rows, evaluation.generate_rows)",
        ),
        (
            "loss", 1.5, None, None, "not_compared",
            "validation loss 1.5000, not compared with the base model: it takes 20 rows; hold out more of them "
            "(data.validation, evaluation.max_rows)",
        ),
        (
            "loss", 1.5, (1.4, 1.6), None, "not_compared",
            "validation loss 1.5000 (1.4000 to 1.6000), not compared with the base model: there is no evaluation of "
            "the same rows before step 1; jobs of kind evaluate can measure both",
        ),
    ],
)  # fmt: skip
def test_a_model_is_better_worse_or_neither(
    metric: str,
    value: float,
    between: tuple[float, float] | None,
    change: tuple[float, float, float] | None,
    outcome: str,
    text: str,
) -> None:
    interval = None if between is None else ConfidenceInterval(low=between[0], high=between[1])
    difference = None if change is None else BaseDifference(difference=change[0], low=change[1], high=change[2])
    found = Verdict.of(metric, value, interval, {} if difference is None else {metric: difference})
    assert (found.outcome, found.text) == (outcome, text)


@pytest.mark.parametrize(
    ("chrf", "loss", "outcome"),
    [
        ((-2.4, -3.8, -0.9), (-5.48, -5.57, -5.39), "mixed"),
        ((2.4, 0.9, 3.8), (0.2, 0.1, 0.3), "mixed"),
        ((2.4, 0.9, 3.8), (-5.48, -5.57, -5.39), "better"),
        ((-2.4, -3.8, -0.9), (-0.1, -0.3, 0.1), "worse"),
        ((0.4, -0.8, 1.6), (-5.48, -5.57, -5.39), "no_better"),
    ],
)
def test_a_loss_that_says_the_opposite_makes_it_mixed(
    chrf: tuple[float, float, float], loss: tuple[float, float, float], outcome: str
) -> None:
    found = Verdict.of(
        "chrf", 18.1, ConfidenceInterval(low=16.8, high=19.6), {"chrf": change(*chrf), "loss": change(*loss)}
    )
    assert found.outcome == outcome
    assert ("but by validation loss" in found.text) == (outcome == "mixed")


def test_what_is_mixed_is_said_of_both() -> None:
    both = {"chrf": change(-2.4, -3.8, -0.9), "loss": change(-5.48, -5.57, -5.39)}
    assert Verdict.of("chrf", 18.1, ConfidenceInterval(low=16.8, high=19.6), both).text == (
        "chrF 18.1 (16.8 to 19.6), 2.4 worse than the base model (0.9 to 3.8), but by validation loss 5.4800 better "
        "than the base model (5.3900 to 5.5700)"
    )


DOWN = {
    "loss": change(-0.5, -0.6, -0.4),
    "exact_match": change(-0.4, -0.5, -0.3),
    "chrf": change(-12.0, -14.0, -10.0),
    "rougeL": change(0.1, -0.1, 0.3),
}


def by_loss(against_base: dict[str, BaseDifference], **more: Any) -> Verdict:
    return Verdict.of("loss", 1.5, ConfidenceInterval(low=1.4, high=1.6), against_base, **more)


def test_generated_texts_that_became_worse_contradict_a_loss_that_fell() -> None:
    found = by_loss(DOWN)
    assert (found.outcome, found.warns) == ("mixed", True)
    assert found.headline == "better in one respect and worse in another"
    assert found.text.endswith(
        "but by exact match 0.4000 worse than the base model (0.3000 to 0.5000), and worse by chrF"
    )
    unclear = {**DOWN, "loss": change(0.0, -0.1, 0.1)}
    assert by_loss(unclear).outcome == "no_better" and "but by exact match 0.4000 worse" in by_loss(unclear).text


def test_what_random_weights_wrote_contradicts_nothing_and_they_are_called_untrained() -> None:
    found = by_loss(DOWN, base="untrained")
    assert (found.outcome, found.warns, found.headline) == ("better", False, "better than the untrained base model")
    assert found.text.endswith(", 0.5000 better than the untrained base model (0.4000 to 0.6000)")


@pytest.mark.parametrize("against_base", [{}, DOWN, {"loss": DOWN["loss"]}])
def test_a_model_that_writes_nothing_is_never_called_better(against_base: dict[str, BaseDifference]) -> None:
    found = by_loss(against_base, base="untrained", all_empty=64)
    assert (found.outcome, found.warns, found.headline) == ("writes_nothing", True, "but it writes nothing")
    assert found.text.startswith("the model writes nothing, all 64 texts are empty: validation loss 1.5000 (")


@pytest.mark.parametrize(
    ("commonest", "outcome", "than"),
    [
        ((0.02, -0.01, 0.05), "commonest_class", "not surely better than"),
        ((0.0, 0.0, 0.0), "commonest_class", "not surely better than"),
        ((-0.1, -0.2, 0.0), "commonest_class", "not surely better than"),
        ((-0.2, -0.3, -0.1), "commonest_class", "worse than"),
        ((0.2, 0.1, 0.3), "better", None),
    ],
)
def test_a_classifier_that_is_no_better_than_the_commonest_class_says_so(
    commonest: tuple[float, float, float], outcome: str, than: str | None
) -> None:
    found = Verdict.of(
        "accuracy", 0.6, ConfidenceInterval(low=0.5, high=0.7), {"accuracy": change(0.3, 0.2, 0.4)}, base="new_head",
        against_commonest=change(*commonest),
    )  # fmt: skip
    assert (found.outcome, found.warns) == (outcome, outcome != "better")
    assert "0.3000 better than the base model with an untrained head (0.2000 to 0.4000)" in found.text
    said = f"; {than} always answering the commonest class ({0.6 - commonest[0]:.4f})"
    assert found.text.endswith(said) == (than is not None)


@pytest.mark.parametrize(
    ("alone", "outcome", "than"),
    [
        ((-0.02, -0.05, 0.01), "mean_score", "not surely better than"),
        ((0.2, 0.1, 0.3), "mean_score", "worse than"),
        ((-0.2, -0.3, -0.1), "better", None),
    ],
)
def test_a_regression_that_is_no_better_than_the_mean_score_says_so(
    alone: tuple[float, float, float], outcome: str, than: str | None
) -> None:
    found = Verdict.of(
        "rmse", 0.6, ConfidenceInterval(low=0.5, high=0.7), {"rmse": change(-0.3, -0.4, -0.2)}, base="new_head",
        against_commonest=change(*alone),
    )  # fmt: skip
    assert (found.outcome, found.warns) == (outcome, outcome != "better")
    assert "0.3000 better than the base model with an untrained head (0.2000 to 0.4000)" in found.text
    said = f"; {than} always answering the mean score ({0.6 - alone[0]:.4f})"
    assert found.text.endswith(said) == (than is not None)
